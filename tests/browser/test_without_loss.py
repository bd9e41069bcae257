"""What lost nothing is drawn as such."""

from __future__ import annotations

import pytest
from browser.kit import Collector, drawn
from pages import synthetic
from pages.lossless import lossless
from playwright.sync_api import Page

pytestmark = pytest.mark.browser


def test_what_lost_nothing_is_not_marked_as_an_alarm(page: Page, collector: Collector) -> None:
    run = synthetic.Run(collector.client, "lossless", "lossless", sites=synthetic.make_sites(1), session="4" * 32)
    run.register()
    run.send(range(6), fault=False, change=lossless)
    page.goto(collector.url(f"/runs/lossless/sites/{run.sites[0].id}"))
    drawn(page)
    found = page.evaluate(
        """() => document.getElementById("sqnr").data.filter((t) => t.meta === "mark")
            .flatMap((t) => t.x.map((_, i) => [[].concat(t.marker.color)[i] ?? t.marker.color, t.customdata[i]]))"""
    )
    alarm = page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--critical').trim()")
    assert len(found) == 12
    assert all(colour != alarm and said == "+Inf: nothing was lost" for colour, said in found)
