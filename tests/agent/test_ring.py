"""The ring: bounded, the oldest go first and are counted, and its file tells what a killed process had recorded."""

from __future__ import annotations

import random
import sys
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.agents import close_fails, make_ids, make_rows, make_session, make_sites, make_step, taken_over

from fp8watch_agent.ring import Ring
from fp8watch_agent.ring_file import DamagedRing, Layout, read_boot_id
from fp8watch_agent.ring_recovery import recover

MIB = 1 << 20


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Ring]:
    made = Ring(tmp_path, make_session(), MIB)
    yield made
    made.close(keep=True)


def push(ring: Ring, step: int, num_rows: int = 3, extra: bytes = b"") -> None:
    ring.push(make_step(step).tobytes(), make_ids(num_rows), make_rows(num_rows, step), extra)


def path_of(ring: Ring) -> Path:
    assert ring.path is not None
    return ring.path


def test_the_file_has_the_size_that_was_asked_for(ring: Ring) -> None:
    assert path_of(ring).stat().st_size == MIB
    layout = Layout(32 * MIB)
    assert layout.data + layout.data_bytes <= 32 * MIB
    assert layout.data_bytes > 28 * MIB


def test_steps_come_out_as_they_went_in(ring: Ring) -> None:
    for s in range(20):
        push(ring, s, num_rows=s)
    for s in range(20):
        frame = ring.claim()
        assert frame is not None
        assert int(frame.steps["step"][0]) == s
        assert frame.rows.tobytes() == make_rows(s, s).tobytes()
        assert frame.site_ids.tobytes() == make_ids(s).tobytes()
    assert ring.claim() is None


def test_a_ring_whose_close_fails_is_closed_once(tmp_path: Path) -> None:
    ring = Ring(tmp_path, make_session(), MIB)
    path_of(ring).unlink()
    with close_fails() as closed:
        assert ring.renew()
    with taken_over(tmp_path / "checkpoint", closed[0]):
        assert not ring.renew()
        push(ring, 0)
        with close_fails() as closed:
            ring.close(keep=True)
        with taken_over(tmp_path / "socket", closed[0]):
            ring.close(keep=True)
    assert [int(f.steps["step"][0]) for f in recover(path_of(ring), read_boot_id()).frames] == [0]


def test_the_oldest_go_first_and_are_counted(ring: Ring) -> None:
    for s in range(500):
        push(ring, s, num_rows=40)
    kept = []
    while (frame := ring.claim()) is not None:
        kept.append(int(frame.steps["step"][0]))
    assert kept == list(range(500 - len(kept), 500))
    assert 10 < len(kept) < 40
    assert ring.overwritten_records == (500 - len(kept)) * 40


def test_a_step_larger_than_the_ring_is_counted_and_does_no_harm(ring: Ring) -> None:
    push(ring, 0)
    push(ring, 1, num_rows=2000)
    push(ring, 2)
    assert ring.too_large_records == 2000
    assert [int(f.steps["step"][0]) for f in iter(ring.claim, None)] == [0, 2]


def test_each_record_is_counted_once_while_both_sides_race(tmp_path: Path) -> None:
    ring = Ring(tmp_path, make_session(), MIB)
    rows, ids = {n: make_rows(n) for n in range(60)}, {n: make_ids(n) for n in range(60)}
    rng = random.Random(0)
    sizes = [rng.randrange(60) for _ in range(6000)]
    claimed: list[tuple[int, int]] = []
    done, full = threading.Event(), threading.Event()

    def consume() -> None:
        full.wait()  # the race begins with a ring that has overwritten already, however threads are scheduled
        while True:
            last = done.is_set()
            while (frame := ring.claim()) is not None:
                claimed.append((int(frame.steps["step"][0]), frame.num_records))
                assert frame.rows.tobytes() == rows[frame.num_records].tobytes()
            if last:
                return

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread = threading.Thread(target=consume)
        thread.start()
        for s, n in enumerate(sizes):
            ring.push(make_step(s).tobytes(), ids[n], rows[n])
            if s == 200:
                full.set()
        done.set()
        thread.join()
    finally:
        sys.setswitchinterval(before)
    assert sum(sizes) == sum(n for _, n in claimed) + ring.overwritten_records + ring.torn_records
    assert [s for s, _ in claimed] == sorted(s for s, _ in claimed)
    assert ring.overwritten_records + ring.torn_records > 0, "the ring was never full: nothing was shown"
    ring.close(keep=False)


