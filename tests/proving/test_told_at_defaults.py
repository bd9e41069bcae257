"""Single faults in real trainings, at attach's defaults and against a real collector, that must be told by their right name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from proving.judge import LOUD, judge
from proving.planted import FastResume
from proving.run import ROOT, read
from support.counts import in_turn

LIMIT_S = 600
"""Of a run and its twin on a busy machine; a quiet one needs half a minute."""


def ran(folder: Path, family: str, fault: str, severity: str, seed: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Lines of a run and of its healthy twin; each leg of them is a process of its own."""
    results = folder / "results.jsonl"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / p) for p in ("tests", ".", "agent", "server"))}
    command = [sys.executable, "-m", "proving.run", "--only", family, "--fault", fault, "--severity", severity]
    command += ["--seed", seed, "--results", str(results)]
    done = subprocess.run(command, env=env, cwd=ROOT, timeout=LIMIT_S, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    by_kind = {line["kind"]: line for line in read(results).values()}  # two at a time: either may end first
    return by_kind["fault"], by_kind["twin"]


@pytest.mark.heavy(30, "fp8watch/session", "server/fp8watch_server/detect", "tests/proving/families/resume.py")
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("seed", in_turn(["1", "2", "3"]))
def test_a_rate_thirty_times_too_high_for_three_steps_behind_a_resume_is_told(tmp_path: Path, seed: str) -> None:
    line, twin = ran(tmp_path, "resume", FastResume.name, "severe", seed)
    assert line["legs"] == [0, line["step"]], "the fault begins with the second process"
    assert len(twin["legs"]) == 2
    assert [i for i in twin["incidents"] if i["severity"] in LOUD] == []
    told = judge(line, twin)
    loud = [i for i in told.about if i["severity"] in LOUD]
    assert [i["mode"] for i in loud[:1]] == ["optimizer-divergence"], line["incidents"]
    assert line["step"] <= loud[0]["opened_step"] <= line["until"]
    assert told.early == []


@pytest.mark.heavy(30, "fp8watch/session", "server/fp8watch_server/detect", "tests/proving/families/moe.py")
@pytest.mark.timeout(LIMIT_S + 60)
def test_an_expert_to_which_the_router_sends_nothing_any_more_is_told(tmp_path: Path) -> None:
    """Experts that are Linears of their own are not called then, and that takes 64 steps to be told: as long as it lasts here."""
    line, twin = ran(tmp_path, "moe", "expert-starved", "severe", "2")
    assert line["until"] is None
    told = judge(line, twin)
    assert [(i["mode"], i["severity"]) for i in told.about] == [("dead-layer", "info")]
    assert told.place
    assert told.about[0]["place"]["module"].startswith(line["expected"]["modules"][0])
    assert abs(told.about[0]["first_step"] - line["step"]) <= 1
    assert [i["mode"] for i in twin["incidents"]] == []
