"""The flight recorder: where a fault was born, how it travelled and when it was gone, out of stored rows."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from pages import synthetic, travelling
from pages.collector import make_app, serving
from pages.travelling import BORN, GAP, LASTS, MODULE, UNSEEN_MODULE

from fp8watch_server.pages import flight_still, lookup
from fp8watch_server.store import flight, queries
from fp8watch_server.store.flight_words import by_step, said, spread


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_app(tmp_path_factory.mktemp("flight"))


@pytest.fixture(scope="module")
def client(app: Any) -> Iterator[httpx.Client]:
    with serving(app) as client:
        travelling.travelling_run(client, app.state.engine)
        run = synthetic.Run(client, "seldom", "seldom", sites=synthetic.make_sites(1), session="b" * 32).register()
        run.send(range(200), fault=False, keep=lambda step, site: step % 8 == 0)
        yield client


def lit(got: dict[str, Any]) -> dict[int, set[str]]:
    """Step -> rows that are far outside of their band."""
    return {
        step: {f"{r['pane']} {r['label']} {r['operand']}" for r in got["rows"] if (r["values"][j] or 0) > 4}
        for j, step in enumerate(got["steps"])
    }


def test_a_fault_is_seen_born_travelling_and_gone(client: httpx.Client) -> None:
    got = client.get(f"/api/v1/runs/travel/flight?at={BORN}&span=16").json()
    out = lit(got)
    assert [step for step, rows in out.items() if rows] == list(range(BORN, BORN + LASTS))
    assert {row.split()[0] for row in out[BORN]} == {"fprop"}
    assert {row.split()[0] for row in out[BORN + 1]} == {"fprop", "backward"}
    assert f"fprop {MODULE} input" in out[BORN]
    assert f"fprop {UNSEEN_MODULE} input" not in out[BORN]
    assert next(row["label"] for row in got["rows"] if row["pane"] == "fprop") == "layers.0.attention.wq"
    words = " ".join(got["said"])
    assert words.startswith(f"At step {BORN}, ")
    assert f"first of these in the order of execution is {MODULE} input, rowwise: amax at " in words
    assert f"from step {BORN + 1} on" in words
    assert f"From step {BORN + LASTS} on none of them stands out" in words
    assert got["outside"][16] >= len(out[BORN])


def test_what_was_not_looked_at_is_not_calm(client: httpx.Client) -> None:
    got = client.get(f"/api/v1/runs/travel/flight?at={GAP[0]}&span=8").json()
    gap = [got["steps"].index(step) for step in GAP]
    for row in got["rows"]:
        blank = [j for j, v in enumerate(row["values"]) if v is None]
        assert blank == (gap if row["label"] == UNSEEN_MODULE else [])
    assert got["looked"][gap[0]] == got["looked"][0] - 5
    first = client.get("/api/v1/runs/travel/flight?at=3&span=4").json()
    assert first["steps"] == list(range(8))  # before step 0 there is nothing
    assert {v for row in first["rows"] for v in row["values"]} == {flight.UNJUDGED}
    late = client.get(f"/api/v1/runs/travel/flight?at={travelling.STEPS + 50}&span=4").json()
    assert (late["steps"], late["said"]) == ([], ["No site was measured in these steps."])


def test_sites_that_are_measured_seldom_have_a_band_all_the_same(client: httpx.Client) -> None:
    got = client.get("/api/v1/runs/seldom/flight?at=184&span=8").json()
    for j, step in enumerate(got["steps"]):
        values = {row["values"][j] for row in got["rows"]}
        assert (values == {None}) == (step % 8 != 0)
        if step % 8 == 0:
            assert all(v is not None and 0 <= v < 4 for v in values)
    assert got["said"][0].startswith("At step 184")
    assert client.get("/api/v1/runs/seldom/flight?at=185").json()["said"][0] == "No site was measured at step 185."


def test_a_site_that_stands_out_opens_its_tiles(client: httpx.Client) -> None:
    got = client.get(f"/api/v1/runs/travel/flight?at={BORN}").json()
    assert list(got["maps"].values()) == [[BORN, BORN + 1]]
    assert next(r["label"] for r in got["rows"] if str(r["site"]) in got["maps"]) == MODULE


def test_wrong_questions_say_what_is_right(client: httpx.Client) -> None:
    assert client.get("/api/v1/runs/nope/flight?at=1").status_code == 404
    assert client.get("/api/v1/runs/travel/flight").status_code == 422
    assert client.get("/api/v1/runs/travel/flight?at=1&span=9999").status_code == 422
    assert client.get("/runs/travel/flight?at=x").status_code == 400
    assert client.get("/incidents/nope/flight").status_code == 404


def test_ten_thousand_sites_are_bounded_and_the_worst_of_a_row_is_named() -> None:
    sites = [
        {"id": i, "module": f"layers.{i // 10}.experts.{i % 10}", "operand": "input", "direction": "rowwise", "gemm": "fprop"}
        for i in range(10_000)
    ]  # fmt: skip
    steps, shape = np.arange(5), (len(sites), 5)
    none = np.zeros(shape)
    far = np.full(shape, 0.5)
    far[4321, 2] = 9.0
    sentinel = none.copy()
    sentinel[7, 3] = 1
    found = flight.Flight(2, 2, steps, sites, far, none.astype(int), none == 0, none, none > 0, sentinel)

    class Nothing:
        def execute(self, *args: Any) -> list[Any]:
            return []

    got = flight.as_json(Nothing(), "r", found)  # type: ignore[arg-type]
    assert len(got["rows"]) <= 240
    (hit,) = [r for r in got["rows"] if max(r["values"]) > 1]
    assert hit["values"][2] == 9.0
    assert got["sites"][str(hit["sites"][2])][0] == "layers.432.experts.1"
    assert [m[2:] for m in got["marks"]] == [[7, "1 sentinel tile"]]
    assert "layers.432.experts.1 input, rowwise: amax at 9 × its band" in said(found)[0]


def test_the_still_is_whole_hides_names_and_has_both_themes(app: Any, client: httpx.Client) -> None:
    answer = client.get(f"/incidents/{travelling.ID}/flight.svg?theme=dark")
    assert answer.headers["content-type"] == "image/svg+xml"
    root = ET.fromstring(answer.content)
    words = " ".join(root.itertext())
    assert f"Flight recorder around step {BORN}" in words
    assert MODULE in words
    assert "#0d1116" not in answer.text
    assert "#141a21" in answer.text
    with app.state.engine.connect() as conn:
        incident = lookup.find_incident(conn, travelling.ID)
        names = {s["module"]: f"module {i}" for i, s in enumerate(queries.sites(conn, "travel"))}
        hidden = flight_still.still(conn, incident, names=names)
        with pytest.raises(ValueError, match="one of dark, light"):
            flight_still.still(conn, incident, theme="blue")
    assert b"attention" not in hidden
    assert b"module 1" in hidden
    assert len(answer.content) < 200_000


def test_the_page_says_the_same_as_a_table(client: httpx.Client) -> None:
    page = client.get(f"/incidents/{travelling.ID}/flight?span=8").text
    table = page.partition('id="flight-table"')[2]
    row = table.partition(f'<td class="n">{BORN}</td>')[2].partition("</tr>")[0]
    assert MODULE in row or "layers.1" in row
    assert "× its band" in row
    assert "the median of the site&#39;s 32 measurements before, ± 4σ" in page
    assert client.get("/runs/travel/flight").status_code == 200


def test_backward_comes_after_fprop_and_from_the_last_layer_up() -> None:
    sites = [{"gemm": gemm, "operand": "input"} for gemm in ("fprop", "wgrad", "dgrad", "fprop", "wgrad", "dgrad", "")]
    none = np.zeros((len(sites), 1))
    found = flight.Flight(0, 0, np.arange(1), sites, none, none.astype(int), none == 0, none, none > 0, none)
    assert np.argsort(found.turn).tolist() == [0, 3, 6, 5, 4, 2, 1]


def test_a_drift_over_the_edge_is_no_leap() -> None:
    far = np.array([[0.2, 0.9, 1.2, 1.6, 0.4], [0.2, np.nan, 5.0, 6.0, 0.3], [0.2, 0.1, 0.1, 3.0, 0.1]])
    sites = [{"gemm": "fprop", "operand": o, "direction": "rowwise", "module": "m"} for o in ("weight", "input", "x")]
    none = np.zeros(far.shape)
    found = flight.Flight(
        2, 2, np.arange(5), sites, far, none.astype(int), ~np.isnan(far), none, none > 0, none
    )  # fmt: skip
    already = flight.Flight(2, 2, np.arange(5), sites, far + 9, none.astype(int), none == 0, none, none > 0, none)
    assert not already.leaps.any()  # outside from the first column on: since when is not known
    assert [list(map(int, row)) for row in found.leaps] == [[0, 0, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0]]
    words = said(found)
    assert words[0] == (
        "At step 2, 2 of 3 sites measured stand out, 1 of them at a leap; the first of these in the order of execution "
        "is m input, rowwise: amax at 5 × its band."
    )
    assert words[1] == "In the steps after, up to 4, 1 more leaps out of its band, from step 3 on: m x."
    assert words[2] == "From step 4 on none of them stands out, as far as they were measured."


def test_a_failure_that_sites_show_only_after_its_step_is_followed_from_there() -> None:
    far = np.full((3, 8), 0.2)
    far[1:, 4] = far[0, 5] = 9.0  # as after a learning rate: born at step 3, and weights are what they were
    sites = [{"gemm": "fprop", "operand": "weight", "direction": "rowwise", "module": name} for name in "abc"]
    none = np.zeros(far.shape)
    found = flight.Flight(3, 5, np.arange(8), sites, far, none.astype(int), none == 0, none, none > 0, none)
    assert said(found) == [
        "At step 3 none of 3 sites measured stands out.",
        "At step 4 2 sites leap out of their band; the first in the order of execution is b weight, rowwise: amax at 9 × its band, then c weight.",
        "In the steps after, up to 7, 1 more leaps out of its band, from step 5 on: a weight.",
        "From step 6 on none of them stands out, as far as they were measured.",
    ]


def test_places_are_named_once_in_the_order_of_execution_and_five_of_them() -> None:
    far = np.full((14, 4), 0.2)
    far[:, 2] = 9.0
    far[12:] = 0.2
    far[12, 3] = 9.0
    names = [f"{name} {direction}" for name in "gfedcba" for direction in ("rowwise", "columnwise")]
    sites = [
        {"gemm": "fprop", "operand": "input", "module": name.split()[0], "direction": name.split()[1]} for name in names
    ]
    none = np.zeros(far.shape)
    found = flight.Flight(2, 1, np.arange(4), sites, far, none.astype(int), none == 0, none, none > 0, none)
    words = said(found)
    assert words[0].endswith(
        "is g input, rowwise: amax at 9 × its band, then f input, e input, d input, c input, b input."
    )
    assert words[1] == "In the steps after, up to 3, 1 more leaps out of its band, from step 3 on: a input."


def test_what_leaves_its_band_long_after_is_not_said_to_be_of_the_failure() -> None:
    far = np.full((3, 24), 0.2)
    far[0, 2:4] = far[1, 3] = 9.0  # born in the first site, a step later in the second
    far[2, 20] = 3.0
    sites = [{"gemm": "fprop", "operand": "input", "direction": "rowwise", "module": name} for name in "abc"]
    none = np.zeros(far.shape)
    found = flight.Flight(2, 22, np.arange(24), sites, far, none.astype(int), none == 0, none, none > 0, none)
    assert said(found)[1:] == [
        "In the steps after, up to 11, 1 more leaps out of its band, from step 3 on: b input.",
        "From step 4 on none of them stands out, as far as they were measured.",
        "From step 20 on 1 site leaps out of its band (c input), after 16 steps of calm: that may be something else.",
    ]
    assert spread(found) == {"first": "a input", "places": ["b input"], "num_sites": 2, "first_step": 2, "last_step": 3}
    stood = [[(site["module"], words) for site, words in row["stood"]] for row in by_step(found)]
    assert stood[3] == [("a", "amax at 9 × its band"), ("b", "amax at 9 × its band")]
    assert stood[4] == []


def test_nothing_has_spread_where_no_site_leapt() -> None:
    far = np.full((2, 8), 0.2)
    sites = [{"gemm": "fprop", "operand": "input", "direction": "rowwise", "module": name} for name in "ab"]
    none = np.zeros(far.shape)

    def of(at: int) -> Any:
        return spread(flight.Flight(at, 4, np.arange(8), sites, far, none.astype(int), none == 0, none, none > 0, none))

    assert of(4) is None
    assert of(99) is None
    far[:, 2:6] = 3.0  # stands out at the step, and leapt before it
    far[1, 7] = 9.0
    assert of(4) is None
