"""Faults that were named once are named for good: the small set of tests/proving/named.json, against a real collector."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from proving import plan
from proving.case import HEALTHY
from proving.judge import LOUD, judge
from proving.run import ROOT, read
from proving.score import twin_id

LIMIT_S = 900
"""On a busy machine; a quiet one needs three minutes."""


@pytest.mark.heavy(160, "fp8watch/session", "server/fp8watch_server/detect", "server/fp8watch_server/incidents")
@pytest.mark.timeout(LIMIT_S + 60)
def test_what_was_named_before_is_still_named_and_healthy_trainings_raise_nothing(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / p) for p in ("tests", ".", "agent", "server"))}
    command = [sys.executable, "-m", "proving.run", "--named", "--jobs", "2", "--results", str(results)]
    done = subprocess.run(command, env=env, cwd=ROOT, timeout=LIMIT_S, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = read(results)
    wrong = []
    for case, mode in plan.named():
        line = lines[case.id]
        loud = [i["mode"] for i in line["incidents"] if i["severity"] in LOUD]
        if case.change == HEALTHY or case.kind == "trap":
            wrong += [f"{case.id}: {', '.join(loud)} in a healthy training"] if loud else []
            continue
        got = judge(line, lines[twin_id(line)])
        modes = [i["mode"] for i in got.about]
        if not {mode, line["expected"]["modes"][0]} & set(modes):  # as before, or by its right name
            wrong.append(f"{case.id}: was named {mode}, now {', '.join(modes) or 'nothing'}")
    assert not wrong, "\n".join(wrong)