def test_a_frame_that_is_overwritten_while_it_is_taken_is_counted_and_not_believed(ring: Ring) -> None:
    class Overtaken(deque[Any]):
        def popleft(self) -> Any:
            slot = super().popleft()
            if slot.number == 0:
                for s in range(1, 100):
                    push(ring, s, num_rows=40)
            return slot

    ring._frames = Overtaken()
    push(ring, 0, num_rows=40)
    frame = ring.claim()
    assert frame is not None
    assert int(frame.steps["step"][0]) > 0
    assert ring.torn_records == 40
    rest = frame.num_records + ring.queued_records()
    assert ring.pushed_records == rest + ring.torn_records + ring.overwritten_records


def test_a_dead_ring_tells_session_sites_and_steps(ring: Ring) -> None:
    assert ring.add_sites(make_sites(2))
    assert ring.add_sites(make_sites(4)[2:])
    for s in range(300):
        push(ring, s, num_rows=40)
    got = recover(path_of(ring), read_boot_id())
    assert got.registration.session == ring.session
    assert [s.id for s in got.registration.sites()] == [s.id for s in make_sites(4)]
    steps = [int(f.steps["step"][0]) for f in got.frames]
    assert steps == list(range(300 - len(steps), 300))
    assert len(steps) == len(ring)
    assert all(f.rows.tobytes() == make_rows(40, s).tobytes() for f, s in zip(got.frames, steps, strict=True))


def test_what_is_settled_is_not_recovered_and_what_is_in_flight_keeps_its_bytes(ring: Ring) -> None:
    for s in range(6):
        push(ring, s)
    frames = [ring.claim() for _ in range(4)]
    second, fourth = frames[1], frames[3]
    assert second is not None
    assert fourth is not None
    ring.release(second.end, 2)
    assert ring.journal(17, 1, 6, b"the body", fourth.end, 4)
    got = recover(path_of(ring), read_boot_id())
    assert got.in_flight is not None
    assert (got.in_flight.seq, got.in_flight.body, got.in_flight.num_records) == (17, b"the body", 6)
    assert [int(f.steps["step"][0]) for f in got.frames] == [4, 5]
    assert got.next_seq == 18
    ring.release(fourth.end, 4)
    got = recover(path_of(ring), read_boot_id())
    assert got.in_flight is None
    assert [int(f.steps["step"][0]) for f in got.frames] == [4, 5]
    assert (got.num_lost_frames, got.num_lost_records) == (0, 0)


def test_a_frame_without_its_commit_word_is_not_believed(ring: Ring) -> None:
    push(ring, 0)
    push(ring, 1)
    raw = bytearray(path_of(ring).read_bytes())
    at = ring.layout.data + ring._frames[1].position
    raw[at + 48 : at + 52] = bytes(4)
    path_of(ring).write_bytes(raw)
    assert [int(f.steps["step"][0]) for f in recover(path_of(ring), read_boot_id()).frames] == [0]


def test_after_a_reboot_only_sealed_frames_are_believed(ring: Ring) -> None:
    for s in range(4):
        push(ring, s)
    ring.seal()
    push(ring, 4)
    assert [int(f.steps["step"][0]) for f in recover(path_of(ring), read_boot_id()).frames] == [0, 1, 2, 3, 4]
    assert [int(f.steps["step"][0]) for f in recover(path_of(ring), "another boot").frames] == [0, 1, 2, 3]


def test_damage_costs_the_frames_it_hits_and_they_are_counted(ring: Ring) -> None:
    for s in range(10):
        push(ring, s)
    ring.seal()
    clean = path_of(ring).read_bytes()
    slots = list(ring._frames)
    for victim in (0, 4, 8):
        for offset in (0, 9, 17, 25, 33, 45, 49, 100, 400, 2000):
            raw = bytearray(clean)
            raw[ring.layout.data + slots[victim].position + offset] ^= 0x10
            path_of(ring).write_bytes(raw)
            got = recover(path_of(ring), read_boot_id())
            assert [int(f.steps["step"][0]) for f in got.frames] == [s for s in range(10) if s != victim], offset
            assert (got.num_lost_frames, got.num_lost_records) == (1, 3)


