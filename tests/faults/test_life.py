"""Forks, DataLoader workers, attach and detach again and again, and an exit that nobody waits for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from faults.proxy import Fault, proxy
from faults.zygote import Zygote
from support.agents import Collector

SLACK = 5.0


def live(zygote: Zygote, tmp_path: Path, collector: Collector, num_forks: int) -> dict[str, Any]:
    with proxy(collector.url) as blackhole:
        blackhole.fault = Fault(blackhole=True)
        arguments = [str(tmp_path / "spool"), collector.url, blackhole.url, str(num_forks)]
        told: dict[str, Any] = json.loads(zygote.run(tmp_path, "faults.life", *arguments)[-1])
        assert blackhole.num_bitten > 0
    return told


def check(told: dict[str, Any], num_forks: int) -> None:
    assert told["forks"] == {"bad_children": 0, "steps": num_forks, "acknowledged": True}
    assert told["workers"] == {"steps": 8, "acknowledged": True}
    assert told["cycles"] == {"files": 0, "threads": 0, "module": "Linear"}
    assert told["exits"]["detach_s"] < 2.0 * SLACK


def test_a_life_with_forks_workers_and_a_blackhole(zygote: Zygote, tmp_path: Path, collector: Collector) -> None:
    check(live(zygote, tmp_path, collector, 10), 10)


@pytest.mark.heavy(7, "fp8watch/session", "agent/fp8watch_agent")
def test_a_hundred_forks(zygote: Zygote, tmp_path: Path, collector: Collector) -> None:
    check(live(zygote, tmp_path, collector, 100), 100)
