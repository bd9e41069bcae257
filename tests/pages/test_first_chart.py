"""The chart that the server draws: the numbers in it, what it keeps of many, what it does where there are none."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import Any

import httpx
import numpy as np
import pytest
from pages import synthetic

from fp8watch_server.pages.first_chart import CURVE_WIDTH, Chart, round_ticks, training_chart
from fp8watch_server.pages.first_site_chart import amax_charts
from fp8watch_server.pages.templating import environment
from fp8watch_server.store.series import _chart

SVG = "{http://www.w3.org/2000/svg}"


def series(values: list[float | None], steps: list[int] | None = None, points: int = 600) -> dict[str, Any]:
    """As queries.scalars gives it; None was not logged."""
    present = np.array([v is not None for v in values], dtype=bool)
    numbers = np.array([0.0 if v is None else v for v in values])
    return _chart(
        np.array(steps if steps is not None else range(len(values)), dtype=np.int64), numbers, present, points
    )


def curve(chart: Chart, panel: int = 0) -> list[list[tuple[float, float]]]:
    """The strokes of a panel: [(share of the width, pixels from its top)]."""
    path = chart.panels[panel].curves[0].path
    assert re.fullmatch(r"([ML]-?\d+ -?\d+(\.\d+)?)*", path), path
    strokes = [re.findall(r"(-?\d+) (-?[\d.]+)", part) for part in path.split("M")[1:]]
    return [[(int(x) / CURVE_WIDTH, float(y)) for x, y in stroke] for stroke in strokes]


def value_at(chart: Chart, y: float, panel: int = 0) -> float:
    """What a height means, by the two outermost ticks."""
    (y0, a), *_, (y1, b) = chart.panels[panel].ticks
    low, high = (float(text.replace("−", "-").replace("\u2009", "")) for text in (a, b))
    return low + (high - low) * (y - y0) / (y1 - y0)


def incident(step: int = 40, **more: Any) -> dict[str, Any]:
    return {"id": "a" * 32, "mode": "bad-batch", "severity": "warning", "title": "t", "first_step": step,
            "last_step": step, **more}  # fmt: skip


def test_a_curve_has_the_values_of_its_series() -> None:
    values = [4.0 - 0.03 * i + 0.2 * (i % 7) for i in range(100)]
    chart = training_chart({"loss": series(values)}, [])
    (stroke,) = curve(chart)
    assert [x for x, _ in stroke] == pytest.approx([i / 99 for i in range(100)], abs=1e-4)
    assert [value_at(chart, y) for _, y in stroke] == pytest.approx(values, abs=0.02)
    assert "loss from 4 at step 0" in chart.description


def test_of_a_million_steps_the_extremes_are_kept_and_the_rest_is_bounded() -> None:
    values = np.linspace(5.0, 3.0, 1_000_000)
    values[123_456], values[765_432] = 11.0, 1.0
    chart = training_chart({"loss": series(values.tolist())}, [])
    points = [p for stroke in curve(chart) for p in stroke]
    assert len(points) <= 600
    top, bottom = min(points, key=lambda p: p[1]), max(points, key=lambda p: p[1])
    assert (top[0], bottom[0]) == pytest.approx((0.123456, 0.765432), abs=1e-4)
    assert (value_at(chart, top[1]), value_at(chart, bottom[1])) == pytest.approx((11.0, 1.0), abs=0.05)
    assert "largest 11 at step 123456" in chart.description
    assert len(chart.panels[0].curves[0].path) < 15_000


def test_what_is_no_number_breaks_the_line_and_has_a_mark_of_its_own() -> None:
    values: list[float | None] = [3.0 + 0.01 * i for i in range(60)]
    values[20], values[21], values[40] = float("nan"), float("inf"), float("-inf")
    chart = training_chart({"loss": series(values)}, [])
    assert [len(stroke) for stroke in curve(chart)] == [20, 18, 19]
    assert [(what, said) for _, what, said in chart.panels[0].marks] == [
        ("nan", "loss is NaN at step 20"),
        ("inf", "loss is +Inf at step 21"),
        ("-inf", "loss is −Inf at step 40"),
    ]
    assert "not a finite number 3 times, first NaN at step 20" in chart.description


def test_what_was_not_logged_is_a_gap_and_a_point_alone_a_dot() -> None:
    steps = [*range(50), 100, *range(150, 200)]
    chart = training_chart({"loss": series([2.0 + 0.01 * s for s in steps], steps)}, [])
    assert [len(stroke) for stroke in curve(chart)] == [50, 50]
    assert (chart.panels[0].curves[0].dots[50][0], chart.panels[0].curves[0].dots[50][2]) == (
        pytest.approx(100 * 100 / 199, abs=0.01),
        "3 at step 100",
    )
    absent: list[float | None] = [1.0] * 60
    absent[10:30] = [None] * 20
    assert [len(stroke) for stroke in curve(training_chart({"loss": series(absent)}, []))] == [10, 30]


def test_every_tenth_step_is_one_line() -> None:
    steps = list(range(0, 2000, 10))
    (stroke,) = curve(training_chart({"loss": series([1.0 + s for s in steps], steps)}, []))
    assert len(stroke) == 200


@pytest.mark.parametrize(
    "values",
    [[1.7e308, -1.7e308, 0.0], [5e-324, 0.0, 1e-300], [2.5], [2.5, 2.5], [float("nan")], [None, None], [0.0, 0.0]],
    ids=str,
)
def test_strange_numbers_have_a_place(values: list[float | None]) -> None:
    chart = training_chart({"loss": series(values), "lr": series(values)}, [incident(0)])
    for panel in chart.panels:
        heights = [y for c in panel.curves for _, y, _ in c.dots] + [y for y, _ in panel.ticks]
        assert all(-1 <= y <= panel.height + 1 for y in heights)
    html(chart)


def test_a_run_that_logged_nothing_says_so() -> None:
    empty = series([])
    chart = training_chart({"loss": empty, "grad_norm": empty, "lr": empty}, [])
    assert [p.field for p in chart.panels] == ["loss"], "the loss keeps its place"
    text = "".join(html(chart).itertext())
    assert "loss was not logged in these steps" in text
    assert "nothing was logged in these steps" in text


def test_what_was_never_logged_has_no_panel() -> None:
    chart = training_chart({"loss": series([1.0, 2.0]), "grad_norm": series([None, None]), "lr": series([3.0])}, [])
    assert [p.field for p in chart.panels] == ["loss", "lr"]


def test_a_range_shows_its_incidents_and_no_others() -> None:
    loss = series([1.0 + s for s in range(100, 200)], list(range(100, 200)))
    of_range = training_chart({"loss": loss}, [incident(99), incident(120), incident(201)], 100, 199)
    assert [(round(i.x, 1), i.severity) for i in of_range.incidents] == [(20.5, "warning")]
    assert [float(step) for _, step in of_range.ticks] == list(range(100, 200, 20))


def test_ticks_are_round_few_and_inside() -> None:
    rng = np.random.default_rng(0)
    for _ in range(500):
        low, high = sorted(rng.standard_normal(2) * 10.0 ** rng.integers(-30, 30))
        ticks = round_ticks(low, high, 6)
        assert 2 <= len(ticks) <= 6
        assert low - 1e-6 * (high - low) <= ticks[0] < ticks[-1] <= high + 1e-6 * (high - low)
    assert round_ticks(0.0, 1.0, 9, 1.0) == [0.0, 1.0]


def html(chart: Chart) -> ET.Element:
    """The chart as it stands in the page, which is well-formed XML as well."""
    module = environment().get_template("first_chart.html").module
    return ET.fromstring(str(module.first_chart(chart)).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1))  # type: ignore[attr-defined]


def test_of_several_incidents_of_one_step_the_most_severe_lies_on_top() -> None:
    loss = series([1.0] * 100)
    of = [incident(40, severity="critical"), incident(40, severity="info"), incident(40, severity="warning")]
    assert [i.severity for i in training_chart({"loss": loss}, of).incidents] == ["info", "warning", "critical"]


def test_hostile_words_are_text_and_an_incident_is_a_link() -> None:
    bad = incident(1, id='x"/><script>', title=synthetic.HOSTILE, mode=synthetic.HOSTILE, severity="critical")
    svg = html(training_chart({"loss": series([1.0, float("nan"), 3.0])}, [bad]))
    (link,) = svg.iter(f"{SVG}a")
    assert link.get("href") == "/incidents/x%22%2F%3E%3Cscript%3E"
    assert synthetic.HOSTILE in (link.get("aria-label") or "")
    assert not list(svg.iter(f"{SVG}script"))
    assert not list(svg.iter(f"{SVG}img"))
    names = {svg.get("aria-labelledby"), svg.get("aria-describedby")}
    assert names == {e.get("id") for e in svg if e.tag in (f"{SVG}title", f"{SVG}desc")}


def test_the_page_holds_its_first_chart(client: httpx.Client) -> None:
    page = client.get("/runs/demo-nan").text
    found = re.search(r"<figure[^>]*id=\"training\".*?</figure>", page, re.S)
    assert found is not None
    for words in ("loss is NaN at step 10", "loss is +Inf at step 11", "gradient norm is +Inf at step 13"):
        assert words in found[0]
    part = client.get("/runs/demo-nan?from=10&to=12").text
    assert "loss is −Inf at step 12" in part
    assert "gradient norm is" not in part
    assert client.get("/runs/demo-nan?from=x&to=99999999999999999999").status_code == 200
    assert (
        'href="/incidents/' in client.get("/runs/demo-inf").text.partition('id="training"')[2].partition("</figure>")[0]
    )


def test_what_takes_long_is_sent_after_the_first_chart(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8watch_server.pages import page_queries

    seen: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        worst = page_queries.worst_sites
        patch.setattr(page_queries, "worst_sites", lambda *args: seen.append("asked") or worst(*args))
        with client.stream("GET", "/runs/demo-inf") as answer:
            chunks = list(answer.iter_raw())
    assert seen == ["asked"]
    first = next(i for i, c in enumerate(chunks) if b'id="training"' in c)
    later = next(i for i, c in enumerate(chunks) if b"Worst sites now" in c)
    assert first < later, "in one piece the chart waits for all the rest"


def test_the_page_of_a_site_holds_its_first_chart_on_one_scale(client: httpx.Client) -> None:
    site = synthetic.FAULT_SITE
    html_text = client.get(f"/runs/demo-inf/sites/{site}").text
    figures = re.findall(
        r'<figure class="chart" id="(amax[\w-]*)".*?(<svg class="first".*?</svg>)\n?</figure>', html_text, re.S
    )
    assert [name for name, _ in figures] == ["amax", "amax-other"]
    assert f"largest amax is +Inf at step {synthetic.FAULT_STEP}" in figures[0][1]
    assert "Inf" not in figures[1][1]
    axes = [re.findall(r'class="tick y"[^>]*y="([\d.]+)">(2\^[−\d]+)<', figure) for _, figure in figures]
    assert axes[0] == axes[1]
    assert len(axes[0]) >= 2


def test_a_site_has_octaves_gaps_and_zeros() -> None:
    values: list[float | None] = [2.0 ** (i % 5) for i in range(60)]
    values[10], values[20], values[30] = 0.0, float("nan"), None
    of = {"amax_max": series(values), "amax_min_nonzero": series([0.25] * 60)}
    (chart,) = amax_charts([of], [(40, "critical")])
    largest, smallest = chart.panels[0].curves
    heights = {label: y for y, label in chart.panels[0].ticks}
    points = [float(y) for _, y in re.findall(r"(\d+) (-?[\d.]+)", largest.path)]
    assert points[0] == pytest.approx(heights["2^0"])
    assert points[4] == pytest.approx(heights["2^4"])
    assert largest.path.count("M") == 4, "a zero and a NaN end a line, and so does what was not measured"
    assert [said for _, said in largest.zeros] == ["0 at step 10"]
    assert [what for _, what, _ in chart.panels[0].marks] == ["nan"]
    assert smallest.path.count("M") == 1
    assert [i.severity for i in chart.incidents] == ["critical"]
    html(chart)


def test_what_was_never_measured_at_a_site_has_no_chart() -> None:
    nothing = series([None, None])
    (chart,) = amax_charts([{"amax_max": nothing, "amax_min_nonzero": nothing}], [])
    assert chart.panels[0].is_empty


def test_one_answer_has_all_that_a_page_draws(client: httpx.Client) -> None:
    got = client.get("/runs/demo-nan/training.json?from=5&to=14").json()
    alone = client.get("/api/v1/runs/demo-nan/series?field=loss&from=5&to=14").json()
    assert got["series"]["loss"] == alone
    assert got["incidents"] == []
    (incident,) = client.get("/runs/demo-inf/training.json").json()["incidents"]
    assert (incident["id"], incident["first_step"]) == (synthetic.INCIDENT_ID, synthetic.FAULT_STEP)
    of_site = client.get(f"/runs/demo-inf/sites/{synthetic.FAULT_SITE}/charts.json?points=50").json()
    for field in ("amax_max", "tile_sqnr_db", "clip_depth"):
        url = f"/api/v1/runs/demo-inf/series?site={synthetic.FAULT_SITE}&field={field}&points=50"
        assert of_site[field] == client.get(url).json()
    for path in ("/runs/none/training.json", "/runs/demo-inf/sites/1/charts.json"):
        assert client.get(path).status_code == 404
    assert client.get("/runs/demo-inf/training.json?from=x").status_code == 400
