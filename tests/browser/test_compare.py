"""Two runs side by side in a browser: ticked on the list, compared by key, drawn."""

from __future__ import annotations

import pytest
from browser.kit import Collector, drawn
from pages import synthetic
from playwright.sync_api import Page, expect

from fp8watch_server.pages import compare_page

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


def test_a_run_beyond_those_that_are_offered_is_found_by_what_is_typed_and_what_is_chosen_stays(
    page: Page, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare_page, "NUM_OFFERED", 1)
    page.goto(collector.url("/"))
    page.get_by_role("link", name="Compare two runs").click()
    page.wait_for_url("**/compare")
    first, second = page.locator("select[name=a]"), page.locator("select[name=b]")
    offered = page.locator("#offered")
    expect(offered).to_contain_text("the newest 1 of ")
    expect(first.locator("option[value=demo-inf]")).to_have_count(0)
    page.keyboard.press("/")
    page.keyboard.type("demo-inf")
    expect(offered).to_have_text("1 run matches")
    first.select_option("demo-inf")
    search = page.locator("[data-find]")
    search.fill("demo-nan")
    expect(second.locator("option[value=demo-nan]")).to_have_count(1)
    expect(second.locator("option[value=demo-inf]")).to_have_count(0)
    expect(first).to_have_value("demo-inf")
    second.select_option("demo-nan")
    search.fill("nobody has this name")
    expect(offered).to_have_text("No run matches")
    expect(second).to_have_value("demo-nan")
    search.press("Enter")  # the address holds what was searched and what is compared
    page.wait_for_url("**/compare?q=nobody+has+this+name&a=demo-inf&b=demo-nan")
    expect(page.locator("#headline")).to_contain_text("first in")
    expect(first).to_have_value("demo-inf")


def test_an_incident_leads_to_what_differs_from_the_run_before(page: Page, collector: Collector) -> None:
    found = collector.client.get("/api/v1/incidents").json()["items"]
    of = next(i["id"] for i in found if i["run_id"].startswith(synthetic.HOSTILE[:4]))
    page.goto(collector.url(f"/incidents/{of}"))
    asks = page.locator("#ask li").filter(has_text="What differs from the run before?")
    asks.get_by_role("link").click()
    page.wait_for_url("**/compare?a=demo-nan&b=*")
    expect(page.locator("#headline")).to_be_visible()
