"""Where models take turns in one process, what a watch paces by the clock is paced by the time of its own model."""

from __future__ import annotations

import pytest
from benchmarks import own_time
from benchmarks.own_time import in_own_time

from fp8watch.observer import observation_plan
from fp8watch.session import update_turns


@pytest.mark.parametrize("module", [observation_plan, update_turns], ids=["canary", "updates"])
def test_the_time_of_others_does_not_count(module, monkeypatch) -> None:
    now = [100.0]
    monkeypatch.setattr(own_time.time, "perf_counter", lambda: now[0])
    for paced in (observation_plan, update_turns):
        monkeypatch.setattr(paced, "perf_counter", paced.perf_counter)  # is put back
    read: dict[str, list[float]] = {"one": [], "other": []}

    def step(name: str, takes: float):
        def run() -> None:
            read[name].append(module.perf_counter())
            now[0] += takes
            read[name].append(module.perf_counter())

        return in_own_time(run)

    one, other = step("one", 1.0), step("other", 7.0)
    for _ in range(3):
        one()
        other()
    assert read["one"] == [100, 101, 101, 102, 102, 103]
    assert read["other"] == [100, 107, 107, 114, 114, 121]
