"""Pages stay true without being loaded again."""

from __future__ import annotations

import re

import pytest
from browser.kit import Collector, Watched, drawn, until
from pages import synthetic
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser


def test_new_steps_and_incidents_appear_without_a_reload(page: Page, collector: Collector) -> None:
    run = synthetic.Run(
        collector.client, "live", "live run", sites=synthetic.make_sites(1), session="e" * 32
    ).register()
    run.send(range(10))
    page.goto(collector.url("/runs/live"))
    drawn(page)
    page.evaluate("window.loadedOnce = true")
    expect(page.locator("#facts")).to_contain_text("9")
    run.send(range(10, 20))
    until(page, "document.getElementById('training').data[0].x.at(-1) === 19")
    until(page, "document.getElementById('health').data[0].x.at(-1) === 19")
    expect(page.locator("#worst tbody tr").first).to_contain_text("19")
    site = run.sites[0]
    synthetic.add_incident(
        collector.app.state.engine, "live", "f" * 32, first_step=19, last_step=19, title="Found while you looked",
        sites=[site.id], place={"ranks": [0], "module": site.module, "operand": "input", "direction": "rowwise"},
    )  # fmt: skip
    expect(page.locator("#incidents")).to_contain_text("Found while you looked")
    until(page, "document.getElementById('training').layout.shapes.length === 1")
    assert page.evaluate("window.loadedOnce") is True

    page.locator("a.card.incident").click()
    drawn(page)
    page.evaluate("window.loadedOnce = true")
    page.get_by_role("button", name="Acknowledge").click()
    expect(page.locator("#head")).to_contain_text("acknowledged")
    expect(page.get_by_role("button", name="Acknowledge")).to_have_count(0)
    page.get_by_role("button", name="Resolve").click()
    expect(page.locator("#head")).to_contain_text("resolved")
    expect(page.locator("#timeline li")).to_have_count(3)
    assert page.evaluate("window.loadedOnce") is True


def test_a_run_without_data_turns_into_its_page_when_the_first_step_arrives(page: Page, collector: Collector) -> None:
    run = synthetic.Run(
        collector.client, "late", "late run", sites=synthetic.make_sites(1), session="f" * 32
    ).register()
    page.goto(collector.url("/runs/late"))
    expect(page.get_by_role("heading", level=1)).to_have_text("late run: no data yet")
    until(page, "document.getElementById('live').textContent === 'live'")
    run.send(range(3))
    expect(page.get_by_role("heading", level=1)).to_have_text("late run")
    drawn(page)


def test_a_chart_that_had_nothing_to_show_shows_what_comes(page: Page, collector: Collector) -> None:
    def unmeasured(steps, rows):  # type: ignore[no-untyped-def]
        steps["present"] = 4
        rows["measured"] = 0

    run = synthetic.Run(
        collector.client, "first", "first run", sites=synthetic.make_sites(1), session="9" * 32
    ).register()
    run.send(range(3), change=unmeasured)
    page.goto(collector.url(f"/runs/first/sites/{run.sites[0].id}"))
    drawn(page)
    expect(page.locator("#sqnr .nothing")).to_have_text("Not measured at this site.")
    until(page, "document.getElementById('live').textContent === 'live'")
    run.send(range(3, 9))
    until(page, "document.getElementById('sqnr').data?.[0].y.at(-1) > 30")
    expect(page.locator("#sqnr .nothing")).to_have_count(0)
    assert page.evaluate("document.getElementById('sqnr').data[0].y.slice(0, 4)")[:3] == [None] * 3  # a gap, never 0


def test_tile_map_gets_new_steps(page: Page, collector: Collector) -> None:
    run = synthetic.Run(
        collector.client, "maps", "maps run", sites=synthetic.make_sites(1), session="a" * 32
    ).register()
    run.send(range(5))
    run.send_maps([3, 4], [run.sites[0]])
    page.goto(collector.url(f"/runs/maps/sites/{run.sites[0].id}/tile-map"))
    until(page, "document.querySelector('[data-tile-map]').dataset.loaded === '4'")
    until(page, "document.getElementById('live').textContent === 'live'")
    run.send_maps([5], [run.sites[0]])
    run.send(range(5, 7))
    until(page, "document.querySelector('[data-tile-map]').dataset.loaded === '5'")
    expect(page.locator("output[data-map-step]")).to_have_text("5")


@pytest.mark.heavy(4, "server/fp8watch_server/pages", first=True)
def test_page_says_when_the_collector_cannot_be_reached_and_recovers(
    page: Page, collector: Collector, watched: Watched
) -> None:
    stream = re.compile(r"/live(\?|$)")
    page.route(stream, lambda route: route.abort())
    page.goto(collector.url("/"))
    expect(page.locator("#live")).to_contain_text("not reachable")
    page.unroute(stream)
    expect(page.locator("#live")).to_have_text("live")
    assert all("net::ERR_FAILED" in e for e in watched.errors)
    watched.errors.clear()


