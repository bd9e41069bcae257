"""What is broken on purpose in states, clicks, keys, colours and what comes late, and the test that sees it."""

from __future__ import annotations

from support.planted import Bug

P = "server/fp8watch_server/pages"
J = f"{P}/static"
B = "tests/browser"
T = "tests/pages"

BUGS = [
    Bug(
        "of several incidents of one step the most severe lies on top",
        "first_chart:training_chart",
        'UNDERNEATH.get(i["severity"], 0)',
        "0",
        f"{T}/test_first_chart.py::test_of_several_incidents_of_one_step_the_most_severe_lies_on_top",
    ),
    Bug(
        "a cause that came several times is told from the first on",
        "headline:_asking",
        "if _is_again(worst, i)",
        "if i is worst",
        f"{T}/test_headline.py::test_a_cause_that_came_several_times_is_told_from_the_first_on_and_where_it_was_closed",
    ),
    Bug(
        "what broke first has the first card",
        "headline:in_order",
        "i is not first, ",
        "",
        f"{T}/test_headline.py::test_a_cause_that_came_several_times_is_told_from_the_first_on_and_where_it_was_closed",
    ),
    Bug(
        "what was chosen stays chosen when its part of the page is renewed",
        "server/fp8watch_server/pages/static/live.js",
        "same.value = list.value",
        "same.value = same.value",
        "tests/browser/test_live.py::test_an_incident_is_silenced_for_a_while_and_heard_again",
    ),
    Bug(
        "nothing is replaced under a press",
        f"{J}/live.js",
        "  await released();\n",
        "",
        f"{B}/test_live.py::test_a_click_and_the_focus_outlive_the_renewal_of_their_part",
    ),
    Bug(
        "a link that has the focus keeps it",
        f"{J}/live.js",
        "if (focused) next",
        "if (false) next",
        f"{B}/test_live.py::test_a_click_and_the_focus_outlive_the_renewal_of_their_part",
    ),
    Bug(
        "a map that comes alone is told of",
        "tile_maps:commit_tile_maps",
        "conn.execute(sa.update(t.run).where(*heard).values(last_seen_at=now))",
        "pass",
        f"{B}/test_maps_that_come_later.py::test_they_appear_on_the_open_page_of_the_incident_and_on_the_map_itself",
    ),
    Bug(
        "a page that was open before the map came shows it",
        f"{P}/templates/incident.html",
        '<div id="tiles" data-live hidden>',
        '<div id="tiles" hidden>',
        f"{B}/test_maps_that_come_later.py::test_they_appear_on_the_open_page_of_the_incident_and_on_the_map_itself",
    ),
    Bug(
        "steps of a map are those of its rank",
        "pages.routes:tile_map_page",
        'steps = queries.steps_available(conn, run["id"], found["id"], kept.rank)',
        "pass",
        f"{T}/test_pages_show_what_is_wrong.py::test_steps_of_a_map_are_those_that_its_rank_has",
    ),
    Bug(
        "a cell of the health map leads to its site",
        f"{J}/health.js",
        'if (id !== "") location.assign',
        'if (id === "") location.assign',
        f"{B}/test_states_and_clicks.py"
        "::test_a_cell_of_the_health_map_leads_to_the_site_and_a_point_of_a_site_to_its_tiles",
    ),
    Bug(
        "a histogram names its buckets",
        f"{J}/histogram.js",
        "(row ? row[first + k] : null)",
        "(row ? row[first + k + 1] : null)",
        f"{B}/test_states_and_clicks.py::test_the_histogram_says_how_many_tiles_had_which_amax_at_each_step",
    ),
    Bug(
        "what a tab was on is in the address",
        f"{J}/charts.js",
        "let value = values.includes(asked) ? asked : usual;",
        "let value = usual;",
        f"{B}/test_states_and_clicks.py::test_an_address_leads_back_to_what_was_chosen",
    ),
    Bug(
        "what a map shows is in the address",
        f"{J}/tile_map.js",
        "if (!(this.quantity in LABELS))",
        "if (this.quantity)",
        f"{B}/test_states_and_clicks.py::test_an_address_leads_back_to_what_was_chosen",
    ),
    Bug(
        "the slider moves the map",
        f"{J}/tile_steps.js",
        "this.stop(); go(this.all[Number(this.slider.value)]);",
        "this.stop();",
        f"{B}/test_states_and_clicks.py::test_the_slider_goes_over_the_steps_that_were_kept_and_no_others",
    ),
    Bug(
        "counts under the mouse are those of the tile",
        f"{J}/tile_words.js",
        'number(map.num_underflow[i]), "elements"',
        'number(map.num_nonfinite[i]), "elements"',
        f"{B}/test_states_and_clicks.py::test_hover_says_amax_scale_inv_and_counts_as_the_collector_has_them",
    ),
    Bug(
        "colours of a map are octaves",
        f"{J}/tile_paint.js",
        'const octaves = (quantity) => quantity === "amax" || quantity === "scale_inv";',
        "const octaves = () => false;",
        f"{B}/test_states_and_clicks.py::test_colours_are_octaves_and_follow_the_theme",
    ),
    Bug(
        "a map takes the colours of the theme",
        f"{J}/tile_map.js",
        'document.addEventListener("fp8watch:theme", () => { this.draw(); this.steps.drawBad(); });',
        "",
        f"{B}/test_states_and_clicks.py::test_colours_are_octaves_and_follow_the_theme",
    ),
    Bug(
        "who uses keys sees where they are",
        f"{P}/static/fp8watch.css",
        ":focus-visible { outline: 2px solid var(--accent);",
        ":focus-visible { outline: none;",
        f"{B}/test_by_keyboard.py::test_from_the_runs_page_to_the_broken_tile_and_the_fix",
    ),
    Bug(
        "the map is reached by keys",
        f"{P}/templates/tile_map_panel.html",
        '<canvas tabindex="0"',
        "<canvas",
        f"{B}/test_by_keyboard.py::test_from_the_runs_page_to_the_broken_tile_and_the_fix",
    ),
    Bug(
        "buttons without words have names",
        f"{P}/templates/tile_map_panel.html",
        'data-slider aria-label="Step"',
        "data-slider",
        f"{B}/test_by_keyboard.py::test_what_can_be_clicked_can_have_the_focus_and_has_a_name",
    ),
    Bug(
        "the ramp of a map is read by brightness",
        f"{J}/fp8watch.css",
        "--map-2: #31678d",
        "--map-2: #7a3f63",
        f"{T}/test_colours.py::test_a_ramp_is_read_by_brightness_alone",
    ),
    Bug(
        "what is critical can be read",
        f"{J}/fp8watch.css",
        "--critical: #bf3d06",
        "--critical: #e0561c",
        f"{T}/test_colours.py::test_text_stands_out_from_what_it_stands_on",
    ),
    Bug(
        "a severity has a form of its own",
        f"{P}/templates/macros.html",
        "'warning': '◆'",
        "'warning': '▲'",
        f"{T}/test_colours.py::test_a_severity_has_a_form_and_a_word_of_its_own",
    ),
    Bug(
        "pages hear of changes on PostgreSQL too",
        "pages.live:version",
        "sa.func.sum(sa.cast(s.ended, sa.Integer))",
        "sa.func.sum(s.ended)",
        f"{T}/test_on_both_databases.py::test_a_page_is_the_same",
    ),
    Bug(
        "a run that has ended says so",
        f"{P}/templates/run.html",
        "{{ m.status(run.status) }}",
        "{{ m.status('running') }}",
        f"{T}/test_bad_input_gets_a_page.py::test_a_run_that_has_ended_says_so_and_is_whole",
    ),
    Bug(
        "an incident appears on the open page of its site",
        f"{P}/templates/site.html",
        '<section class="incidents" id="incidents" data-live{% if not incidents %} hidden{% endif %}>',
        '<section class="incidents" id="incidents"{% if not incidents %} hidden{% endif %}>',
        f"{B}/test_maps_that_come_later.py::test_an_open_page_of_a_site_gets_its_incident_and_the_way_to_its_map",
    ),
    Bug(
        "scripts are told what is new",
        f"{J}/live.js",
        "Object.assign(body.dataset, fresh.body.dataset);",
        "",
        f"{B}/test_maps_that_come_later.py::test_charts_of_an_incident_that_goes_on_go_on_with_it",
    ),
    Bug(
        "plotly draws every row of the panels",
        f"{J}/run.js",
        "const PANELS = JSON.parse(training.dataset.panels);",
        "const PANELS = JSON.parse(training.dataset.panels).slice(0, 3);",
        f"{B}/test_panels.py::test_a_row_more_is_a_panel_more",
    ),
    Bug(
        "the numbers at the head of the page are those of the panels",
        "page_queries:scalars_now",
        "names = panels.fields()",
        'names = ("loss", "grad_norm", "lr")',
        f"{T}/test_panels.py::test_a_row_is_a_panel_everywhere_on_the_page",
    ),
]
