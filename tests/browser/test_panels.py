"""plotly draws the panels that the page names, however many: the script has no list of its own."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from browser.kit import drawn
from pages import synthetic
from pages.collector import make_app, serving
from playwright.sync_api import Browser

from fp8watch_server.pages import panels

pytestmark = pytest.mark.browser

AXES = """() => {
    const { _fullLayout: layout, data } = document.getElementById("training");
    const of = (name) => data.find((t) => t.name === name);
    return ["loss", "gradient norm", "learning rate", "loss scale", "incidents"].map((name) => {
        const axis = layout[of(name).yaxis.replace("y", "yaxis")];
        return { title: axis.title?.text ?? "", domain: axis.domain, stroke: of(name).line?.color };
    });
}"""


def test_a_row_more_is_a_panel_more(browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scale = panels.Panel("loss_scale", "loss scale", "loss scale", "series-2", 1.0, 3)
    monkeypatch.setattr(panels, "PANELS", (*panels.PANELS, scale))
    with serving(make_app(tmp_path)) as client:
        run = synthetic.Run(client, "scaled", "scaled", sites=synthetic.make_sites(1)).register()
        run.send(
            range(40),
            fault=False,
            change=synthetic.with_loss_scale,
            logs={"max_attention_logit/layers.0.attention": [9.5] * 40},
        )
        context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
        try:
            page = context.new_page()
            page.goto(f"{client.base_url}/runs/scaled")
            drawn(page)
            *found, incidents = page.evaluate(AXES)
            whole = page.evaluate(
                "[...document.querySelectorAll('#logged .middle .from')].map((n) => n.scrollWidth <= n.clientWidth)"
            )
        finally:
            context.close()
    assert whole == [True]  # of logged scalars the number of the layer stands near the end, and is not cut
    assert [p["title"] for p in found] == ["loss", "grad norm", "lr", "loss scale"]
    assert [p["stroke"] for p in found] == ["#0b6cb3", "#b26a00", "#9c4483", "#b26a00"]
    tops = [incidents["domain"][0], *(p["domain"][1] for p in found)]
    assert tops == sorted(tops, reverse=True), "from top to bottom, below the incidents"
    assert all(a["domain"][0] > b["domain"][1] for a, b in itertools.pairwise(found))
    assert all(p["domain"][1] - p["domain"][0] > 0.04 for p in found)
