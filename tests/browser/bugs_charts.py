"""What is broken on purpose in the tools of the charts, and the test that sees it."""

from __future__ import annotations

from support.planted import Bug

J = "server/fp8watch_server/pages/static"
B = "tests/browser/test_chart_tools.py"
T = "tests/pages/test_training_axis.py"

BUGS = [
    Bug(
        "an empty chart forgets what was drawn",
        f"{J}/charts.js",
        "window.Plotly.purge(element);",
        "return;",
        "tests/browser/test_states_and_clicks.py::test_a_chart_with_nothing_to_show_shows_nothing_of_before",
    ),
    Bug(
        "a chart that fails is not shown under another name",
        f"{J}/charts.js",
        "(element.dataset.shows ?? opened) === chosen()",
        "true",
        "tests/browser/test_states_and_clicks.py::test_a_chart_with_nothing_to_show_shows_nothing_of_before",
    ),
    Bug(
        "marks lie in the columns of the map",
        "pages.health:health_map",
        'queries.heatmap(conn, run_id, "num_nonfinite", *asked)',
        'queries.heatmap(conn, run_id, "num_nonfinite", from_step, to_step, points)',
        "tests/pages/test_health_map.py::test_non_finite_elements_are_marked_alike_on_a_map_of_fewer_columns",
    ),
    Bug(
        "smoothing keeps what was measured",
        f"{J}/smooth.js",
        "return sum / norm;",
        "return sum;",
        f"{B}::test_smoothing_log_y_and_band_stand_in_the_address_and_come_back_with_it",
    ),
    Bug(
        "a zoom over tokens is one over steps",
        f"{J}/run.js",
        "followZoom(training, (v) => axis.from(v));",
        "followZoom(training);",
        f"{B}::test_over_time_and_tokens_every_step_lies_where_it_was",
    ),
    Bug(
        "a file holds no formula",
        f"{J}/chart_data.js",
        "/^[=+\\-@\\t\\r]/",
        "/^[~]/",
        f"{B}::test_what_is_shown_is_had_as_a_file_a_picture_and_a_table",
    ),
    Bug(
        "all charts show the step under the pointer",
        f"{J}/chart_data.js",
        "for (const [figure, { curves, over }] of known) {",
        "for (const [figure, { curves, over }] of [...known].slice(0, 1)) {",
        f"{B}::test_all_curves_are_read_at_the_step_under_the_pointer",
    ),
    Bug(
        "a count of each step is no axis",
        "pages.training_axis:tokens",
        "and pairs[-1][1] > pairs[0][1]",
        "",
        f"{T}::test_a_count_of_each_step_is_no_axis",
    ),
    Bug(
        "an old address breaks no chart",
        "pages.training_axis:further",
        "except FieldError:",
        "except KeyError:",
        f"{T}::test_further_panels_are_those_that_there_are",
    ),
]
