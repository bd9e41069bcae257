"""The agent's thread does not keep the interpreter's lock for long: the training thread gets it back in time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.agents import make_ids, make_rows, make_session, make_sites, make_step

from fp8watch_agent.recorder import Recorder
from fp8watch_agent.ring import Ring
from fp8watch_agent.settings import AgentSettings

LIMIT_S = 1e-3
SLACK = 10.0  # of a limit that is asserted on a shared machine
SITES = 600


def longest_hold_s(folder: Path, num_steps: int) -> float:
    """Longest time for which this thread, having let go of the lock, had to wait for the sender to do so.

    Counted in the sender's processor time, so that other processes of the machine do not matter. The interpreter is
    told not to take the lock from a thread that runs: what is measured is how long the sender would keep it.
    """
    settings = AgentSettings(spool_dir=folder, poll_interval_s=0.001, batch_interval_s=0.005)
    recorder = Recorder(settings, make_session())
    recorder.register_sites(make_sites(SITES))
    ids, rows = make_ids(SITES), make_rows(SITES)
    thread = recorder._sender.thread
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    longest = 0.0
    before = sys.getswitchinterval()
    sys.setswitchinterval(10.0)
    try:
        for s in range(num_steps):
            recorder.record_step(make_step(s), ids, rows)
            until = time.monotonic() + 0.01
            while time.monotonic() < until:
                began = time.clock_gettime(clock)
                time.sleep(0)
                longest = max(longest, time.clock_gettime(clock) - began)
    finally:
        sys.setswitchinterval(before)
    recorder.close(30.0)  # as soon as all lies on disk
    assert recorder.health().records.spooled == SITES * num_steps
    return longest


def test_no_hold_is_long(tmp_path: Path) -> None:
    longest_s = longest_hold_s(tmp_path, 60)
    print(f"longest hold: {longest_s * 1e3:.2f} ms")
    assert longest_s < LIMIT_S * SLACK


def test_a_long_hold_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seal: Callable[[Ring], None] = Ring.seal

    def slow(ring: Ring) -> None:
        until = time.thread_time() + 2 * LIMIT_S * SLACK
        while time.thread_time() < until:
            pass
        seal(ring)

    monkeypatch.setattr(Ring, "seal", slow)
    assert longest_hold_s(tmp_path, 10) > LIMIT_S * SLACK
