"""POST /v1/incidents/{id}/comparison: what BF16 said stays with the incident."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from collector.filled_run import SITES, an_incident
from collector.kit import Agent

from fp8watch.diagnose.verdict import LayerPair, StepPair, judge
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import writing


def sent(**changes: Any) -> dict[str, Any]:
    steps = (StepPair(0, 2.5, 2.5), StepPair(1, float("nan"), 2.4))
    layers = tuple(LayerPair(f"layers.{i}.up", i / 100, None, 0.99, None) for i in range(80))
    return {**judge(steps, layers, "delayed", "BF16").as_json(), **changes}


@pytest.fixture
def incident(client: Any, app: Any) -> str:
    Agent(client).register(SITES)
    with writing(app.state.engine) as conn:
        conn.execute(sa.insert(t.incident), [an_incident(verdict="unknown")])
    return "i1"


def test_it_is_kept_and_an_unknown_verdict_takes_it(client: Any, incident: str, recorder: Any) -> None:
    answer = client.post(f"/v1/incidents/{incident}/comparison", json=sent())
    assert answer.status_code == 201, answer.text
    got = client.get(f"/api/v1/incidents/{incident}").json()
    assert got["verdict"] == "fp8"
    (event,) = got["events"]
    assert event["kind"] == "comparison"
    assert event["detail"]["sentence"].startswith("FP8 explains it: from step 1 on")
    assert event["detail"]["steps"][1]["loss_fp8"] == "nan"
    assert event["detail"]["try_next"] == sent()["try_next"] != []
    assert [x["module"] for x in event["detail"]["layers"]] == [f"layers.{i}.up" for i in range(16, 80)]
    again = client.post(f"/v1/incidents/{incident}/comparison", json=sent(verdict="shared", sentence="no"))
    assert again.json()["verdict"] == "fp8"  # a verdict that is known is not overwritten
    assert [e["kind"] for e in again.json()["events"]] == ["comparison", "comparison"]


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"", "comparison"),
        (b"{}", "verdict"),
        (b"[" * 100_000, "comparison"),
        (sent(verdict="maybe"), "verdict"),
        (sent(sentence=""), "sentence"),
        (sent(steps=[]), "steps"),
        (sent(steps=[{"step": -1, "loss_fp8": 1, "loss_high": 1, "difference": 0}]), "step"),
        (sent(steps=[{"step": 1, "loss_fp8": "much", "loss_high": 1, "difference": 0}]), "loss_fp8"),
    ],
)
def test_what_is_no_comparison_is_refused_and_nothing_is_kept(client: Any, incident: str, body: Any, word: str) -> None:
    given = {"content": body} if isinstance(body, bytes) else {"json": body}
    answer = client.post(f"/v1/incidents/{incident}/comparison", **given)
    assert answer.status_code == 422
    assert word in answer.json()["detail"]
    assert client.get(f"/api/v1/incidents/{incident}").json()["events"] == []


def test_too_much_and_nowhere(client: Any, incident: str) -> None:
    assert client.post(f"/v1/incidents/{incident}/comparison", content=b"x" * (1 << 20 | 1)).status_code == 413
    assert client.post("/v1/incidents/none/comparison", json=sent()).status_code == 404
