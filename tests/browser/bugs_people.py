"""What is broken on purpose in what people say of runs and incidents, and the test that sees it."""

from __future__ import annotations

from support.planted import Bug

P = "server/fp8watch_server/pages"
T = "tests/pages"
COMPARE = "tests/browser/test_compare.py"
TRIAGE = "tests/incidents/test_triage.py"

BUGS = [
    Bug(
        "a failure that is over asks to be seen",
        "store.incident_states:state_of",
        'incident["seen_at"] is None and incident["severity"] in ASKS_TO_BE_SEEN',
        "False",
        f"{TRIAGE}::test_a_critical_failure_does_not_close_itself_unseen",
    ),
    Bug(
        "a cause that comes back has regressed",
        "incidents.causes:remember",
        "marked.closed_as == FIXED",
        "marked.closed_as != FIXED",
        f"{TRIAGE}::test_a_cause_that_was_fixed_and_comes_back_has_regressed_and_has_its_owner",
    ),
    Bug(
        "calm says how often sites are measured",
        "pages.headline:Watched.each",
        "if self.share >= EACH_STEP_FROM:",
        "if self.share >= 0:",
        f"{T}/test_headline.py::test_every_state_of_a_run_has_its_sentence_and_every_orange_its_reason",
    ),
    Bug(
        "a run that ended with a failure comes before healthy ones",
        "store.run_list:_need",
        "(some(critical), CRITICAL_UNSEEN),",
        "",
        f"{T}/test_run_list.py::test_what_needs_somebody_comes_first_whether_it_runs_or_has_ended",
    ),
    Bug(
        "a per cent sign is searched as one",
        "store.run_list:_like",
        "autoescape=True",
        "autoescape=False",
        f"{T}/test_run_list.py::test_search_and_filters",
    ),
    Bug(
        "a run that goes on leaves the archive",
        "store.registrations:register_run",
        '"last_seen_at", "archived_at"]',
        '"last_seen_at"]',
        f"{T}/test_run_list.py::test_tags_note_archive_and_delete",
    ),
    Bug(
        "what is said of a cause goes to all runs",
        "api.incident_actions:_change_in",
        "sum([_apply(request, conn, dict(row), change, now) for row in asking])",
        "sum([_apply(request, conn, dict(row), change, now) for row in asking[:1]])",
        f"{T}/test_inbox.py::test_a_cause_is_one_row_over_runs_and_what_is_said_of_it_goes_to_all",
    ),
    Bug(
        "a run that did not come as far proves nothing",
        "pages.what_helped:_proves",
        "r.last_step >= far, ",
        "",
        f"{T}/test_inbox.py::test_what_is_no_evidence_is_not_said_to_have_helped",
    ),
    Bug(
        "a cause that came back shows what helped the last time",
        "pages.what_helped:what_helped",
        "if last.created_at >= newest:",
        "if last.created_at >= newest or k:",
        f"{T}/test_inbox.py::test_a_cause_that_came_back_shows_what_helped_the_last_time_and_what_is_here_now",
    ),
    Bug(
        "a run in which the place was not looked at proves nothing",
        "pages.what_helped:_proves",
        "sa.exists().where(*looked)",
        "sa.true()",
        f"{T}/test_inbox.py::test_an_incident_shows_its_cause_in_other_runs_and_what_helped",
    ),
    Bug(
        "a run that kept the layer out of FP8 counts",
        "pages.what_helped:_leaves_fp8",
        'bool(incident["place"].get("module"))',
        "False",
        f"{T}/test_inbox.py::test_a_later_run_that_kept_the_layer_out_of_fp8_is_what_helped_unless_fp8_was_not_the_cause",
    ),
    Bug(
        "no setting of FP8 has helped where FP8 was not the cause",
        "pages.what_helped:_differences",
        "read = _of_training if shared else _facts",
        "read = _facts",
        f"{T}/test_inbox.py::test_no_setting_of_fp8_has_helped_where_fp8_was_not_the_cause",
    ),
    Bug(
        "what follows from others has not helped",
        "pages.what_helped:_differences",
        " and not is_consequence(n, other_recipe=other)",
        "",
        f"{T}/test_inbox.py::test_what_is_no_evidence_is_not_said_to_have_helped",
    ),
    Bug(
        "a run of another job is no evidence",
        "pages.what_helped:_same_job",
        "return r.name.startswith(stem, autoescape=True) if stem else r.name == name",
        "return sa.true()",
        f"{T}/test_inbox.py::test_what_is_no_evidence_is_not_said_to_have_helped",
    ),
    Bug(
        "runs without an owner stand behind those with one, in either order",
        "store.run_list:find_over",
        "order = (nothing, ",
        "order = (",
        f"{T}/test_run_list.py::test_columns_sort_both_ways",
    ),
    Bug(
        "where no checkpoint was seen, the last step before the failure is said",
        "store.checkpoints:first_bad",
        "min((b.step for b in",
        "min((b.step + 1 for b in",
        f"{T}/test_checkpoints.py::test_where_no_checkpoint_was_seen_the_last_step_of_a_clean_one_is_said",
    ),
    Bug(
        "a run is held against one that began before it",
        "store.run_list:run_before",
        'r.created_at < run["created_at"],',
        "",
        f"{T}/test_run_list.py::test_a_run_is_held_against_the_newest_before_it_of_its_name_else_the_newest",
    ),
    Bug(
        "a headline says when its run broke first",
        "pages.headline:_asking",
        "if before < first:",
        "if False:",
        f"{T}/test_headline.py::test_a_run_that_broke_before_what_is_said_says_when_it_broke_first",
    ),
    Bug(
        "what was critical comes before what is open",
        "pages.page_queries:_by_state",
        "return (0 if asks else 1 + state), severity, state,",
        "return (0 if asks else 1 + state), state, severity,",
        f"{T}/test_headline.py::test_what_was_critical_and_nobody_saw_comes_before_a_warning_that_is_open",
    ),
    Bug(
        "a person is shown a page while the database is away",
        "http.db_timeout:DbTimeoutMiddleware.__call__",
        "if asked_by_a_person(scope):",
        "if False:",
        "tests/collector/test_database_away.py::test_a_person_is_shown_a_page_that_looks_again",
    ),
    Bug(
        "what lies outside of a band does not feed it",
        "store.deviation:deviations",
        "there & (~is_out | anew)",
        "there",
        f"{T}/test_deviation.py::test_a_value_outside_of_its_band_neither_feeds_it_nor_is_usual_before_its_time",
    ),
    Bug(
        "a weight that walks is no weight that broke",
        "store.deviation:deviations",
        "middle = np.where(walking, before, around)",
        "middle = _median(past, num_past)",
        f"{T}/test_deviation.py::test_a_weight_that_walks_stays_calm_and_one_that_leaps_stands_out_until_it_is_usual",
    ),
    Bug(
        "a zoom knows what was usual before it",
        "pages.health:_deviations",
        "max(0, first - before)",
        "first",
        f"{T}/test_deviation.py::test_map_and_worst_sites_show_the_site_that_left_its_band",
    ),
    Bug(
        "any run can be found for a comparison",
        "store.run_list:newest_over",
        "*_words(q)]",
        "]",
        f"{T}/test_run_list.py::test_any_run_can_be_found_for_a_comparison_beyond_the_newest_that_are_offered",
    ),
    Bug(
        "a search does not take back what was chosen",
        f"{P}/static/find_runs.js",
        'list.value = kept?.value ?? "";',
        'list.value = "";',
        f"{COMPARE}::test_a_run_beyond_those_that_are_offered_is_found_by_what_is_typed_and_what_is_chosen_stays",
    ),
    Bug(
        "an incident leads to the run before",
        "pages.next_questions:_beside",
        "if before is None:",
        "if True:",
        f"{COMPARE}::test_an_incident_leads_to_what_differs_from_the_run_before",
    ),
    Bug(
        "nothing is deleted without a question",
        f"{P}/static/runs.js",
        'resolve(dialog.returnValue === "yes");',
        "resolve(true);",
        "tests/browser/test_runs_and_inbox.py::test_runs_are_searched_walked_through_tagged_archived_and_deleted",
    ),
]
