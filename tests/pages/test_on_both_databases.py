"""The pages say the same of the same run, whichever database is behind them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest
import sqlalchemy as sa
from pages import synthetic
from pages.collector import make_app, serving
from pages.synthetic import FAULT_SITE, INCIDENT_ID
from support.database import fresh_database

from fp8watch_server.db import schema
from fp8watch_server.db.dialect import make_engine, writing
from fp8watch_server.pages.live import Topic, version

SITE = f"/runs/demo-inf/sites/{FAULT_SITE}"
PAGES = (
    "/",
    "/runs/demo-inf",
    SITE,
    f"{SITE}/tile-map?step=90",
    f"/incidents/{INCIDENT_ID}",
    f"/incidents/{INCIDENT_ID}/flight",
    f"/incidents/{INCIDENT_ID}/flight.svg",
    "/runs/demo-nan/flight",
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
    "/api/v1/runs/demo-inf/flight?at=90",
)
CHANGING = re.compile(
    r'data-(?:version|at)="[^"]*"|>(?:just now|\d+ (?:s|min|h) ago)<| title="\d{4}-[^"]*UTC"|127\.0\.0\.1:\d+'
)


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, sa.Engine]]:
    """A database of each kind."""
    with ExitStack() as stack:
        found = {}
        for kind in ("sqlite", "postgresql"):
            found[kind] = make_engine(stack.enter_context(fresh_database(kind)))
            stack.callback(found[kind].dispose)
        yield found


@pytest.fixture(scope="module")
def both(engines: dict[str, sa.Engine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, httpx.Client]]:
    """The same runs in a collector on each database."""
    clients = {}
    with ExitStack() as stack:
        for kind, engine in engines.items():
            url = engine.url.render_as_string(hide_password=False)
            app = make_app(tmp_path_factory.mktemp(kind), url)
            stack.callback(app.state.engine.dispose)
            client = clients[kind] = stack.enter_context(serving(app))
            synthetic.faulty_run(client, engine)
            synthetic.nonfinite_run(client)
            synthetic.empty_run(client)
            with writing(engine) as conn:  # nobody falls silent between the one question and the other
                for table in (schema.run, schema.session):
                    conn.execute(sa.update(table).values(last_seen_at=time.time() + 3600))
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


def test_the_clock_of_training_is_the_same(both: dict[str, httpx.Client]) -> None:
    first, second = (client.get("/runs/demo-inf/training.json?x=time").json()["knots"] for client in both.values())
    assert [(s, round(t - first[0][1], 3)) for s, t in first] == [(s, round(t - second[0][1], 3)) for s, t in second]
    assert len(first) > 100


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_page_hears_of_what_comes(both: dict[str, httpx.Client], engines: dict[str, sa.Engine], kind: str) -> None:
    def now() -> str:
        with engines[kind].connect() as conn:
            return version(conn, Topic("demo-empty"))

    shown = re.search(r'data-version="(\w+)"', both[kind].get("/runs/demo-empty").text)
    assert shown is not None
    assert shown[1] == now()
    assert both[kind].put("/v1/runs/demo-empty", json={"name": "renamed", "world_size": 1}).status_code == 200
    assert shown[1] != now()