def test_an_incident_is_silenced_for_a_while_and_heard_again(page: Page, collector: Collector) -> None:
    page.goto(collector.url(f"/incidents/{synthetic.INCIDENT_ID}"))
    page.get_by_label("For how long").select_option("8 hours")
    page.evaluate("document.activeElement.blur()")
    assign = f"/api/v1/incidents/{synthetic.INCIDENT_ID}/assign"
    collector.client.post(assign, json={"owner": "eve"})
    expect(page.locator("#head .owner")).to_have_text(
        "eve", timeout=15_000
    )  # renewed, and what was chosen stays chosen
    collector.client.post(assign, json={"owner": ""})
    page.get_by_role("button", name="Silence", exact=True).click()
    expect(page.locator("#head")).to_contain_text("Silenced until")
    (silence,) = collector.client.get("/api/v1/silences").json()["items"]
    assert (silence["run_id"], silence["mode"], silence["module"]) == (
        "demo-inf",
        "inf-laundering",
        synthetic.FAULT_MODULE,
    )
    assert silence["expires_at"] - silence["created_at"] == pytest.approx(8 * 3600)
    page.get_by_role("button", name="End silence").click()
    expect(page.locator("#head")).not_to_contain_text("Silenced")
    assert collector.client.get("/api/v1/silences").json()["items"] == []


def test_what_the_collector_refuses_is_said_beside_the_buttons(
    page: Page, collector: Collector, watched: Watched
) -> None:
    page.goto(collector.url(f"/incidents/{synthetic.INCIDENT_ID}"))
    body = '{"detail": "the token\'s scopes are read", "remedy": "use a token with the scope admin"}'
    refuse = re.compile(r"/api/v1/silences$")
    page.route(refuse, lambda route: route.fulfill(status=403, body=body))
    page.get_by_role("button", name="Silence", exact=True).click()
    expect(page.get_by_role("alert")).to_have_text(
        "Not done: the token's scopes are read; use a token with the scope admin"
    )
    page.unroute(refuse)
    assert all("403" in e for e in watched.errors)
    watched.errors.clear()


def test_a_page_that_nobody_sees_holds_no_connection(page: Page, collector: Collector) -> None:
    synthetic.runs_on(collector.app.state.engine, "demo-inf")  # tests before this one have sent steps of it
    page.goto(collector.url("/runs/demo-inf"))
    expect(page.locator("#live")).to_have_text("live")
    hide = """(hidden) => { Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
        document.dispatchEvent(new Event("visibilitychange")); }"""
    streams = "() => performance.getEntriesByType('resource').filter((r) => r.name.includes('/live?')).length"
    before = page.evaluate(streams)  # a stream is an entry when it has ended
    page.evaluate(hide, True)
    until(page, f"({streams})() === {before + 1}")
    page.evaluate(hide, False)
    expect(page.locator("#live")).to_have_text("live")


@pytest.mark.heavy(6, "server/fp8watch_server/pages", first=True)
def test_times_grow_old_without_a_word_from_the_collector(page: Page, collector: Collector) -> None:
    page.goto(collector.url("/"))
    aged = """(() => { const first = document.querySelector("time[data-at]"), says = first.textContent;
        first.dataset.at = String(Date.now() / 1000 - 7300);
        return says === "2 h ago"; })()"""
    until(page, aged, 60)  # again and again: a refresh puts another one in its place


def test_a_click_and_the_focus_outlive_the_renewal_of_their_part(page: Page, collector: Collector) -> None:
    synthetic.Run(
        collector.client, "pressed", "pressed run", sites=synthetic.make_sites(1), session="8" * 32
    ).register()
    page.goto(collector.url("/"))
    until(page, "document.getElementById('live').textContent === 'live'")
    link = page.locator("#runs thead").get_by_role("link", name="Owner")
    row = page.locator("#runs tbody a[href='/runs/pressed']")
    row.focus()
    with page.expect_response(collector.url("/")) as renewed:
        collector.client.patch("/api/v1/runs/pressed", json={"tags": ["told-while-focused"]})
    assert renewed.value.ok
    expect(page.locator("#runs")).to_contain_text("told-while-focused")
    expect(row).to_be_focused()

    link.hover()
    page.mouse.down()
    with page.expect_response(collector.url("/")) as renewed:
        collector.client.patch("/api/v1/runs/pressed", json={"tags": ["told-while-pressed"]})
    renewed.value.finished()
    page.wait_for_timeout(300)  # for what would be replaced now
    page.mouse.up()
    page.wait_for_url("**sort=owner*")
    collector.client.delete("/api/v1/runs/pressed")  # other tests sort by tags


def test_a_page_that_cannot_be_renewed_says_so_and_tries_again(
    page: Page, collector: Collector, watched: Watched
) -> None:
    run = synthetic.Run(collector.client, "busy", "busy", sites=synthetic.make_sites(1)[:1], session="4" * 32)
    run.register().send(range(10))
    url = collector.url("/runs/busy")
    page.goto(url)
    drawn(page)
    expect(page.locator("#live")).to_have_text("live")
    page.route(url, lambda route: route.fulfill(status=503))
    run.send(range(10, 20), ended=True)  # and nothing comes after it
    expect(page.locator("#live")).to_have_text("could not be renewed, trying again")
    expect(page.locator("#live")).to_have_class("live off")
    page.unroute(url)
    expect(page.locator("#facts")).to_contain_text("19")
    expect(page.locator("#live")).to_have_text("ended")
    assert all("503" in e for e in watched.errors)
    watched.errors.clear()
    collector.client.delete("/api/v1/runs/busy")


def test_the_page_of_a_run_that_was_deleted_says_so(page: Page, collector: Collector, watched: Watched) -> None:
    run = synthetic.Run(collector.client, "deleted", "deleted", sites=synthetic.make_sites(1)[:1], session="3" * 32)
    run.register().send(range(10))
    page.goto(collector.url("/runs/deleted"))
    drawn(page)
    expect(page.locator("#live")).to_have_text("live")
    assert collector.client.delete("/api/v1/runs/deleted").is_success
    expect(page.get_by_role("heading", level=1)).to_have_text("No such run")
    assert all("404" in e for e in watched.errors)
    watched.errors.clear()
