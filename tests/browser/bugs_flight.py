"""What is broken on purpose in the flight recorder, and the test that sees it."""

from __future__ import annotations

from support.planted import Bug

T = "tests/pages/test_flight.py"
B = "tests/browser/test_flight.py"
STATIC = "server/fp8watch_server/pages/static"

BUGS = [
    Bug(
        "what changes from frame to frame of the film is in it",
        f"{STATIC}/gif.js",
        "before !== null && before[k] === now[k] ? MOST",
        "before !== null ? MOST",
        f"{B}::test_the_film_is_had_as_an_animated_gif",
    ),
    Bug(
        "codes of the film become wider in time",
        f"{STATIC}/gif.js",
        "if (next >= 1 << bits) bits += 1;",
        "if (next > 1 << bits) bits += 1;",
        f"{B}::test_the_film_is_had_as_an_animated_gif",
    ),
    Bug(
        "a failure that sites show after its step is followed from there",
        "store.flight_words:said",
        "*_later(found, at, leaps)",
        "*_most(found)",
        f"{T}::test_a_failure_that_sites_show_only_after_its_step_is_followed_from_there",
    ),
    Bug(
        "what breaks long after a failure is not said to be of it",
        "store.flight_words:_travel",
        "len(calm) < MAX_CALM_STEPS",
        "True",
        f"{T}::test_what_leaves_its_band_long_after_is_not_said_to_be_of_the_failure",
    ),
    Bug(
        "who leaps with the first is named",
        "store.flight_words:_then",
        'return f", then {others}" if others else ""',
        'return ""',
        f"{T}::test_places_are_named_once_in_the_order_of_execution_and_five_of_them",
    ),
    Bug(
        "the table names all that stand out",
        "store.flight_words:by_step",
        "for i in stood[:MAX_OF_STEP]",
        "for i in stood[:1]",
        f"{T}::test_what_leaves_its_band_long_after_is_not_said_to_be_of_the_failure",
    ),
    Bug(
        "what stood out before has not spread",
        "store.flight_words:spread",
        "(here and columns[0] > 0)",
        "False",
        f"{T}::test_nothing_has_spread_where_no_site_leapt",
    ),
    Bug(
        "the map of layers has the scale of the recorder",
        f"{STATIC}/health.js",
        "(v === null ? null : shareOf(v))",
        "v",
        f"{B}::test_the_map_of_layers_has_the_scale_of_the_recorder",
    ),
    Bug(
        "layers that light up have their names",
        f"{STATIC}/flight_paint.js",
        ".sort((a, b) => b.rank - a.rank)",
        "",
        f"{B}::test_the_names_of_layers_that_stand_out_go_before_those_of_others",
    ),
    Bug(
        "the header of an incident says where it went",
        f"{STATIC}/flight.js",
        "fact.hidden = !spread?.places.length;",
        "fact.hidden = true;",
        f"{B}::test_it_opens_on_the_failure_and_a_click_leads_to_the_tiles",
    ),
    Bug(
        "a cross is met from a finger's breadth around it",
        f"{STATIC}/flight_paint.js",
        "finger ? [20, 20] : [5, 6]",
        "[5, 6]",
        "tests/browser/test_narrow_windows.py::test_a_finger_beside_a_cross_of_the_recorder_opens_its_tiles",
    ),
    Bug(
        "a report's recorder is not made small to fit",
        f"{STATIC}/fp8watch.css",
        "width: 100%; min-width: 1100px; height: auto;",
        "width: 100%; max-height: 420px;",
        "tests/browser/test_narrow_windows.py::test_the_recorder_in_a_report_can_be_read",
    ),
    Bug(
        "a cell without a record is not calm",
        "store.flight:_worst",
        "np.where(looked, -1.0, -2.0)",
        "np.where(looked, -1.0, 0.0)",
        f"{T}::test_what_was_not_looked_at_is_not_calm",
    ),
    Bug(
        "sites measured seldom have a band",
        "store.flight:around",
        "for lead in LEAD_STEPS:",
        "for lead in LEAD_STEPS[:1]:",
        f"{T}::test_sites_that_are_measured_seldom_have_a_band_all_the_same",
    ),
    Bug(
        "backward is executed after fprop",
        "store.flight:Flight.turn",
        "np.where(back, 2 * n - np.arange(n), np.arange(n))",
        "np.where(back, -np.arange(n), np.arange(n))",
        f"{T}::test_backward_comes_after_fprop_and_from_the_last_layer_up",
    ),
    Bug(
        "a drift is no leap",
        "store.flight:Flight.leaps",
        "LEAP * before",
        "0.0 * before",
        f"{T}::test_a_drift_over_the_edge_is_no_leap",
    ),
    Bug(
        "the still hides names",
        "pages.flight_still:still",
        "if names is not None:",
        "if names is None:",
        f"{T}::test_the_still_is_whole_hides_names_and_has_both_themes",
    ),
    Bug(
        "what was not looked at is hatched",
        f"{STATIC}/flight_paint.js",
        "[(v) => v === null, unlooked], ",
        "",
        f"{B}::test_what_was_not_looked_at_looks_like_nothing_else",
    ),
    Bug(
        "space does not play beside other things",
        f"{STATIC}/flight.js",
        "if (!here && (!this.whole ||",
        "if (!here && (false ||",
        f"{B}::test_space_plays_the_steps_and_on_an_incident_only_where_it_has_the_focus",
    ),
    Bug(
        "the step of the playhead stands in the address",
        f"{STATIC}/flight.js",
        "this.show();\n    this.remember();",
        "this.show();",
        f"{B}::test_keys_step_choose_and_open_and_the_address_holds_the_step",
    ),
]