def test_a_file_that_was_cut_is_read_as_far_as_it_goes_and_the_rest_is_counted(ring: Ring) -> None:
    for s in range(10):
        push(ring, s)
    ring.seal()
    clean, used = path_of(ring).read_bytes(), ring.layout.data + ring._head
    slots = list(ring._frames)
    cuts = [MIB - 1, used, used - 1, *(ring.layout.data + slot.position + k for slot in slots for k in (1, 70))]
    for cut in (*cuts, ring.layout.data, ring.layout.seals + 5, ring.layout.slot + 3, ring.layout.sites, MIB + 100):
        path_of(ring).write_bytes(clean[:cut].ljust(cut, b"x"))
        got = recover(path_of(ring), read_boot_id())
        there = [s for s in slots if ring.layout.data + s.position + s.length <= cut]
        assert [int(f.steps["step"][0]) for f in got.frames] == [s.number for s in there], cut
        assert (got.num_lost_frames, got.num_lost_records) == (10 - len(there), 3 * (10 - len(there))), cut
        assert got.num_missing_bytes == max(0, MIB - cut)
    path_of(ring).write_bytes(clean[:1000])
    with pytest.raises(DamagedRing, match="1000 bytes are left"):
        recover(path_of(ring), read_boot_id())


def test_of_a_cut_file_what_was_settled_is_no_loss(ring: Ring) -> None:
    for s in range(10):
        push(ring, s)
    ring.seal()
    frames = [ring.claim() for _ in range(10)]
    for num_settled in (4, 10):
        last = frames[num_settled - 1]
        assert last is not None
        ring.release(last.end, num_settled)
        path = path_of(ring).with_name("cut.ring")
        path.write_bytes(path_of(ring).read_bytes()[: ring.layout.data])
        got = recover(path, read_boot_id())
        assert got.num_lost_frames == 10 - num_settled


def test_a_ring_whose_file_was_deleted_goes_on_in_a_new_one(ring: Ring) -> None:
    ring.add_sites(make_sites(3))
    for s in range(300):
        push(ring, s, num_rows=40)
    frames = [ring.claim() for _ in range(4)]
    assert frames[3] is not None
    first = int(frames[3].steps["step"][0]) + 1
    ring.release(frames[3].end, frames[3].number + 1)
    assert not ring.renew()
    path_of(ring).unlink()
    assert ring.renew()
    assert [int(f.steps["step"][0]) for f in recover(path_of(ring), read_boot_id()).frames] == list(range(first, 300))
    for s in range(300, 304):
        push(ring, s, num_rows=40)
    ring.seal()
    ring.note_next_seq(7)
    got = recover(path_of(ring), "another boot")
    steps = [int(f.steps["step"][0]) for f in got.frames]
    assert steps == list(range(steps[0], 304))
    assert len(steps) == len(ring) > 10
    assert all(f.rows.tobytes() == make_rows(40, s).tobytes() for f, s in zip(got.frames, steps, strict=True))
    assert (got.next_seq, len(got.registration), got.num_lost_frames) == (7, 3, 0)
    assert not ring.renew()


def test_random_damage_never_invents_a_step(ring: Ring) -> None:
    for s in range(10):
        push(ring, s)
    ring.seal()
    clean = path_of(ring).read_bytes()
    used = ring.layout.data + ring._head
    rng = np.random.default_rng(0)
    for _ in range(60):
        raw = np.frombuffer(clean, dtype=np.uint8).copy()
        at = rng.integers(0, used, 40)
        raw[at] ^= rng.integers(1, 256, 40).astype(np.uint8)
        path_of(ring).write_bytes(raw.tobytes())
        try:
            got = recover(path_of(ring), read_boot_id())
        except DamagedRing:
            continue
        for frame in got.frames:
            s = int(frame.steps["step"][0])
            assert frame.rows.tobytes() == make_rows(3, s).tobytes()


def test_a_file_that_is_no_ring_is_named_as_such(tmp_path: Path) -> None:
    path = tmp_path / "a.ring"
    for raw in (b"", b"x" * 100, bytes(MIB)):
        path.write_bytes(raw)
        with pytest.raises(DamagedRing):
            recover(path, "")


def test_a_full_disk_is_an_error_when_the_ring_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", no_room)
    with pytest.raises(OSError, match="No space"):
        Ring(tmp_path, make_session(), MIB)
    assert not list(tmp_path.iterdir())
