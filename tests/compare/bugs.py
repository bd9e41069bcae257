"""What is broken on purpose in the comparison, the report and what a person is shown, and the test that sees it."""

from __future__ import annotations

from support.planted import Bug

P, G, N = "tests/compare/test_parting.py", "tests/compare/test_page.py", "tests/compare/test_notebook_and_open.py"

BUGS = [
    Bug(
        "where they leave the noise leads",
        "compare.words:_seen_later",
        "found.seen_at != found.step and",
        "False and",
        f"{P}::test_where_they_leave_the_noise_comes_before_the_step_back_to_which_a_site_was_out",
    ),
    Bug(
        "what follows from a setting comes behind it",
        "compare.fact_kinds:is_consequence",
        "return other_recipe and _OF_RECIPE.fullmatch(fact) is not None",
        "return _OF_RECIPE.fullmatch(fact) is not None",
        f"{P}::test_settings_come_before_what_follows_from_them",
    ),
    Bug(
        "a direction that only one has is named",
        "compare.answer:_only",
        'if (s["module"], s["operand"]) in shared else ""',
        'if False else ""',
        f"{P}::test_of_a_site_that_both_have_in_another_direction_the_direction_is_named",
    ),
    Bug(
        "what differs first among twins is the origin",
        "compare.first_difference:find",
        "if 0 < identical <= seen and not",
        "if 0 < identical < 0 and not",
        f"{P}::test_the_origin_lies_where_twins_first_differ_though_the_noise_hides_it_for_long",
    ),
    Bug(
        "rounding is no origin",
        "compare.first_difference:_only_bits",
        "return seen - at > BACK // 2",
        "return False and seen - at > BACK // 2",
        f"{P}::test_rounding_long_before_is_not_the_origin",
    ),
    Bug(
        "one measurement is no parting",
        "compare.bands:first_lasting",
        "(out & many[:n])",
        "out",
        f"{P}::test_a_single_step_is_no_parting_and_one_that_is_far_out_is",
    ),
    Bug(
        "not finite on one side is a parting",
        "compare.first_difference:find",
        "a.bad != b.bad",
        "a.bad & b.bad",
        f"{P}::test_what_is_not_finite_on_one_side_alone_is_a_parting_and_on_both_is_none",
    ),
    Bug(
        "a drift is seen",
        "compare.bands:drift",
        "out = np.abs(middle) > limit",
        "out = np.abs(middle) > np.inf * limit",
        f"{P}::test_a_loss_that_drifts_is_seen_though_no_step_leaves_the_band",
    ),
    Bug(
        "other weights are said",
        "compare.first_difference:find",
        "(kinds & ~same_bits[:, 0])",
        "(kinds & same_bits[:, 0] & ~same_bits[:, 0])",
        f"{P}::test_other_weights_at_the_start_are_said_and_their_amax_is_not_held_against_each_other",
    ),
    Bug(
        "a gap before a parting is said",
        "compare.words:_place",
        "found.step - found.within_at > 1",
        "found.step - found.within_at > 1000",
        f"{P}::test_a_gap_before_the_parting_is_said",
    ),
    Bug(
        "data that nobody named were not looked at",
        "compare.words:not_looked_at",
        "if of.steps and not of.num_named_data:",
        "if of.steps and of.num_named_data:",
        f"{P}::test_nothing_measured_is_nothing_said",
    ),
    Bug(
        "the sentence of the page is that of the API",
        "server/fp8watch_server/pages/templates/compare.html",
        "{{ found.sentence|whole }}</p>",
        "{{ found.sentence[:20]|whole }}</p>",
        f"{G}::test_api_page_and_command_say_the_same_sentence",
    ),
    Bug(
        "a redacted report has other names",
        "pages.report_sections:subject_of",
        '"title": rename(incident["title"])',
        '"title": incident["title"]',
        f"{G}::test_a_redacted_report_holds_no_name",
    ),
    Bug(
        "a report links nowhere",
        "pages.report_sections:charts",
        "_unlinked(first_chart.training_chart(shown, marks, low, high))",
        "first_chart.training_chart(shown, marks, low, high)",
        f"{G}::test_a_report_is_one_file_that_loads_nothing",
    ),
    Bug(
        "a terminal obeys no name",
        "terminal.text:plain",
        "str(value).translate(CONTROL)",
        "str(value)",
        f"{G}::test_top_is_drawn_by_rich_and_a_terminal_obeys_no_name",
    ),
    Bug(
        "a cell that is run again attaches anew",
        "session.rerun_cell:interactive",
        'return hasattr(sys, "ps1") or',
        "return",
        f"{N}::test_a_cell_that_is_run_again_attaches_anew_and_the_run_goes_on",
    ),
    Bug(
        "a script that attaches twice keeps its first",
        "session.rerun_cell:before",
        "if interactive() else None",
        "if True else None",
        "tests/attach/test_refusals.py::test_attach_twice_watches_once",
    ),
    Bug(
        "the spool that is used is named",
        "session.attach_line:attach_line",
        "spool_words(recorder.spool_dir, settings.spool_dir)",
        "spool_words(settings.spool_dir, settings.spool_dir)",
        f"{N}::test_the_spool_that_is_named_is_the_one_that_is_used",
    ),
    Bug(
        "what was over before anybody saw it asks in a terminal",
        "terminal.text:needs",
        '(run.get("num_unseen_incidents"), "not seen yet")',
        '(0, "not seen yet")',
        f"{G}::test_a_failure_that_was_over_before_anybody_saw_it_asks_in_a_terminal_and_on_a_card",
    ),
    Bug(
        "a card shows a name as text",
        "session.card:_incidents",
        'escape(str(first["title"])[:90])',
        'str(first["title"])[:90]',
        f"{N}::test_a_card_shows_open_incidents_loss_and_the_link_and_a_name_is_text",
    ),
    Bug(
        "a spool that is shown stays as it is",
        "open.command:_open_spool",
        "shutil.copyfile(path, spool / path.name)",
        "shutil.move(path, spool / path.name)",
        f"{N}::test_a_spool_is_shown_as_a_copy_and_a_report_is_told_from_other_pages",
    ),
]
