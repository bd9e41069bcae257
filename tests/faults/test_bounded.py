"""Memory and disk are bounded; the oldest go first, and what tells of a failure goes last."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.agents import Collector, eventually, make_ids, make_session, make_sites, make_step, serve

from fp8watch_agent.batch import Kind, Parcel
from fp8watch_agent.record import StepStatus, empty_rows
from fp8watch_agent.recorder import Recorder
from fp8watch_agent.ring_file import frame_bytes
from fp8watch_agent.session import Registration
from fp8watch_agent.settings import AgentSettings
from fp8watch_agent.spool import Spool

SITES = 40


def calm_rows(bad: bool = False):
    rows = empty_rows(SITES)
    rows["num_elements"], rows["measured"] = 1000, 1
    if bad:
        rows["num_nan"][7] = 3
    return rows


def test_on_disk_what_broke_goes_last(tmp_path: Path) -> None:
    spool = Spool(tmp_path, Registration(make_session()), 64 << 10)
    for i in range(300):
        spool.append(Parcel(Kind.BATCH, i, bytes([i % 256]) * 1000, 3, precious=i == 20))
        used = sum(p.stat().st_size for p in tmp_path.iterdir())
        assert used == spool.num_bytes <= 64 << 10
    assert spool.num_records + spool.dropped_full[0] == 900
    assert spool.dropped_full[0] > 600
    left = []
    while (parcel := spool.peek()) is not None:
        left.append(parcel.seq)
        spool.advance()
    assert 20 in left, "the step that broke was dropped before steps that did not"
    assert left[-1] == 299
    assert not [seq for seq in left if 60 < seq < 200], "of the rest the oldest go"


def test_where_all_is_broken_the_oldest_go(tmp_path: Path) -> None:
    spool = Spool(tmp_path, Registration(make_session()), 64 << 10)
    for i in range(100):
        spool.append(Parcel(Kind.BATCH, i, b"x" * 1000, 3, precious=True))
    spool.append(Parcel(Kind.BATCH, 100, b"x" * 2000, 3))
    first = spool.peek()
    assert first is not None
    assert first.seq > 0
    assert spool.num_records + spool.dropped_full[0] == 303
    spool.close()


@pytest.mark.parametrize("how", ["nan", "skipped", "loss"])
def test_in_the_ring_what_broke_goes_last(
    how: str, tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = AgentSettings(spool_dir=tmp_path, ring_bytes=1 << 20, poll_interval_s=0.002, batch_interval_s=0.005)
    full = True
    append = Spool.append

    def no_room(spool: Spool, parcel: Parcel) -> None:
        if full:
            raise OSError(28, "No space left on device")
        append(spool, parcel)

    monkeypatch.setattr(Spool, "append", no_room)
    recorder = Recorder(settings, make_session())
    recorder.register_sites(make_sites(SITES))
    num_steps, bad_step = 400, 30
    room = recorder._ring.layout.data_bytes // frame_bytes(SITES, 0)
    assert num_steps > 5 * room, "the ring does not run over"
    for s in range(num_steps):
        step = make_step(s, loss=np.nan if how == "loss" and s == bad_step else 1.0)
        if how == "skipped" and s == bad_step:
            step["status"] = StepStatus.SKIPPED
        recorder.record_step(step, make_ids(SITES), calm_rows(how == "nan" and s == bad_step))
        assert recorder.health().records.balanced
        if s % 2 == 0:  # a step takes longer than a look of the sender
            eventually(lambda: recorder._ring.fill <= 0.9, 1.0)
    health = recorder.health()
    assert health.records.dropped.keys() == {"ring_full"}
    assert sum(f.rows.nbytes for f in recorder._sender._kept) <= 1 << 17
    full = False
    assert eventually(lambda: recorder.flush(1))
    recorder.close()
    from fp8watch_agent import sync

    assert sync.main(["--spool-dir", str(tmp_path), "--collector", collector.url]) == 0
    steps = collector.steps()
    assert bad_step in steps
    assert steps[-1] == num_steps - 1
    assert not [s for s in steps if bad_step < s < num_steps // 2], "of the rest the oldest went"
    assert collector.num_records() == health.records.produced - recorder.health().records.num_dropped


def test_the_ring_takes_what_it_was_given_and_no_more(tmp_path: Path, refused_url: str) -> None:
    settings = AgentSettings(collector=refused_url, spool_dir=tmp_path, ring_bytes=1 << 20, spool_bytes=256 << 10)
    with serve():
        recorder = Recorder(replace(settings, poll_interval_s=0.002, batch_interval_s=0.005), make_session())
        recorder.register_sites(make_sites(SITES))
        for s in range(600):
            recorder.record_step(make_step(s), make_ids(SITES), calm_rows(s % 3 == 0))
            if s % 50 == 0:
                recorder.flush(0.01)
                used = {p.suffix: p.stat().st_size for p in tmp_path.iterdir()}
                assert used[".ring"] == 1 << 20
                spooled = sum(p.stat().st_size for p in tmp_path.glob("*.spool"))
                assert spooled <= 256 << 10
        recorder.close(0.5)
    assert recorder.health().records.balanced
