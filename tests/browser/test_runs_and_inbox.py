"""The list of runs and the inbox in a browser: by mouse and by keyboard, with a question before what cannot be undone."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
from browser.kit import Collector, until
from pages import synthetic
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser
ID = "0" * 30 + "77"


@pytest.fixture
def own(collector: Collector) -> Iterator[synthetic.Run]:
    """A run with a failure that is over, and that nobody has seen."""
    sites = [s for s in synthetic.make_sites(3) if s.module == synthetic.FAULT_MODULE]
    run = synthetic.Run(
        collector.client, "zebra/1", "a zebra run with a long name, seed 1", sites=sites, session="7" * 32
    )
    run.register().send(range(88, 93), ended=True)
    engine = collector.app.state.engine
    over = {"status": "resolved", "resolved_at": time.time(), "mode": "stale-weight-scale", "title": "Stale"}
    synthetic.add_incident(engine, run.run_id, ID, **over)
    yield run
    collector.client.delete("/api/v1/runs/zebra%2F1")


def test_runs_are_searched_walked_through_tagged_archived_and_deleted(
    page: Page, collector: Collector, own: synthetic.Run
) -> None:
    page.goto(collector.url("/"))
    page.keyboard.press("/")
    page.keyboard.type("zebra")
    page.keyboard.press("Enter")
    page.wait_for_url("**/?q=zebra")
    rows = page.locator("#runs tbody tr")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("broke, not seen yet")
    page.locator("h1").click()
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/runs/zebra%2F1")
    expect(page.locator("#headline")).to_contain_text("Over, and not seen yet (step 90): Stale.")

    page.get_by_text("Tags, note, archive, delete").click()
    page.get_by_label("Tags").fill("stripes, x")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#about")).to_contain_text("stripes")
    page.goto(collector.url("/?tag=stripes"))
    page.keyboard.press("j")
    page.keyboard.press("x")
    page.locator("[data-ticked]").get_by_role("button", name="Archive").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect(rows).to_have_count(1)
    page.locator("[data-ticked]").get_by_role("button", name="Archive").click()
    page.get_by_role("dialog").get_by_role("button", name="Archive").click()
    expect(page.locator("#runs")).to_contain_text("No run matches")
    page.goto(collector.url("/?archived=1"))
    page.get_by_label("Choose a zebra run").check()
    page.locator("[data-ticked]").get_by_role("button", name="Delete").click()
    expect(page.get_by_role("dialog")).to_contain_text("This cannot be undone")
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(page.locator("#runs")).to_contain_text("Nothing is in the archive")
    assert collector.client.get("/api/v1/runs/zebra%2F1").status_code == 404


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440, 1920])
def test_owner_and_tags_are_columns_that_sort_and_filter_and_fit(
    page: Page, collector: Collector, own: synthetic.Run, width: int, theme: str
) -> None:
    collector.client.post(f"/api/v1/incidents/{ID}/assign", json={"owner": "ann-katrin.of.numerics"})
    collector.client.patch("/api/v1/runs/zebra%2F1", json={"tags": ["a-tag", "nightly-sweep-of-h100s", "x", "y"]})
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(collector.url(f"/?theme={theme}"))
    heads = page.locator("#runs thead")
    for name in ("Owner", "Tags"):
        heads.get_by_role("link", name=name).click()
        page.wait_for_url("**sort=*")
        expect(heads.locator("[aria-sort]")).to_have_text(re.compile(name))
        expect(page.locator("#runs tbody tr").first).to_contain_text("a zebra run")  # others have none
        heads.get_by_role("link", name=name).click()
        page.wait_for_url("**reverse=1")
        expect(page.locator("#runs tbody tr").first).to_contain_text("a zebra run")
    cells = page.locator("#runs tbody tr").first
    expect(cells).to_contain_text("+1")
    panel = page.locator("#runs").evaluate(
        "e => [e.scrollWidth - e.clientWidth, innerWidth - document.body.scrollWidth]"
    )
    page.set_viewport_size({"width": 1280, "height": 900})
    assert panel[1] >= 0, "the page is wider than the window"
    assert panel[0] <= 0 or width == 390, "the table scrolls where there is room"
    cells.get_by_role("link", name="nightly-sweep-of-h100s").click()
    page.wait_for_url("**/?tag=nightly-sweep-of-h100s")
    page.locator("#runs tbody").get_by_role("link", name="ann-katrin.of.numerics").click()
    page.wait_for_url("**/?owner=ann-katrin.of.numerics")
    expect(page.locator("#runs tbody tr")).to_have_count(1)


def test_a_cause_is_seen_by_key_and_an_incident_is_assigned_commented_and_marked(
    page: Page, collector: Collector, own: synthetic.Run
) -> None:
    page.goto(collector.url("/incidents?q=zebra"))
    row = page.locator("#inbox tbody tr")
    expect(row).to_have_count(1)
    expect(row).to_contain_text("not seen yet")
    page.keyboard.press("j")
    page.keyboard.press("e")
    expect(row).to_contain_text("resolved, seen")
    posts: list[str] = []
    page.on("request", lambda request: posts.append(request.url) if request.method == "POST" else None)
    expect(page.locator("#inbox tr.chosen")).to_have_count(1)
    page.keyboard.press("e")
    page.wait_for_timeout(300)  # for what a click would send
    assert posts == [], "a second press closes the cause in all runs"
    expect(row).to_contain_text("resolved, seen")
    row.get_by_role("link").first.click()
    page.wait_for_url(f"**/incidents/{ID}")
    page.get_by_label("Owner").fill("ann")
    page.get_by_role("button", name="Assign").click()
    expect(page.locator("#head .owner")).to_have_text("ann")
    page.get_by_label("Comment").fill("the optimizer <wrote> it")
    page.get_by_role("button", name="Comment").click()
    expect(page.locator("#timeline")).to_contain_text("the optimizer <wrote> it")
    page.get_by_role("button", name="False alarm").click()
    expect(page.locator("#head .state")).to_have_text("false alarm")
    page.get_by_role("button", name="Take back").click()
    expect(page.locator("#head .state")).to_have_text("resolved, seen")
    page.goto(collector.url("/incidents?q=zebra&state=unseen"))
    until(page, "document.querySelectorAll('#inbox tbody tr').length === 0")
    for path in ("/runbooks", "/silences", "/collector"):
        page.goto(collector.url(path))
        expect(page.locator(".rooms [aria-current]")).to_have_count(1)
