"""The agent's contract with its host: it never raises, never waits, does no I/O in a step, and lets go in time."""

from __future__ import annotations

import logging
import os
import random
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.agents import Collector, eventually, make_ids, make_rows, make_sites, make_step, record

from fp8watch_agent.recorder import Recorder
from fp8watch_agent.ring import Ring
from fp8watch_agent.session import Session
from fp8watch_agent.settings import AgentSettings

TESTS = Path(__file__).parents[1]
SLACK = 5.0  # of a limit that is asserted on a shared machine


def run_child(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    head = f"""
    import os, sys, threading, time
    sys.path.insert(0, {str(TESTS)!r})
    from pathlib import Path
    import numpy as np
    from support.agents import *
    from fp8watch_agent.recorder import Recorder
    from fp8watch_agent.settings import AgentSettings
    def settings(collector=None):
        return AgentSettings(collector=collector, spool_dir=Path(sys.argv[1]), poll_interval_s=0.01, ring_bytes=1 << 22)
    """
    source = textwrap.dedent(head) + textwrap.dedent(code)
    # From 3.12 on Python warns of a fork beside threads: that is what one of these tests is about.
    command = [sys.executable, "-W", "error", "-W", "ignore:This process:DeprecationWarning", "-c", source, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("num_rows", [70, 600])
def test_a_hand_over_is_short(num_rows: int, settings: AgentSettings, session: Session) -> None:
    recorder = Recorder(replace(settings, ring_bytes=32 << 20, poll_interval_s=0.2, batch_interval_s=1.0), session)
    ids, rows, took_us = make_ids(num_rows), make_rows(num_rows), []
    steps = [make_step(s, loss=1.0) for s in range(600)]
    for step in steps:
        start = time.perf_counter_ns()
        recorder.record_step(step, ids, rows, {})
        took_us.append((time.perf_counter_ns() - start) / 1000)
    recorder.close(0.2)
    print(f"{num_rows} rows: median {statistics.median(took_us):.1f} µs, p99 {sorted(took_us)[594]:.1f} µs")
    assert statistics.median(took_us) < 50 * SLACK


def test_exit_is_in_time_with_a_collector_that_swallows_everything(
    blackhole_url: str, settings: AgentSettings, session: Session
) -> None:
    recorder = Recorder(replace(settings, collector=blackhole_url), session)
    record(recorder, range(10))
    assert eventually(
        lambda: recorder._sender.uploader is not None and recorder._sender.uploader.transport.num_requests
    )
    start = time.monotonic()
    recorder.close(2.0)
    assert time.monotonic() - start < 2.0 * SLACK
    health = recorder.health()
    assert (health.records.spooled, health.records.queued) == (30, 0)
    assert health.records.balanced
    recorder.close(2.0)


def test_a_process_that_forgets_to_close_ends_cleanly_and_loses_nothing(tmp_path: Path, collector: Collector) -> None:
    code = """
    recorder = Recorder(settings(sys.argv[2]), make_session())
    record(recorder, range(50))
    """
    for _ in range(2):
        done = run_child(code, str(tmp_path), collector.url)
        assert (done.returncode, done.stderr) == (0, "")
    from fp8watch_agent import sync

    assert sync.main(["--spool-dir", str(tmp_path), "--collector", collector.url]) == 0
    assert collector.num_records() == 2 * 150


def test_a_forked_child_is_inert(collector: Collector, tmp_path: Path) -> None:
    code = """
    recorder = Recorder(settings(sys.argv[2]), make_session())
    record(recorder, range(5))
    for i in range(10):
        pid = os.fork()
        if pid == 0:
            record(recorder, range(100, 200))
            recorder.record_tile_maps(make_maps(2))
            assert recorder.health().state == "inert"
            assert not recorder.flush(5)
            recorder.close()
            os._exit(0 if recorder.wanted_captures() == frozenset() else 1)
        assert os.waitpid(pid, 0)[1] == 0
        record(recorder, [10 + i])
    assert recorder.flush(10)
    recorder.close()
    print(recorder.health().records)
    """
    done = run_child(code, str(tmp_path), collector.url)
    assert "produced=45, acknowledged=45, queued=0, spooled=0, dropped={}" in done.stdout, done.stderr
    assert collector.steps() == [0, 1, 2, 3, 4, *range(10, 20)]


def test_an_internal_that_raises_is_swallowed_counted_and_logged_once(
    settings: AgentSettings, session: Session, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(settings, session)
    monkeypatch.setattr(Ring, "push", _raise)
    with caplog.at_level(logging.WARNING, "fp8watch"):
        record(recorder, range(5))
        recorder.close()
    assert recorder.health().internal_errors == {"record_step": 5}
    assert len([r for r in caplog.records if "planted" in r.getMessage()]) == 1


def _raise(*args: object, **kwargs: object) -> None:
    raise RuntimeError("planted")


@pytest.mark.parametrize(
    "name",
    [
        *("ring.Ring.seal", "ring.Ring.claim", "ring.Ring.journal", "ring.Ring.release", "ring.Ring.add_sites"),
        *("batch.BatchBuilder.build", "spool.Spool.append", "uploader.Uploader.send", "uploader.Uploader.register"),
        *(
            "tile_map_queue.MapQueue.push",
            "tile_map_queue.MapQueue.claim",
            "session.Registration.add",
            "spool.Spool.peek",
        ),
    ],
)
def test_each_internal_may_fail_now_and_then(
    name: str, settings: AgentSettings, session: Session, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, kind, method = name.split(".")
    owner: Any = getattr(sys.modules[f"fp8watch_agent.{module}"], kind)
    original: Callable[..., Any] = getattr(owner, method)
    rng, failures = random.Random(0), []

    def sometimes(*args: Any, **kwargs: Any) -> Any:
        if len(failures) < 20 and (not failures or rng.random() < 0.5):
            failures.append(1)
            raise RuntimeError("planted")
        return original(*args, **kwargs)

    recorder = Recorder(replace(settings, collector=collector.url, poll_interval_s=0.002), session)
    monkeypatch.setattr(owner, method, sometimes)
    for s in range(40):
        record(recorder, [s])
        recorder.flush(0.005)
    monkeypatch.setattr(owner, method, original)
    recorder.register_sites(make_sites(3))
    record(recorder, [1000])
    recorder.flush(3)
    recorder.close()
    health = recorder.health()
    if failures:
        assert sum(health.internal_errors.values()) > 0
    assert health.records.balanced, health.records
    assert 1000 in collector.steps(), "it went on afterwards"


def test_nonsense_is_swallowed(settings: AgentSettings, session: Session) -> None:
    recorder = Recorder(settings, session)
    nonsense: Any = [
        (make_step(0), make_ids(3), make_rows(2)),
        (make_step(0), make_ids(2), np.zeros(2)),
        (None, make_ids(2), make_rows(2)),
        (make_step(0), None, None),
        (make_step(-5), make_ids(2), make_rows(2)),
        (make_step(0), make_ids(2), make_rows(2), {"x": "not a number"}),
        (make_step(1), make_ids(2), make_rows(2), {"x": 1.0}, "b" * 100_000),
    ]
    for args in nonsense:
        recorder.record_step(*args)
    recorder.record_tile_maps(nonsense)
    recorder.register_sites(nonsense)
    recorder.flush(5)
    recorder.close()
    for args in nonsense:
        recorder.record_step(*args)
    health = recorder.health()
    assert health.internal_errors["record_step"] >= 4
    assert health.internal_errors["logs"] == 2
    assert health.records.balanced, health.records


def test_a_hand_over_from_inside_a_hand_over_is_counted(
    settings: AgentSettings, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(settings, session)
    original = Ring.push

    def push(ring: Ring, *args: Any) -> None:  # as a signal handler would come in between
        recorder.record_step(make_step(9), make_ids(2), make_rows(2))
        original(ring, *args)

    monkeypatch.setattr(Ring, "push", push)
    record(recorder, [0])
    recorder.close()
    assert recorder.health().records.dropped == {"reentrant": 2}
    assert recorder.health().records.balanced


def test_a_folder_that_cannot_be_written_becomes_a_temporary_one_with_one_warning(
    settings: AgentSettings, session: Session, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with caplog.at_level(logging.WARNING, "fp8watch"):
        recorder = Recorder(replace(settings, spool_dir=blocked / "spool"), session)
        record(recorder, [0])
        assert recorder.flush(5)
        recorder.close()
    assert [r.getMessage() for r in caplog.records if "FP8WATCH_SPOOL_DIR" in r.getMessage()] != []
    assert len(caplog.records) == 1
    assert recorder.health().records.spooled == 3


def test_nothing_is_left_open(settings: AgentSettings, session: Session, collector: Collector) -> None:
    def num_open() -> int:
        return sum(
            str(settings.spool_dir) in os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if exists(fd)
        )

    def exists(fd: str) -> bool:
        return os.path.lexists(f"/proc/self/fd/{fd}")

    for i in range(3):
        recorder = Recorder(replace(settings, collector=collector.url), replace(session, session=f"s{i}"))
        record(recorder, [0])
        assert recorder.flush(5)
        recorder.close()
        assert num_open() == 0, "a descriptor is lost with each attach"
