"""What BF16 said about an incident is on its page, also on one that was open when it was said."""

from __future__ import annotations

from typing import Any

import pytest
from browser.kit import Collector, drawn
from pages import synthetic
from pages.synthetic import HOSTILE
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser

ID = "6" * 32


def comparison(**changes: Any) -> dict[str, Any]:
    """As the training process sends it: three steps, the last of which is NaN in FP8 only."""
    steps = [
        {"step": 14 + i, "loss_fp8": "nan" if i == 2 else 2.5 + 0.001 * i, "loss_high": 2.5, "difference": d}
        for i, d in enumerate((0.0, 0.0004, "nan"))
    ]
    layers: list[dict[str, Any]] = [
        {"module": f"layers.{i}.up", "output_error": i / 100, "grad_cosine": 1 - i / 50} for i in range(12)
    ]
    layers[4] |= {"module": HOSTILE, "output_error": "nan", "grad_cosine": None}
    return {
        "verdict": "fp8", "sentence": "FP8 explains it: from step 16 on the loss is NaN in FP8 and 2.5 in BF16.",
        "steps": steps, "layers": layers, "recipe": "delayed", "high_precision": "BF16", "first_diverging_step": 16,
        **changes,
    }  # fmt: skip


def test_it_appears_with_steps_layers_and_verdict_without_a_reload(page: Page, collector: Collector) -> None:
    run = synthetic.Run(collector.client, "compared", "c", sites=synthetic.make_sites(1), session="6" * 32).register()
    run.send(range(20))
    synthetic.add_incident(
        collector.app.state.engine, "compared", ID, verdict="unknown", first_step=16, last_step=16, sites=[],
        num_sites=0, place={"ranks": [0], "module": None, "gemm": None, "operand": None, "direction": None,
                            "tile": None, "element": None},
    )  # fmt: skip
    page.goto(collector.url(f"/incidents/{ID}"))
    drawn(page)
    page.evaluate("window.loadedOnce = true")
    panel = page.locator("#comparison")
    expect(panel).to_be_hidden()
    expect(page.locator("#head")).to_contain_text("undecided")

    assert collector.client.post(f"/v1/incidents/{ID}/comparison", json=comparison()).status_code == 201
    expect(panel.get_by_role("heading")).to_have_text("What BF16 said")
    expect(panel).to_contain_text("FP8 explains it: from step 16 on")
    rows = panel.locator("table").first.locator("tbody tr")
    expect(rows).to_have_count(3)
    expect(rows.nth(0)).to_have_text("142.52.50 %")
    expect(rows.nth(2)).to_have_class("parting")
    expect(rows.nth(2).locator(".nonfinite")).to_have_text(["NaN", "NaN"])
    layers = panel.locator("table").nth(1).locator("tbody tr")
    expect(layers).to_have_count(8)
    expect(layers.nth(0)).to_contain_text(HOSTILE)  # NaN is the farthest apart, and a name is text
    expect(layers.nth(0).locator(".nonfinite")).to_have_text("NaN")
    expect(layers.nth(1)).to_contain_text("layers.11.up")
    expect(layers.nth(1)).to_contain_text("11 %")
    assert panel.locator("img, script").count() == 0
    expect(page.locator("#head")).to_contain_text("FP8 is the cause")
    expect(page.locator("#timeline")).to_contain_text("comparison", ignore_case=True)
    assert page.evaluate("window.loadedOnce") is True

    told = comparison(verdict="shared", sentence="BF16 does the same.", layers=[])
    assert collector.client.post(f"/v1/incidents/{ID}/comparison", json=told).status_code == 201
    expect(panel).to_contain_text("BF16 does the same.")
    expect(panel.locator("table")).to_have_count(1)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
