"""What is broken on purpose in the pages, and the test that sees it: a promise a line."""

from __future__ import annotations

from planted import Bug

P = "server/fp8watch_server/pages"
J = f"{P}/static"
B = "tests/browser"
T = "tests/pages"

BUGS = [
    Bug(
        "a copy is confirmed on the button that a refresh puts in its place",
        f"{J}/actions.js",
        'document.addEventListener("fp8watch:live", sayCopied);',
        "",
        f"{B}/test_pages_in_a_browser.py::test_a_copy_is_confirmed_on_the_button_that_a_refresh_puts_in_its_place",
    ),
    Bug(
        "what was never quantised is no alarm",
        "pages.health:_grid",
        'if what == "inf" and found["field"] == "tile_sqnr_db":',
        "if False:",
        f"{T}/test_health_map.py::test_what_was_never_quantised_is_no_alarm_and_its_nan_is_one",
    ),
    Bug(
        "the worst of a layer is the lowest SQNR",
        "pages.health:health_map",
        'sign = 1.0 if field in SERIES_FIELDS and SERIES_FIELDS[field].worst == "min" else -1.0',
        "sign = -1.0",
        f"{T}/test_health_map.py::test_the_worst_of_a_layer_is_named_with_its_site",
    ),
    Bug(
        "ten thousand sites are a bounded map",
        "store.site_rows:rows_of",
        "if len(modules) > max_rows:",
        "if False:",
        f"{T}/test_health_map.py::test_ten_thousand_sites_are_a_bounded_map",
    ),
    Bug(
        "ranks that need somebody come first",
        "coverage:agents",
        'rows.sort(key=lambda r: (r["well"], r["rank"]))',
        'rows.sort(key=lambda r: r["rank"])',
        f"{T}/test_coverage_and_agents.py::test_ranks_that_need_somebody_come_first_and_are_counted",
    ),
    Bug(
        "a run that falls silent is told of though nothing is written",
        "pages.live:version",
        "[[*row, now - row.last_seen_at > STALLED_AFTER_S] for row in conn.execute(runs)]",
        "[[*row] for row in conn.execute(runs)]",
        f"{T}/test_coverage_and_agents.py::test_version_changes_with_steps_incidents_silences_and_silence_of_the_run",
    ),
    Bug(
        "a page hears of what came after it was made",
        f"{J}/live.js",
        "if (seen !== null && data !== seen) changed();",
        "if (seen === null) changed();",
        f"{B}/test_live.py::test_new_steps_and_incidents_appear_without_a_reload",
    ),
    Bug(
        "a page that nobody sees holds no connection",
        f"{J}/live.js",
        "(document.hidden ? disconnect() : connect())",
        "connect()",
        f"{B}/test_live.py::test_a_page_that_nobody_sees_holds_no_connection",
    ),
    Bug(
        "a silence ends when it was said to",
        f"{J}/actions.js",
        "Number(form.elements.duration.value)",
        "3600",
        f"{B}/test_live.py::test_an_incident_is_silenced_for_a_while_and_heard_again",
    ),
    Bug(
        "the broken tile has the colour of alarms",
        f"{J}/tile_flags.js",
        "export const BROKEN = NONFINITE | FLAG.SENTINEL;",
        "export const BROKEN = FLAG.NAN;",
        f"{B}/test_pages_in_a_browser.py::test_broken_tile_is_drawn_in_the_colour_of_alarms",
    ),
    Bug(
        "what is off-scale is seen on any colour",
        f"{J}/tile_paint.js",
        'g.strokeStyle = "#0d1116";\n      g.strokeRect(left + thick / 2',
        'g.strokeStyle = "#ffffff";\n      g.strokeRect(left + thick / 2',
        f"{B}/test_tile_map_steps.py::test_what_is_off_scale_is_seen_on_any_colour",
    ),
    Bug(
        "the worst tile is sought in all steps",
        f"{J}/tile_map.js",
        "const step = this.steps.worst();",
        "const step = this.steps.now;",
        f"{B}/test_tile_map_steps.py::test_worst_tile_is_found_from_any_step",
    ),
    Bug(
        "a click waits for what is bad to be known",
        f"{J}/tile_map.js",
        "await this.steps.known;",
        "",
        f"{B}/test_tile_map_steps.py::test_a_click_that_is_faster_than_the_data_waits_for_it",
    ),
    Bug(
        "a key waits for the first map",
        f"{J}/tile_map.js",
        "if (!this.map) await this.load(this.steps.now);",
        "",
        f"{B}/test_tile_map_steps.py::test_a_click_that_is_faster_than_the_data_waits_for_it",
    ),
    Bug(
        "a fault does not become usual",
        f"{J}/baseline.js",
        "if (outside > 0) return;",
        "",
        f"{B}/test_site_and_ranges.py::test_a_band_feeds_on_what_was_usual_only",
    ),
    Bug(
        "a zoom is read anew from the server",
        f"{J}/range.js",
        'document.dispatchEvent(new CustomEvent("fp8watch:range"));',
        "",
        f"{B}/test_site_and_ranges.py::test_a_zoom_is_of_all_charts_in_the_address_and_read_anew",
    ),
    Bug(
        "no line goes through what is no number",
        "first_chart:strokes",
        "            broken = True\n            continue",
        "            continue",
        f"{T}/test_first_chart.py::test_what_is_no_number_breaks_the_line_and_has_a_mark_of_its_own",
    ),
    Bug(
        "no line goes over what was not measured",
        "first_chart:strokes",
        "gap = before is not None and steps[i] - before > reach",
        "gap = False",
        f"{T}/test_first_chart.py::test_what_was_not_logged_is_a_gap_and_a_point_alone_a_dot",
    ),
    Bug(
        "the extremes of a million steps are kept",
        "series:thin",
        "keep = [lowest[any_number], highest[any_number], first_nan[first_nan < n]]",
        "keep = [lowest[any_number], first_nan[first_nan < n]]",
        f"{T}/test_first_chart.py::test_of_a_million_steps_the_extremes_are_kept_and_the_rest_is_bounded",
    ),
    Bug(
        "a value stands at its height",
        "first_chart:_panel",
        "return round(height * (high - value / unit) / (high - low), 1)",
        "return round(height * (value / unit - low) / (high - low), 1)",
        f"{T}/test_first_chart.py::test_strange_numbers_have_a_place "
        f"{B}/test_first_chart.py::test_plotly_takes_its_place_and_the_chart_does_not_jump "
        f"{T}/test_first_chart.py::test_of_a_million_steps_the_extremes_are_kept_and_the_rest_is_bounded",
    ),
    Bug(
        "what takes long does not hold back the first chart",
        f"{P}/templates/run.html",
        "{{ part() }}",
        "",
        f"{T}/test_first_chart.py::test_what_takes_long_is_sent_after_the_first_chart",
    ),
    Bug(
        "what plotly has drawn lies on nothing",
        f"{J}/charts.js",
        "byServer?.remove();",
        "",
        f"{B}/test_first_chart.py::test_plotly_takes_its_place_and_the_chart_does_not_jump",
    ),
    Bug(
        "names in charts are text",
        f"{J}/basics.js",
        'String(value).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");',
        "String(value);",
        f"{B}/test_hostile_charts.py::test_where_the_mouse_rests "
        f"{B}/test_hostile_charts.py::test_on_the_axis_of_the_health_map",
    ),
    Bug(
        "a lost collector is told of",
        f"{J}/live.js",
        'say("off", "collector not reachable, trying again");',
        "",
        f"{B}/test_collector_lost.py::test_open_pages_say_so_and_are_right_again_without_a_reload",
    ),
    Bug(
        "what was said while a page was open appears on it",
        f"{P}/templates/incident.html",
        'id="comparison" data-live{% if',
        'id="comparison"{% if',
        f"{B}/test_comparison_panel.py::test_it_appears_with_steps_layers_and_verdict_without_a_reload",
    ),
    Bug(
        "no page is wider than a telephone",
        f"{J}/fp8watch.css",
        ".panel:has(> table) { overflow-x: auto; position: relative; }",
        "",
        f"{B}/test_narrow_windows.py::test_no_page_is_wider_than_the_window",
    ),
    Bug(
        "a table that was scrolled stays so when it is renewed",
        f"{J}/live.js",
        "next.scrollLeft = scrollLeft;",
        "",
        f"{B}/test_narrow_windows.py::test_a_wide_table_scrolls_in_its_panel_and_stays_there_when_it_is_renewed",
    ),
    Bug(
        "the health map keeps room beside its names",
        f"{J}/health.js",
        "Math.min(210, Math.round(health.clientWidth * 0.4))",
        "210",
        f"{B}/test_narrow_windows.py::test_charts_and_maps_have_room_beside_their_labels",
    ),
    Bug(
        "what an open incident names is the worst",
        "page_queries:worst_sites",
        '"key": (by is None, -num_bad',
        '"key": (False, -num_bad',
        f"{T}/test_pages_show_what_is_wrong.py::test_worst_sites_begin_with_what_an_open_incident_names",
    ),
    Bug(
        "an SQNR of before the failure ranks nothing",
        "page_queries:worst_sites",
        "told = 0.0 if num_bad and bad and sqnr and sqnr[0] < bad[0] else margin",
        "told = margin",
        f"{T}/test_pages_show_what_is_wrong.py::test_worst_sites_begin_with_what_an_open_incident_names",
    ),
    Bug(
        "the map of a quiet step leads to the one that broke",
        "page_queries:seen_here",
        "if lookup.site_of(i, [site]) is site else None} for i in found]",
        "if False else None} for i in found]",
        f"{T}/test_pages_show_what_is_wrong.py::test_tile_map_of_a_quiet_step_leads_to_the_step_and_the_tile_that_broke",
    ),
    Bug(
        "a program that asks for what is not there gets no page",
        "pages.routes:_lost",
        "e.status_code != 404 or not person",
        "e.status_code != 404",
        f"{T}/test_bad_input_gets_a_page.py::test_an_address_that_leads_nowhere_gets_a_page_where_a_person_asks",
    ),
    Bug(
        "a flag is copied with its value",
        "pages.fixes",
        r"\d+(?:\.\d+)?|",
        "",
        f"{T}/test_fixes.py::test_variables_flags_and_calls_are_copied_else_the_sentence",
    ),
]
