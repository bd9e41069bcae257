"""Two runs side by side in a browser: ticked on the list, compared by key, drawn."""

from __future__ import annotations

import pytest
from browser.kit import Collector, drawn
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser


def test_two_rows_are_ticked_and_compared_by_key(page: Page, collector: Collector) -> None:
    page.goto(collector.url("/"))
    compare = page.locator("[data-compare]")
    page.locator("[data-tick][value=demo-inf]").check()
    expect(compare).to_be_disabled()
    expect(compare).to_have_text("Compare: choose two")
    page.locator("[data-tick][value=demo-nan]").check()
    expect(compare).to_be_enabled()
    page.keyboard.press("c")
    page.wait_for_url("**/compare?a=demo-inf&b=demo-nan")
    expect(page.locator("#headline")).to_contain_text("first in")
    expect(page.locator("#not-looked-at")).to_contain_text("sites that only the first has: layers.1.")
    drawn(page)
    assert page.evaluate("document.getElementById('difference').layout.yaxis2.type") == "log"
    assert page.evaluate("document.getElementById('ratio').data[0].z.length") == 7
