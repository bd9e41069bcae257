"""POST /v1/incidents/{id}/bisection: which layers must leave FP8 stays with the incident."""

from __future__ import annotations

import json
from typing import Any

import pytest
import sqlalchemy as sa
from collector.filled_run import SITES, an_incident
from collector.kit import Agent

from fp8watch.diagnose.bisection import Bisection, TrialResult
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import writing

NAMES = tuple(f"layers.{i}.up" for i in range(40))


def sent(**changes: Any) -> dict[str, Any]:
    trials = (
        TrialResult((), True, "loss 11 is nan", 41.0),
        TrialResult(NAMES, False, "20 losses, the last 2.31", 38.0),
        TrialResult(("layers.3.up",), False, "20 losses, the last 2.30", 40.0),
    )
    return {**Bisection("fp8", ("layers.3.up.input",), NAMES, trials).as_json(), **changes}


@pytest.fixture
def incident(client: Any, app: Any) -> str:
    Agent(client).register(SITES)
    with writing(app.state.engine) as conn:
        conn.execute(sa.insert(t.incident), [an_incident(verdict="unknown")])
    return "i1"


def test_it_is_kept_and_an_unknown_verdict_takes_it(client: Any, incident: str) -> None:
    nothing = client.post(f"/v1/incidents/{incident}/bisection", json=sent(verdict="not-reproduced", culprits=[]))
    assert (nothing.status_code, nothing.json()["verdict"]) == (201, "unknown")
    answer = client.post(f"/v1/incidents/{incident}/bisection", json=sent())
    assert answer.status_code == 201, answer.text
    got = client.get(f"/api/v1/incidents/{incident}").json()
    assert got["verdict"] == "fp8"
    detail = got["events"][-1]["detail"]
    assert got["events"][-1]["kind"] == "bisection"
    assert detail["culprits"] == ["layers.3.up.input"]
    assert detail["sentence"].startswith("With layers.3.up.input in high precision it does not fail")
    assert [x["num_left"] for x in detail["trials"]] == [0, 40, 1]
    assert len(detail["trials"][1]["leave"]) == 8
    assert (detail["num_modules"], detail["modules"]) == (40, [])


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"", "bisection"),
        (sent(verdict="maybe"), "verdict"),
        (sent(trials=[]), "trials"),
        (sent(culprits=["x"] * 300), "culprits"),
        (sent(sentence="a\0b"), "NUL"),
        (json.dumps(sent()).replace("With", "\\ud800").encode(), "surrogate"),
        (sent(trials=[{"leave": [], "failed": True, "said": "", "seconds": -1}]), "seconds"),
    ],
)
def test_what_is_no_bisection_is_refused_and_nothing_is_kept(client: Any, incident: str, body: Any, word: str) -> None:
    given = {"content": body} if isinstance(body, bytes) else {"json": body}
    answer = client.post(f"/v1/incidents/{incident}/bisection", **given)
    assert answer.status_code == 422
    assert word in answer.json()["detail"]
    assert client.get(f"/api/v1/incidents/{incident}").json()["events"] == []
    assert client.post("/v1/incidents/none/bisection", json=sent()).status_code == 404
