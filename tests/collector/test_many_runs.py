"""More runs that send than engines fit into memory: nothing is looked at twice."""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import Any, ClassVar

import pytest
from collector.kit import Agent, FakeEngine, Recorder, make_site

from fp8watch_server.pipeline import detect_worker, run_engines
from fp8watch_server.pipeline.detect_worker import DetectWorker
from fp8watch_server.store import pending

UP = make_site("up")


class Saved(FakeEngine):
    """What it has seen is its state."""

    observed: ClassVar[Counter[tuple[str, int]]] = Counter()

    def observe(self, batch: Any, at: float | None = None) -> Any:
        self.observed[batch.header.run, batch.header.seq] += 1
        return super().observe(batch, at)

    def dump(self) -> bytes:
        return json.dumps(self.seen).encode()


def test_a_run_that_fell_silent_is_judged_though_others_send(client: Any, app: Any) -> None:
    recorder = Recorder()
    worker = DetectWorker(app.state.engine, recorder.detection())
    silent, other = (Agent(client, run=f"run-{i}", session=f"{i:032x}").register([UP]) for i in range(2))
    silent.send([UP], [1])
    worker._work()
    ticked: list[float] = []
    recorder.engines[0].tick = lambda now: ticked.append(now) or []  # type: ignore[method-assign]
    until = time.monotonic() + 60
    step = 0
    while not ticked:
        assert time.monotonic() < until
        other.send([UP], [step := step + 1])
        worker._work()


def test_clocks_go_on_where_more_waits_than_a_round_takes_but_not_of_runs_whose_batches_wait(
    client: Any, app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    worker = DetectWorker(app.state.engine, recorder.detection())
    silent, waits, other = (Agent(client, run=f"run-{i}", session=f"{i:032x}").register([UP]) for i in range(3))
    for run in (silent, waits, other):
        run.send([UP], [1])
        worker._work()
    for module, name, value in (
        (detect_worker, "BATCHES_AT_ONCE", 1),
        (pending, "BATCHES_AT_ONCE", 1),
        (detect_worker, "IDLE_S", 0.0),
    ):
        monkeypatch.setattr(module, name, value)
    ticked: list[str] = []
    for run, engine in zip(("silent", "waits", "other"), recorder.engines, strict=True):
        engine.tick = lambda now, run=run: ticked.append(run) or []  # type: ignore[method-assign]
    other.send([UP], [2])
    waits.send([UP], [2])
    worker._work()
    assert ticked == ["silent"]
    worker._work()
    assert sorted(ticked) == ["other", "silent", "silent"]


def test_an_engine_that_leaves_memory_is_saved(client: Any, app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_engines, "MAX_ENGINES", 2)
    Saved.observed.clear()
    detection = Recorder().detection()

    def load(state: bytes, sites: Any, run_id: str, run_name: str) -> Saved:
        made = Saved(sites)
        made.seen = [tuple(item) for item in json.loads(state)]
        return made

    object.__setattr__(detection, "make_engine", lambda sites, run_id, run_name: Saved(sites))
    object.__setattr__(detection, "load_engine", load)
    worker = DetectWorker(app.state.engine, detection)
    runs = [Agent(client, run=f"run-{i}", session=f"{i:032x}").register([UP]) for i in range(3)]
    for step in range(6):
        for run in runs:
            run.send([UP], [step])
        assert worker.drain() == 3
    assert Saved.observed.total() == 18
    for (run, _), engine in worker._engines.items():
        assert [seq for _, seq in engine.engine.seen] == [1, 2, 3, 4, 5, 6], run
