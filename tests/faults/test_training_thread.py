"""The thread that trains does no I/O and does not wait, whatever becomes of the collector."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from faults.proxy import UP, Fault, proxy
from faults.zygote import Zygote
from support.agents import serve
from support.counts import part_of

SWITCHES_PER_STEP = 2.0
"""Of these may come on top: the interpreter's lock is held by the sender, more often on a busy machine. Waiting for another
thread by an event, a condition or a sleep is seen by the call itself; this sees what hides in C."""

HARMLESS = {"builtins.id", "sys._getframe", "object.__getattr__"}
"""Audit events that ask nothing of the system: the address of an object, a frame of the call stack and its code."""

FAULTS = {
    "up": Fault(),
    "blackholed": Fault(blackhole=True),
    "1 B/s": Fault(bytes_per_s=1.0),
    "429": Fault(status=429, headers="Retry-After: 1\r\n"),
}


def measure(zygote: Zygote, num_steps: int, tmp_path: Path, refused_url: str) -> dict[str, dict[str, Any]]:
    """Of each case what its process told, by name."""
    with serve() as collector, ExitStack() as stack:
        proxies = {name: stack.enter_context(proxy(collector.url)) for name in FAULTS}
        for name, fault in FAULTS.items():
            proxies[name].fault = fault
        cases = [
            {
                "name": name,
                "collector": proxies[name].url if name in proxies else refused_url,
                "file_bytes": 4096 if name == "disk full" else 0,
            }
            for name in ("no observer", *FAULTS, "refused", "disk full", "planted")
        ]
        plan = json.dumps({"steps": num_steps, "cases": cases})
        lines = zygote.run(tmp_path, "faults.quiet_steps", plan, FP8WATCH_SPOOL_DIR=str(tmp_path / "spool"))
        for name, fault in FAULTS.items():
            assert proxies[name].num_requests > 0, f"{name}: nobody came by"
            assert fault == UP or proxies[name].num_bitten > 0, f"{name}: the fault did not bite"
    got = {one["name"]: one for one in map(json.loads, lines)}
    assert got["up"]["health"]["acknowledged"] > 0
    for name in ("blackholed", "1 B/s", "429", "refused", "disk full"):
        assert got[name]["health"]["acknowledged"] == 0, name
    assert got["disk full"]["health"]["queued"] > 0, "there was room on the disk"
    return got


def check(zygote: Zygote, num_steps: int, tmp_path: Path, refused_url: str) -> None:
    for number in range(
        3
    ):  # on a machine that is busy any thread waits for its turn: what the observer does, it does each time
        folder = tmp_path / str(number)
        folder.mkdir()
        got = measure(zygote, num_steps, folder, refused_url)
        alone, planted = got.pop("no observer"), got.pop("planted")
        if all(case["switches"] - alone["switches"] <= SWITCHES_PER_STEP * num_steps for case in got.values()):
            break
    for name, case in got.items():
        print(f"{name}: {case['switches']} waits, {case['io'] - alone['io']} reads and writes in {num_steps} steps")
        assert not {*(Counter(case["events"]) - Counter(alone["events"]))} - HARMLESS, name
        assert case["calls"] == {}, name
        assert case["io"] - alone["io"] <= 2, name  # /proc itself is read in pieces
        assert case["switches"] - alone["switches"] <= SWITCHES_PER_STEP * num_steps, name
        assert case["errors"] == {}, name
    assert len(got) == 6
    assert any(call.startswith("send in ") for call in planted["calls"]), "a planted send was not seen"


def test_steps_are_quiet_in_all_six(zygote: Zygote, tmp_path: Path, refused_url: str) -> None:
    check(zygote, 60, tmp_path, refused_url)


@pytest.mark.heavy(6, "fp8watch/session", "agent/fp8watch_agent")
def test_a_thousand_steps_are_quiet_in_all_six(zygote: Zygote, tmp_path: Path, refused_url: str) -> None:
    check(zygote, part_of(1000), tmp_path, refused_url)
