"""What is broken on purpose in the pages, and the test that sees it: a promise a line."""

from __future__ import annotations

from planted import Bug

P = "server/fp8watch_server/pages"
J = f"{P}/static"
B = "tests/browser"
T = "tests/pages"

BUGS = [
    Bug(
        "what was never quantised is no alarm",
        f"{P}/health.py",
        'if what == "inf" and found["field"] == "tile_sqnr_db":',
        "if False:",
        f"{T}/test_health_map.py::test_what_was_never_quantised_is_no_alarm_and_its_nan_is_one",
    ),
    Bug(
        "the worst of a layer is the lowest SQNR",
        f"{P}/health.py",
        'sign = 1.0 if SERIES_FIELDS[field].worst == "min" else -1.0',
        "sign = -1.0",
        f"{T}/test_health_map.py::test_the_worst_of_a_layer_is_named_with_its_site",
    ),
    Bug(
        "ten thousand sites are a bounded map",
        f"{P}/health.py",
        "if len(modules) > max_rows:",
        "if False:",
        f"{T}/test_health_map.py::test_ten_thousand_sites_are_a_bounded_map",
    ),
    Bug(
        "ranks that need somebody come first",
        f"{P}/coverage.py",
        'rows.sort(key=lambda r: (r["well"], r["rank"]))',
        'rows.sort(key=lambda r: r["rank"])',
        f"{T}/test_coverage_and_agents.py::test_ranks_that_need_somebody_come_first_and_are_counted",
    ),
    Bug(
        "a run that falls silent is told of though nothing is written",
        f"{P}/live.py",
        "parts.append([*row, now - row.last_seen_at > STALLED_AFTER_S])",
        "parts.append([*row])",
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
        "if (this.steps.worst() !== this.steps.now) await this.load(this.steps.worst());",
        "",
        f"{B}/test_tile_map_steps.py::test_worst_tile_is_found_from_any_step",
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
]
