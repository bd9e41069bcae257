"""What the query API adds to the queries: ETags, CSV, ranges of time, sessions, a description with examples."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from collector.kit import Agent, make_site, served

from fp8watch_server.app import create_app
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import writing
from fp8watch_server.pipeline.detect_worker import Detection
from fp8watch_server.settings import Settings
from fp8watch_server.store.compactor import Compactor

SITE = make_site("=HYPERLINK(evil)")


@pytest.fixture
def app(database_url: str) -> Iterator[Any]:
    def nothing(*args: Any, **kwargs: Any) -> Any:
        return {}

    detection = Detection(nothing, nothing, nothing, nothing, nothing)
    made = create_app(
        Settings(database_url=database_url), detection=detection, dispatcher=lambda e, s: None, pages=False
    )
    yield made
    made.state.engine.dispose()


@pytest.fixture
def client(app: Any) -> Iterator[httpx.Client]:
    with served(app) as url, httpx.Client(base_url=url) as made:
        yield made
    app.state.ingest.stop()


@pytest.fixture
def agent(client: httpx.Client) -> Agent:
    made = Agent(client).register([SITE])
    values = np.arange(300, dtype=float)
    values[[7, 8, 9]] = np.nan, np.inf, -np.inf
    losses = [math.nan if i == 5 else float(i) for i in range(300)]
    made.send([SITE], list(range(300)), fields={"amax_max": values}, scalars={"loss": losses})
    return made


def compact(app: Any) -> None:
    with writing(app.state.engine) as conn:
        conn.execute(t.hot_batch.update().values(detected=1))
    compactor = Compactor(app.state.engine, clock=lambda: 1e12)
    while compactor.round().anything:
        pass


PATHS = [
    f"series?site={SITE.id}&field=amax_max&to=255",
    "series?field=loss&to=255",
    "scalars?name=loss&to=255",
    "top?field=amax_max&to=255",
    "heatmap?field=amax_max&to=255",
    f"sites/{SITE.id}/histogram?to=255",
]


def test_an_answer_that_is_as_it_was_is_a_304(agent: Agent, client: httpx.Client, app: Any) -> None:
    compact(app)
    for path in PATHS:
        first = client.get(f"/api/v1/runs/run-1/{path}")
        assert first.status_code == 200, first.text
        tag = {"If-None-Match": f'"other", {first.headers["etag"]}'}
        again = client.get(f"/api/v1/runs/run-1/{path}", headers=tag)
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", first.headers["etag"])
        assert client.get(f"/api/v1/runs/run-1/{path}&points=77", headers=tag).status_code == 200
    tags = [client.get(f"/api/v1/runs/run-1/{path}").headers["etag"] for path in PATHS]
    assert len(set(tags)) == len(tags)
    agent.send([SITE], [400])  # later steps do not touch what has cooled
    assert [client.get(f"/api/v1/runs/run-1/{path}").headers["etag"] for path in PATHS] == tags
    agent.send([SITE], [20], fields={"amax_max": 1e9})
    for path, tag in zip(PATHS, tags, strict=True):
        assert client.get(f"/api/v1/runs/run-1/{path}", headers={"If-None-Match": tag}).status_code == 200, path


def test_csv_holds_every_value_and_no_formula(agent: Agent, client: httpx.Client) -> None:
    def table(path: str) -> list[list[str]]:
        answer = client.get(f"/api/v1/runs/run-1/{path}&format=csv")
        assert answer.headers["content-type"].startswith("text/csv")
        return list(csv.reader(io.StringIO(answer.text)))

    rows = table(PATHS[0])
    assert rows[0] == ["step", "amax_max"]
    assert [rows[i + 1] for i in (6, 7, 8, 9)] == [["6", "6.0"], ["7", "nan"], ["8", "inf"], ["9", "-inf"]]
    assert table(PATHS[1])[6] == ["5", "nan"]
    assert table(PATHS[3])[1][1:2] == ["'=HYPERLINK(evil)"]
    assert table(PATHS[4])[0] == ["step", "'=HYPERLINK(evil) input rowwise"]
    assert table(PATHS[5])[0][:2] == ["step", "0"]
    assert client.get(f"/api/v1/runs/run-1/{PATHS[0]}&format=xml").status_code == 422


def test_a_range_may_be_one_of_time(agent: Agent, client: httpx.Client) -> None:
    def steps(**params: Any) -> list[int]:
        answer = client.get("/api/v1/runs/run-1/series", params={"field": "loss", **params})
        assert answer.status_code == 200, answer.text
        return list(answer.json()["steps"])

    assert steps(since=1_700_000_000, until=1_700_000_001) == list(range(300))
    assert steps(since=1_700_000_000, **{"from": 290}) == list(range(290, 300))
    assert steps(until=1_600_000_000) == []
    assert client.get("/api/v1/runs/run-1/series?field=loss&since=nan").status_code == 422


def test_sessions_come_in_pages_with_their_health(agent: Agent, client: httpx.Client) -> None:
    for i in range(3):
        Agent(client, session=f"{i}" * 32, rank=i + 1).register([SITE])
    agent.send([SITE], [301], health={"dropped": 4.0})
    seen: list[dict[str, Any]] = []
    params: dict[str, Any] = {"limit": 3}
    while True:
        page = client.get("/api/v1/runs/run-1/sessions", params=params).json()
        seen += page["items"]
        if page["next"] is None:
            break
        params["cursor"] = page["next"]
    assert sorted(s["rank"] for s in seen) == [0, 1, 2, 3]
    assert next(s["health"] for s in seen if s["rank"] == 0) == {"dropped": 4.0}


def test_the_description_has_an_example_of_every_answer(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    bare = [
        path
        for path, item in paths.items()
        if path.startswith("/api/v1/")
        and "get" in item
        and (answer := item["get"]["responses"]["200"]["content"].get("application/json")) is not None
        and "example" not in answer
    ]
    assert bare == ["/api/v1/silences"]
