"""What FP8 costs, layer by layer: a figure with its step where a turn measured it, and nothing elsewhere."""

from __future__ import annotations

import re

import pytest
from pages import synthetic
from pages.collector import make_app, serving

from fp8watch_agent.record import Measured

DEAR, CHEAP = "layers.0.mlp.up_proj", "layers.0.attention.wq"


def test_the_run_page_ranks_what_was_measured_and_each_figure_has_its_step(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with serving(make_app(tmp_path_factory.mktemp("costs"))) as client:
        run = synthetic.Run(client, "costs", "costs", sites=synthetic.make_sites(1)).register()
        dear, cheap = run.site(DEAR), run.site(CHEAP)

        def turns(steps: object, rows: object) -> None:
            for step, site, impact in ((3, dear, 3e-5), (5, cheap, 1e-5), (7, dear, 2e-5)):
                row = rows[step * len(run.sites) + run.sites.index(site)]  # type: ignore[index]
                row["impact_energy"], row["num_impact_rows"] = 64 * impact**2, 64
                row["measured"] |= int(Measured.IMPACT)

        run.send(range(10), change=turns)
        html = client.get("/runs/costs").text
        panel = html[html.index('id="costs"') : html.index('id="checkpoints"')]
        of_dear = client.get(f"/runs/costs/sites/{dear.id}").text
        of_weight = client.get(f"/runs/costs/sites/{run.site(DEAR, 'weight').id}").text
        (series,) = client.get("/api/v1/runs/costs/series", params={"site": dear.id, "field": "impact_rms"}).json(),  # fmt: skip

    cells = [re.findall(r">([^<>]+)<", row) for row in re.findall(r'<tr><td><a class="rowlink".*?</tr>', panel, re.S)]
    assert cells == [[DEAR, "2e−5", "80 %", "7"], [CHEAP, "1e−5", "20 %", "5"]]
    assert "5 without a figure" in panel
    assert 'title="step 7">2e−5 nats<' in of_dear
    assert "Loss impact per token" in of_dear
    assert "oss impact per token" not in of_weight
    assert [(s, v) for s, v in zip(series["steps"], series["values"], strict=True) if v is not None] == [
        (3, pytest.approx(3e-5, rel=1e-3)), (7, pytest.approx(2e-5, rel=1e-3))
    ]  # fmt: skip


def test_a_run_without_a_turn_has_no_table(tmp_path_factory: pytest.TempPathFactory) -> None:
    with serving(make_app(tmp_path_factory.mktemp("none"))) as client:
        synthetic.Run(client, "none", "none", sites=synthetic.make_sites(1)).register().send(range(5))
        html = client.get("/runs/none").text
    assert '<section class="panel" id="costs" data-live hidden>' in html
    assert "layer by layer" not in html
