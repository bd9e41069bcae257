"""Checkpoints that hold a failed update are marked, wherever somebody looks before a resume."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from pages import synthetic
from pages.collector import make_app, serving

from fp8watch_agent.record import StepStatus
from fp8watch_server.store.checkpoints import Bad, listed, steps_of

RUN = "/api/v1/runs/checkpointed/checkpoints"
BROKEN, SKIPPED, WEIGHT = ("c" * 31 + n for n in "123")
UP = "layers.0.mlp.up_proj"


def states(items: list[dict[str, Any]], attempt: int) -> dict[int, str]:
    return {c["step"]: c["state"] for c in items if c["attempt"] == attempt}


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A run that failed in step 12, was found out at step 20, and goes on twice: from a poisoned checkpoint, and from a
    clean one."""
    app = make_app(tmp_path_factory.mktemp("checkpoints"))
    sites = synthetic.make_sites(1)[:5]
    with serving(app) as client:
        run = synthetic.Run(client, "checkpointed", "checkpointed", sites=sites, session="a" * 32).register()

        def skip(steps: Any, _rows: Any) -> None:
            steps["status"][steps["step"] == 5] = int(StepStatus.SKIPPED)

        logged: list[float | None] = [1.0 if step == 10 else None for step in range(20)]
        run.send(range(20), fault=False, change=skip, logs={"checkpoint_saved": logged})
        facts(client, run, {"checkpoints": "3 6 11 14 19"})
        place = {"ranks": [0], "module": UP, "gemm": "fprop", "operand": "input", "direction": "rowwise", "tile": None,
                 "element": None}  # fmt: skip
        add = synthetic.add_incident
        add(app.state.engine, run.run_id, SKIPPED, first_step=5, last_step=5, place=place, title="a skipped one")
        add(app.state.engine, run.run_id, BROKEN, first_step=12, last_step=13, place=place, title="NaN in up_proj")
        add(app.state.engine, run.run_id, "c" * 32, first_step=0, last_step=1, place=place, closed_as="false-alarm")
        add(app.state.engine, run.run_id, "d" * 32, first_step=2, last_step=3, place=place, severity="warning")

        second = replace(run, session="b" * 32, seq=0, start=time.time()).register()
        second.send(range(15, 18), fault=False)
        facts(client, second, {"checkpoints": "16", "checkpoint.session": run.session, "checkpoint.step": 15})
        third = replace(run, session="d" * 32, seq=0, start=time.time() + 1).register()
        third.send(range(12, 16), fault=False)
        facts(client, third, {"checkpoints": "13 15", "checkpoint.session": run.session, "checkpoint.step": 12})
        of_weight = {**place, "operand": "weight"}
        add(app.state.engine, run.run_id, WEIGHT, attempt=3, first_step=16, last_step=16, place=of_weight)
        yield client


def facts(client: httpx.Client, run: synthetic.Run, more: dict[str, Any]) -> None:
    body = {"rank": 0, "host": "h", "pid": 1, "started_at": run.start, "recipe": "blockwise", "backend": "reference"}
    answer = client.put(f"/v1/runs/{run.run_id}/sessions/{run.session}", json={**body, "world_size": 1, "facts": more})
    assert answer.status_code == 200, answer.text


def test_a_checkpoint_is_poisoned_from_the_failure_on_whenever_that_was_found(collector: httpx.Client) -> None:
    items = collector.get(RUN).json()["items"]
    assert states(items, 1) == {3: "clean", 6: "clean", 9: "clean", 11: "clean", 14: "poisoned", 19: "poisoned"}
    told = next(c for c in items if c["step"] == 14)
    assert (told["incident"], told["since"], told["title"]) == (BROKEN, 12, "NaN in up_proj")


def test_what_went_on_from_a_poisoned_one_is_poisoned_and_what_went_on_from_a_clean_one_is_not(
    collector: httpx.Client,
) -> None:
    items = collector.get(RUN).json()["items"]
    assert states(items, 2) == {16: "poisoned"}
    assert states(items, 3) == {13: "clean", 15: "poisoned"}  # read broken in step 16: written in 15 at the latest
    assert collector.get(RUN).json()["last_clean"] == {"attempt": 3, "step": 13}


def test_the_run_page_and_the_incident_name_the_last_clean_one(collector: httpx.Client) -> None:
    page = collector.get("/runs/checkpointed").text
    assert "The last clean one is of step <strong>13</strong>" in page
    assert "resume from it, not from a later one" in page
    assert f'href="/incidents/{BROKEN}">NaN in up_proj</a>' in page
    incident = collector.get(f"/incidents/{BROKEN}").text
    assert "3 hold what this wrote: step 16, step 19, step 14" in incident
    assert "The last clean one is of step <strong>13</strong>, attempt 3" in incident
    assert "Every step of it was skipped or aborted" in collector.get(f"/incidents/{SKIPPED}").text
    assert '<a href="#checkpoints">Resume from the checkpoint of step 13</a>' in page
    assert 'id="checkpoints" data-live hidden' in collector.get(f"/incidents/{'d' * 32}").text, "a warning"


def test_where_no_checkpoint_was_seen_the_last_step_of_a_clean_one_is_said(client: httpx.Client) -> None:
    page = client.get(f"/incidents/{synthetic.INCIDENT_ID}").text
    assert f"One of step <strong>{synthetic.FAULT_STEP - 1}</strong> or before holds nothing of it" in page


def test_a_run_without_checkpoints_says_nothing_of_them(client: httpx.Client) -> None:
    assert client.get("/api/v1/runs/demo-inf/checkpoints").json() == {"items": [], "last_clean": None, "next": None}
    assert 'id="checkpoints" data-live hidden' in client.get("/runs/demo-inf").text
    assert client.get("/api/v1/runs/nowhere/checkpoints").status_code == 404


def test_what_cannot_be_read_is_no_step_and_a_suspicion_is_no_verdict() -> None:
    assert steps_of("3 x 4 -5 ² 99999999999999999999") == [3, 4]
    assert steps_of(7) == []
    bad = {1: [Bad(50, "suspect", "i", "flipped bit", 150), Bad(149, "poisoned", "i", "flipped bit", 150)]}
    found = listed([(1, 49), (1, 100), (1, 160)], bad)
    assert [(c["step"], c["state"]) for c in found["items"]] == [(160, "poisoned"), (100, "suspect"), (49, "clean")]
    assert found["last_clean"] == {"attempt": 1, "step": 49}


@pytest.mark.parametrize("target", ["megatron", "te-debug", "torchtitan", "torchao", "fp8watch"])
def test_the_incident_offers_its_fix_as_a_file(client: httpx.Client, target: str) -> None:
    page = client.get(f"/incidents/{synthetic.INCIDENT_ID}").text
    address = f"/api/v1/incidents/{synthetic.INCIDENT_ID}/fix?for={target}"
    assert f'href="{address}"' in page
    answer = client.get(address)
    if target == "fp8watch":  # its run says nothing of a recipe of ours
        assert answer.status_code == 422
        assert "has no recipe of fp8watch" in answer.json()["detail"]
        return
    assert answer.status_code == 200
    assert "down_proj" in answer.text
    assert answer.headers["content-disposition"].startswith('attachment; filename="fp8watch-inf-laundering.')
