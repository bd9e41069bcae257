"""A real Chromium on a real collector, on either database. Every page is watched: what its console says, and whom it asks.

Each test that takes `collector` runs on SQLite with every change, and on PostgreSQL in `make test-long`. What asks the
database something of its own (PER_CHANGE) runs on both with every change.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from urllib.parse import urlsplit

import httpx
import pytest
from browser.kit import Collector, Watched
from fastapi import FastAPI
from pages import synthetic
from pages.collector import make_app, serving
from playwright.sync_api import Browser, Error, Page, expect, sync_playwright
from support.database import KINDS, fresh_database
from support.planted import HEAVY_LAST

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PER_CHANGE = ("test_runs_and_inbox", "test_compare", "test_ten_questions")
"""Files whose clicks search, sort, page, write or compare: statements that the two databases answer in their own ways."""
HOW = (
    "no Chromium: apt-get install chromium (or: playwright install chromium); FP8WATCH_CHROMIUM names one that lies "
    "elsewhere"
)


def find_chromium() -> str | None:
    """A Chromium of this machine."""
    named = os.environ.get("FP8WATCH_CHROMIUM")
    names = [named] if named else ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One Chromium for all tests; without one they skip, or fail where a browser is required."""
    with sync_playwright() as playwright:
        try:
            chromium = playwright.chromium.launch(executable_path=find_chromium(), args=ARGUMENTS)
        except Error as e:
            if os.environ.get("FP8WATCH_REQUIRE_BROWSER") == "1":
                pytest.fail(f"{HOW}\n{e}")
            pytest.skip(HOW)
        yield chromium
        chromium.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Both databases; on SQLite a test has the name that it has in its file."""
    if "collector" not in metafunc.fixturenames:
        return
    per_change = metafunc.module.__name__.rpartition(".")[2] in PER_CHANGE
    sqlite, postgresql = KINDS
    kinds = [
        pytest.param(sqlite, id=pytest.HIDDEN_PARAM),
        pytest.param(postgresql, marks=() if per_change else pytest.mark.long),
    ]
    metafunc.parametrize("collector", kinds, indirect=True, scope="session")


@pytest.fixture(scope="session")
def collectors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Collector]]:
    """One collector for each database, made when it is first asked for."""
    made: dict[str, Collector] = {}
    with ExitStack() as stack:

        def of(kind: str) -> Collector:
            if kind not in made:
                app = make_app(tmp_path_factory.mktemp("browser"), stack.enter_context(fresh_database(kind)))
                stack.callback(app.state.engine.dispose)
                made[kind] = filled(app, stack.enter_context(serving(app)))
            return made[kind]

        yield of


def filled(app: FastAPI, client: httpx.Client) -> Collector:
    """A faulty, a non-finite, a hostile and an empty run."""
    found = Collector(app, client)
    found.runs["faulty"] = synthetic.faulty_run(client, app.state.engine)
    found.runs["nonfinite"] = synthetic.nonfinite_run(client)
    found.runs["hostile"] = synthetic.hostile_run(client, app.state.engine)
    found.runs["empty"] = synthetic.empty_run(client)
    return found


@pytest.fixture(scope="session")
def collector(request: pytest.FixtureRequest, collectors: Callable[[str], Collector]) -> Collector:
    """The collector of all tests on one database."""
    return collectors(request.param)


@pytest.fixture(scope="session")
def context_page(browser: Browser) -> Iterator[Page]:
    """One tab for all tests, so that plotly.js is fetched once, as for a person."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="dark")
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    yield context.new_page()
    context.close()


@pytest.fixture
def watched() -> Watched:
    """Filled by `page`."""
    return Watched()


@pytest.fixture
def page(context_page: Page, collector: Collector, watched: Watched) -> Iterator[Page]:
    """A page that must end its test with a clean console, without dialogs, and without a request to elsewhere."""
    own = urlsplit(collector.url("/")).netloc

    def on_request(request: object) -> None:
        url = request.url  # type: ignore[attr-defined]
        if not url.startswith(("data:", "blob:", "about:")) and urlsplit(url).netloc != own:
            watched.foreign.append(url)

    def on_console(message: object) -> None:
        if message.type in ("error", "warning"):  # type: ignore[attr-defined]
            watched.errors.append(message.text)  # type: ignore[attr-defined]

    def on_error(error: object) -> None:
        watched.errors.append(str(error))

    def on_dialog(dialog: object) -> None:
        watched.dialogs.append(dialog.message)  # type: ignore[attr-defined]
        dialog.dismiss()  # type: ignore[attr-defined]

    listeners = {"request": on_request, "console": on_console, "pageerror": on_error, "dialog": on_dialog}
    for event, listener in listeners.items():
        context_page.on(event, listener)  # type: ignore[call-overload]
    context_page.set_default_timeout(20_000)
    expect.set_options(timeout=5_000 if os.environ.get(HEAVY_LAST) else 20_000)  # a bug is to be seen soon
    yield context_page
    context_page.goto("about:blank")
    for event, listener in listeners.items():
        context_page.remove_listener(event, listener)
    assert watched.errors == []
    assert watched.foreign == []
    assert watched.dialogs == []
