"""The collector goes away while pages are open, and comes back with what happened meanwhile."""

from __future__ import annotations

import contextlib
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from browser.kit import drawn, until
from pages import synthetic
from pages.collector import make_app, serving
from playwright.sync_api import Browser, expect

pytestmark = pytest.mark.browser


@pytest.mark.heavy(12, "server/fp8watch_server/pages", first=True)
def test_open_pages_say_so_and_are_right_again_without_a_reload(browser: Browser, tmp_path: Path) -> None:
    sites = synthetic.make_sites(1)
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    errors: list[str] = []
    try:
        with contextlib.ExitStack() as life:
            app = make_app(tmp_path)
            client = life.enter_context(serving(app))
            run = synthetic.Run(client, "r", "lost and found", sites=sites).register()
            run.send(range(10))
            base = str(client.base_url).rstrip("/")
            pages = []
            for path in ("/", "/runs/r", f"/runs/r/sites/{sites[0].id}"):
                page = context.new_page()
                page.on("pageerror", lambda e: errors.append(str(e)))
                page.goto(base + path)
                drawn(page)
                expect(page.locator("#live")).to_have_text("live")
                page.evaluate("window.loadedOnce = true")
                pages.append(page)
        for page in pages:
            expect(page.locator("#live")).to_have_text("collector not reachable, trying again")
            expect(page.locator("#live")).to_have_class("live off")
            assert page.locator("main").inner_text()  # what was shown stays
        assert pages[1].evaluate("document.getElementById('training').data[0].x.at(-1)") == 9

        app = make_app(tmp_path)
        with serving(app, urlsplit(base).port or 0) as client:
            run.client = client
            run.send(range(10, 20))
            for page in pages:
                expect(page.locator("#live")).to_have_text("live", timeout=20_000)
            until(pages[1], "document.getElementById('training').data[0].x.at(-1) === 19")
            until(pages[1], "document.getElementById('health').data[0].x.at(-1) === 19")
            until(pages[2], "document.getElementById('amax').data[0].x.at(-1) === 19")
            expect(pages[0].locator("main")).to_contain_text("19")
            assert all(page.evaluate("window.loadedOnce") for page in pages)
            for page in pages:
                page.close()
        assert errors == []
    finally:
        context.close()
