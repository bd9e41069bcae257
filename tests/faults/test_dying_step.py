"""The step in which training dies arrives, whole and under its number, and so does every step before it."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from faults.dying import BAD, MANNERS
from faults.zygote import Zygote
from support.agents import Collector

from fp8watch.demo.collector import incidents, running_collector
from fp8watch_agent import sync
from fp8watch_agent.record import StepStatus

ENDS = {"exception": 1, "sigterm": -signal.SIGTERM, "sigkill": -signal.SIGKILL, "skipped": 0}
STATUS = {
    "exception": StepStatus.ABORTED,
    "sigterm": StepStatus.ABORTED,
    "sigkill": StepStatus.OK,
    "skipped": StepStatus.SKIPPED,
}


def die(zygote: Zygote, folder: Path) -> None:
    """All manners, each into a folder of its own."""
    lines = zygote.run(folder, "faults.dying", str(folder), *MANNERS)
    assert {name: int(code) for name, code in (line.split() for line in lines)} == ENDS


def test_every_step_arrives_with_the_dying_one(zygote: Zygote, tmp_path: Path, collector: Collector) -> None:
    die(zygote, tmp_path)
    for manner in MANNERS:
        collector.stored.clear()
        assert sync.main(["--spool-dir", str(tmp_path / manner), "--collector", collector.url]) == 0
        assert collector.steps() == list(range(BAD + 1)), manner
        last = [b for b in collector.batches() if BAD in b.steps["step"]][-1]
        dying = last.steps[last.steps["step"] == BAD][0]
        assert StepStatus(dying["status"]) == STATUS[manner], manner
        bad = (last.step == BAD) & (last.column("num_nan") > 0)
        first = bad & (last.column("order") == last.column("order")[bad].min())
        assert last.column("first_nonfinite")[first][0, :2].tolist() == [3, 5], manner


@pytest.mark.heavy(7, "fp8watch/session", "agent/fp8watch_agent")
def test_the_incident_names_the_dying_step(zygote: Zygote, tmp_path: Path) -> None:
    die(zygote, tmp_path)
    (tmp_path / "collector").mkdir()
    with running_collector(tmp_path / "collector", 0) as url:
        for manner in MANNERS:
            assert sync.main(["--spool-dir", str(tmp_path / manner), "--collector", url]) == 0
        for manner in MANNERS:
            found = wait_for(url, f"dying-{manner}")
            assert {i["first_step"] for i in found} == {BAD}, manner
            assert any(i["place"]["module"] == "0" for i in found), manner


def wait_for(url: str, run_id: str):
    for _ in range(200):
        if found := incidents(url, run_id):
            return found
        time.sleep(0.1)
    raise AssertionError(f"no incident of {run_id}")
