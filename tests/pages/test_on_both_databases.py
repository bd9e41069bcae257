"""The pages say the same of the same run, whichever database is behind them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest
from database import fresh_database
from pages import synthetic
from pages.collector import make_app, serving
from pages.synthetic import FAULT_SITE, INCIDENT_ID

SITE = f"/runs/demo-inf/sites/{FAULT_SITE}"
PAGES = (
    "/",
    "/runs/demo-inf",
    SITE,
    f"{SITE}/tile-map?step=90",
    f"/incidents/{INCIDENT_ID}",
    "/runs/demo-nan",
    "/runs/demo-empty",
    "/runs/demo-inf?from=5000&to=6000",
)
DATA = (
    "/runs/demo-inf/training.json",
    "/runs/demo-nan/training.json?from=5&to=20",
    "/runs/demo-inf/health.json?points=40",
    "/runs/demo-inf/health.json?field=num_nonfinite&operand=input",
    f"{SITE}/charts.json",
)
CHANGING = re.compile(r'data-(?:version|at)="[^"]*"|>(?:just now|\d+ (?:s|min|h) ago)<| title="\d{4}-[^"]*UTC"')


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, httpx.Client]]:
    """The same runs in a collector on each database."""
    clients = {}
    with ExitStack() as stack:
        for kind in ("sqlite", "postgresql"):
            url = stack.enter_context(fresh_database(kind))
            app = make_app(tmp_path_factory.mktemp(kind), url)
            stack.callback(app.state.engine.dispose)
            client = clients[kind] = stack.enter_context(serving(app))
            synthetic.faulty_run(client, app.state.engine)
            synthetic.nonfinite_run(client)
            synthetic.empty_run(client)
        yield clients


@pytest.mark.parametrize("path", PAGES)
def test_a_page_is_the_same(both: dict[str, httpx.Client], path: str) -> None:
    found = {kind: client.get(path) for kind, client in both.items()}
    assert {answer.status_code for answer in found.values()} == {200}
    words = [CHANGING.sub("", answer.text) for answer in found.values()]
    assert words[0] == words[1]


@pytest.mark.parametrize("path", DATA)
def test_a_chart_is_the_same(both: dict[str, httpx.Client], path: str) -> None:
    found = [client.get(path).json() for client in both.values()]

    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_page_hears_of_what_comes(both: dict[str, httpx.Client], kind: str) -> None:
    client = both[kind]
    html = client.get("/runs/demo-empty").text
    url, shown = re.search(r'data-watch="([^"]*)" data-version="(\w+)"', html).groups()  # type: ignore[union-attr]
    with client.stream("GET", url) as stream:
        lines = (line for line in stream.iter_lines() if line.startswith("data: "))
        assert next(lines) == f"data: {shown}"
        assert client.put("/v1/runs/demo-empty", json={"name": "renamed", "world_size": 1}).status_code == 200
        assert next(lines) != f"data: {shown}"
