"""The health map is made by the server: bounded by rows and columns, whatever the run has; no alarm without a failure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from pages import synthetic
from pages.collector import make_app, serving
from pages.synthetic import FAULT_MODULE, FAULT_SITE, FAULT_STEP

from fp8watch_server.store import deviation
from fp8watch_server.store.site_rows import MAX_ROWS, rows_of


def sites_of(modules: list[str]) -> list[dict[str, Any]]:
    return [{"id": i, "module": m, "operand": "input"} for i, m in enumerate(modules)]


def test_the_worst_of_a_layer_is_named_with_its_site(client: httpx.Client) -> None:
    got = client.get("/runs/demo-inf/health.json?field=tile_sqnr_db").json()
    (mark,) = got["marks"]
    row, column, site, text = mark
    assert got["rows"][row]["label"] == FAULT_MODULE
    assert (got["steps"][column], site, text) == (FAULT_STEP, FAULT_SITE, "1 non-finite element")
    assert got["rows"][row]["sites"][column] == FAULT_SITE
    assert got["sites"][str(FAULT_SITE)] == [FAULT_MODULE, "input", "rowwise"]
    assert got["rows"][row]["values"][column] == min(v for r in got["rows"] for v in r["values"])


def test_steps_and_operand_are_those_that_were_asked_for(client: httpx.Client) -> None:
    got = client.get("/runs/demo-inf/health.json?from=10&to=19&operand=weight&field=amax_max").json()
    assert got["steps"] == list(range(10, 20))
    assert {operand for _, operand, _ in got["sites"].values()} == {"weight"}
    assert got["marks"] == []


@pytest.mark.parametrize(
    ("query", "status"), [("field=nope", 422), ("from=x", 400), ("to=-4", 400), ("from=500&to=600", 200)]
)
def test_bad_input_is_said_and_steps_beyond_the_data_are_empty(client: httpx.Client, query: str, status: int) -> None:
    answer = client.get(f"/runs/demo-inf/health.json?{query}")
    assert answer.status_code == status
    if status == 200:
        assert answer.json()["rows"] == []
    assert client.get("/runs/nope/health.json").status_code == 404


def test_ten_thousand_sites_are_a_bounded_map() -> None:
    modules = [
        f"model.layers.{i}.mlp.experts.{k}.{name}" for i in range(64) for k in range(50) for name in ("up", "down")
    ]
    rows = rows_of(sites_of(modules))
    assert len(rows) == 64
    assert rows[5].label == "model.layers.5.mlp.experts"  # as much of the name as tells layers apart
    assert rows[5].num_modules == 100
    assert sum(len(r.sites) for r in rows) == len(modules)
    flat = rows_of(sites_of([f"linear{i}" for i in range(5000)]))
    assert len(flat) <= MAX_ROWS
    assert flat[0].label == "linear0 … linear41"
    assert sum(len(r.sites) for r in flat) == 5000


def test_what_was_never_quantised_is_no_alarm_and_its_nan_is_one(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Probes lose nothing: their tile SQNR is +Inf, which is the best that there is."""
    from fp8watch_agent.record import Site

    sites = synthetic.make_sites(1)
    first = sites[0].__dict__
    probe = Site(
        **{**first, "id": 77, "module": "norm", "operand": "output", "gemm": "probe", "format": "", "order": 99}
    )
    given = Site(
        **{**first, "id": 76, "module": "lm_head", "gemm": "probe", "recipe": "probe", "format": "", "order": 98}
    )
    run = None

    def spoil(steps: Any, rows: Any) -> None:
        num = len(run.sites)  # type: ignore[union-attr]
        of_probe = [k for k in range(len(rows)) if k % num == num - 1]
        lossless = [k for k in range(len(rows)) if k % num >= num - 2]  # type: ignore[union-attr]
        for field in ("tile_noise_ratio_sum", "tile_noise_ratio_max", "noise_energy"):
            rows[field][lossless] = 0.0
        rows["tile_noise_ratio_sum"][0] = 0.0  # and a quantiser that lost nothing
        if steps["step"][0] == 20:
            rows["num_nan"][of_probe[3]] = 5

    app = make_app(tmp_path_factory.mktemp("probes"))
    with serving(app) as client:
        run = synthetic.Run(client, "probes", "with probes", sites=[*sites, given, probe]).register()
        run.send(range(20), fault=False, change=spoil)
        got = client.get("/runs/probes/health.json?field=tile_sqnr_db").json()
        assert got["marks"] == []
        assert not {"norm", "lm_head"} & {r["label"] for r in got["rows"]}
        assert "lm_head" in [r["label"] for r in client.get("/runs/probes/health.json?field=amax_max").json()["rows"]]
        assert got["rows"][0]["values"][0] is not None
        html = client.get("/runs/probes").text
        worst = html[html.index('id="worst"') :]
        assert 'class="bad"' not in worst
        assert "+Inf" not in worst
        run.send(range(20, 30), fault=False, change=spoil)
        got = client.get("/runs/probes/health.json?field=tile_sqnr_db").json()
        ((row, column, site, text),) = got["marks"]
        assert (got["rows"][row]["label"], got["steps"][column], site) == ("norm", 23, 77)
        assert text == "5 non-finite elements"


def test_non_finite_elements_are_marked_alike_on_a_map_of_fewer_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deviations of many sites have wider columns than their counts alone would have."""
    step = 50

    def spoil(steps: Any, rows: Any) -> None:
        rows.reshape(len(steps), -1)["num_nan"][steps["step"] == step, 0] = 3

    with serving(make_app(tmp_path)) as client:
        run = synthetic.Run(client, "r", "r", sites=synthetic.make_sites(1)).register()
        for first in range(0, 400, 100):
            run.send(range(first, first + 100), fault=False, change=spoil)
        monkeypatch.setattr(deviation, "MAX_CELLS", 100 * len(run.sites))
        for steps in ("", "&from=20&to=390"):
            marked = {}
            for field in ("num_nonfinite", "amax_deviation", "sqnr_deviation"):
                got = client.get(f"/runs/r/health.json?field={field}{steps}").json()
                marked[field] = [(got["steps"][j], site, text) for _, j, site, text in got["marks"]]
            assert marked["num_nonfinite"] == [(step, run.sites[0].id, "3 non-finite elements")]
            for field in ("amax_deviation", "sqnr_deviation"):
                ((at, site, text),) = marked[field]
                assert (site, text) == (run.sites[0].id, "3 non-finite elements")
                assert at <= step < at + 8
