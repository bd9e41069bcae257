"""What is broken on purpose in maps, pictures, texts and forms of the pages, and the test that sees it."""

from __future__ import annotations

from support.planted import Bug

P = "server/fp8watch_server/pages"
J = f"{P}/static"
B = "tests/browser"
T = "tests/pages"
DONE_AGAIN = f"{T}/test_done_again.py::test_the_panel_of_tiles_asks_for_the_map_of_its_own_attempt"
OF_ONE_ATTEMPT = f"{B}/test_tile_map_steps.py::test_a_map_of_one_attempt_asks_for_that_attempt_at_each_step"

BUGS = [
    Bug(
        "the panel of an incident shows the map of its attempt",
        "pages.routes:incident_page",
        'incident["attempt"] if run["attempt"] > 1 else None',
        "None",
        DONE_AGAIN,
    ),
    Bug(
        "a map is of the attempt that is asked for",
        "store.tile_maps:tile_map",
        "kept_map(conn, run_id, site, step, rank, attempt)",
        "kept_map(conn, run_id, site, step, rank)",
        DONE_AGAIN,
    ),
    Bug(
        "the page of a map shows that of the attempt",
        "pages.routes:tile_map_page",
        'found["id"], step, rank, attempt)',
        'found["id"], step, rank)',
        DONE_AGAIN,
    ),
    Bug(
        "a map of one attempt asks for that attempt",
        f"{J}/tile_map.js",
        "row, attempt: this.attempt })",
        "row })",
        OF_ONE_ATTEMPT,
    ),
    Bug(
        "the tiles under a map are of its attempt",
        f"{J}/tile_map.js",
        '${this.attempt ? `&attempt=${this.attempt}` : ""}`, {',
        "`, {",
        OF_ONE_ATTEMPT,
    ),
    Bug(
        "the part of a map that is given holds its worst tile",
        "tile_maps:_window",
        "row = worst[0] // columns if worst else 0",
        "row = 0",
        f"{T}/test_large_tile_maps.py::test_of_a_map_that_is_too_large_the_rows_around_its_worst_tile_are_given",
    ),
    Bug(
        "a tile of another part of the map is drawn",
        f"{J}/tile_map.js",
        "!this.isHere(tile)) return this.load(",
        "!this.isHere(tile)) return this.hover && (",
        f"{B}/test_tile_map_steps.py::test_a_map_that_comes_in_parts_leads_to_each_of_its_tiles",
    ),
    Bug(
        "the list under a map is of the step that is drawn",
        f"{J}/tile_map.js",
        "this.listed = Number(d.step);",
        "this.listed = this.steps?.now ?? Number(d.step) + 1;",
        f"{B}/test_tile_map_steps.py::test_the_list_of_tiles_is_of_the_step_that_is_shown_however_early_it_moves",
    ),
    Bug(
        "a redacted report does not name the batch",
        "pages.report_sections:subject_of",
        'without_batch(f["text"])',
        'f["text"]',
        f"{T}/test_redacted_report.py::test_names_of_batches_logged_scalars_and_modules_that_were_left_out_are_replaced",
    ),
    Bug(
        "a redacted report does not name what was logged",
        "pages.report_sections:subject_of",
        'f"scalar{i}"',
        "name",
        f"{T}/test_redacted_report.py::test_names_of_batches_logged_scalars_and_modules_that_were_left_out_are_replaced",
    ),
    Bug(
        "names in a cause are no markup",
        f"{P}/templates/incident.html",
        "'The cause is not known.')|prose",
        "'The cause is not known.')|inline",
        f"{T}/test_texts_of_incidents.py::test_names_in_sentences_are_no_markup",
    ),
    Bug(
        "names in a fix are no markup",
        "pages.fixes:render",
        "prose(rest)",
        'Markup(rest.replace("*", ""))',
        f"{T}/test_fixes.py::test_names_in_a_fix_are_no_markup {T}/test_fixes.py::test_a_long_hostile_fix_is_rendered_quickly_and_cut",
    ),
    Bug(
        "the way to a map leads to a step that was kept",
        "pages.lookup:nearest",
        "abs(s - step)",
        "s",
        f"{T}/test_way_to_a_map.py::test_the_button_of_a_site_leads_to_the_nearest_step_that_was_kept",
    ),
    Bug(
        "a click on a point leads to the map of the nearest step that was kept",
        f"{J}/site.js",
        "Math.abs(step - at) < Math.abs(best - at)",
        "step < best",
        f"{B}/test_site_and_ranges.py::test_a_click_leads_to_the_map_of_the_nearest_step_that_was_kept",
    ),
    Bug(
        "an SQNR of Inf at the head of a site is no alarm",
        f"{P}/templates/site.html",
        "f.value == 'inf' %}",
        "f.value == 'nan' %}",
        f"{T}/test_without_loss.py::test_the_page_of_a_site_that_lost_nothing_says_so",
    ),
    Bug(
        "an SQNR of Inf is no alarm in its chart",
        f"{J}/charts.js",
        "lossless(w) ? stroke : colour",
        "false ? stroke : colour",
        f"{B}/test_without_loss.py::test_what_lost_nothing_is_not_marked_as_an_alarm",
    ),
    Bug(
        "a comment is read whole",
        f"{P}/templates/incident.html",
        "{{ said|whole }}",
        "{{ said|cut }}",
        f"{T}/test_texts_of_incidents.py::test_a_comment_is_read_whole",
    ),
    Bug(
        "a comment is read whole in a report",
        f"{P}/templates/report/reached.html",
        "{{ text|whole }}",
        "{{ text|cut }}",
        f"{T}/test_texts_of_incidents.py::test_a_comment_is_read_whole",
    ),
    Bug(
        "a note is read whole",
        f"{P}/templates/run.html",
        "{{ run.note|whole }}",
        "{{ run.note|cut }}",
        f"{T}/test_texts_of_incidents.py::test_a_note_on_a_run_is_read_whole",
    ),
    Bug(
        "a person is shown a page when the database refuses",
        "http.errors:_on_database",
        "if asked_by_a_person(request.scope):",
        "if False:",
        f"{T}/test_database_refuses.py::test_a_refused_connection",
    ),
    Bug(
        "a person is shown a page when tokens cannot be read",
        "auth.tokens:Auth.__call__",
        "refusal.status == 503 and",
        "False and",
        f"{T}/test_database_refuses.py::test_tokens_that_cannot_be_read",
    ),
    Bug(
        "a picture of tiles is asked for again when its incident moves",
        f"{P}/templates/incidents.html",
        "-{{ i.first_step }}-{{ i.updated_at }}",
        "-{{ i.first_step }}",
        f"{T}/test_inbox.py::test_a_picture_of_tiles_has_another_address_when_its_incident_moves",
    ),
    Bug(
        "a note is offered for editing as it is stored",
        f"{P}/templates/run.html",
        ">{{ run.note|exact }}</textarea>",
        ">{{ run.note }}</textarea>",
        f"{T}/test_forms_keep_text.py::test_marks_of_direction_are_offered_as_they_are_and_shown_as_escapes",
    ),
    Bug(
        "what a form offers is escaped",
        "pages.templating:_exact",
        "Exact(escape(value))",
        "Exact(value)",
        f"{T}/test_forms_keep_text.py::test_marks_of_direction_are_offered_as_they_are_and_shown_as_escapes",
    ),
]
