"""The spool: whatever was done to a segment, its whole frames come back, and the rest is counted."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.agents import close_fails, make_session, make_sites, taken_over
from support.counts import part_of

from fp8watch_agent.batch import Kind, Parcel
from fp8watch_agent.session import Registration
from fp8watch_agent.spool import Spool
from fp8watch_agent.spool_segment import FRAME_BYTES, read_segment


def parcel(seq: int, size: int = 100, amount: int = 3) -> Parcel:
    return Parcel(Kind.BATCH, seq, bytes([seq % 251]) * size, amount, end=64 * (seq + 1))


def fill(directory: Path, num_parcels: int, max_bytes: int = 1 << 20, size: int = 100) -> Spool:
    spool = Spool(directory, Registration(make_session(session="5e55"), make_sites(2)), max_bytes)
    for i in range(num_parcels):
        spool.append(parcel(i, size))
    spool.close()
    return spool


def only_segment(directory: Path) -> Path:
    (path,) = directory.glob("*.spool")
    return path


def test_parcels_come_back_in_order_and_the_files_go(tmp_path: Path) -> None:
    spool = fill(tmp_path, 5)
    spool.append(parcel(5))
    seen = []
    while (got := spool.peek()) is not None:
        seen.append(got)
        spool.advance()
    assert seen == [parcel(i) for i in range(6)]
    assert not spool
    assert not list(tmp_path.iterdir())


def test_a_segment_explains_itself(tmp_path: Path) -> None:
    registration = Registration(make_session(), make_sites(2))
    spool = Spool(tmp_path, registration, 1 << 20)
    spool.append(parcel(0))
    registration.add(make_sites(4))
    spool.append(parcel(1))
    spool.close()
    got = read_segment(only_segment(tmp_path))
    assert got.registration is not None
    assert got.registration.session == registration.session
    assert got.registration.sites() == make_sites(4)


def test_at_the_cap_the_oldest_go_and_are_counted(tmp_path: Path) -> None:
    spool = Spool(tmp_path, Registration(make_session(), make_sites(2)), 64 << 10)
    for i in range(500):
        spool.append(parcel(i, size=1000))
        assert sum(p.stat().st_size for p in tmp_path.iterdir()) == spool.num_bytes <= 64 << 10
    assert spool.num_records + spool.dropped_full[0] == 1500
    assert spool.dropped_full[0] > 0
    first = spool.peek()
    assert first is not None
    assert first.seq * 3 == spool.dropped_full[0]


@contextmanager
def full_disk(max_file_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_takes_back_what_was_begun(tmp_path: Path) -> None:
    spool = fill(tmp_path, 0)
    spool.append(parcel(0, size=1000))
    spool.append(parcel(1, size=1000))
    with full_disk(spool.num_bytes + 500), pytest.raises(OSError, match="too large"):
        spool.append(parcel(2, size=1000))
    assert spool.num_records == 6
    assert only_segment(tmp_path).stat().st_size == spool.num_bytes
    spool.append(parcel(2, size=1000))
    spool.close()
    got = read_segment(only_segment(tmp_path))
    assert [p.seq for p in got.parcels] == [0, 1, 2]
    assert got.num_damaged_bytes == 0


def test_a_file_whose_close_fails_is_closed_once(tmp_path: Path) -> None:
    spool = fill(tmp_path / "spool", 0)
    spool.append(parcel(0))
    with close_fails() as closed, pytest.raises(OSError, match="quota"):
        spool.close()
    with taken_over(tmp_path / "checkpoint", closed[0]):
        spool.close()
        assert spool.peek() == parcel(0)
        spool.append(parcel(1))
        shutil.rmtree(tmp_path / "spool")
        with close_fails() as closed:
            spool.append(parcel(2))  # makes the file anew
        with taken_over(tmp_path / "socket", closed[0]):
            spool.append(parcel(3))
            spool.close()
    assert [p.seq for p in read_segment(only_segment(tmp_path / "spool")).parcels] == [1, 2, 3]


def test_truncated_at_every_byte(tmp_path: Path) -> None:
    fill(tmp_path, 3, size=40)
    path = only_segment(tmp_path)
    raw = path.read_bytes()
    size = FRAME_BYTES + 40
    first = len(raw) - 3 * size
    for cut in range(len(raw)):
        path.write_bytes(raw[:cut])
        got = read_segment(path)
        whole = max(0, (cut - first) // size) if cut >= first else 0
        assert got.parcels == [parcel(i, 40) for i in range(whole)]
        good_to = first + whole * size if cut >= first else 0
        assert got.num_damaged_bytes == cut - good_to
        known = cut >= good_to + FRAME_BYTES  # the header is there: it says what is lost; the first frame is no batch
        assert (got.num_lost_frames, got.num_lost_records) == (known, 3 * (known and cut > first)), cut


def test_every_header_bit_flipped(tmp_path: Path) -> None:
    fill(tmp_path, 3, size=40)
    path = only_segment(tmp_path)
    raw = path.read_bytes()
    at = len(raw) - 2 * (FRAME_BYTES + 40)
    for bit in range(FRAME_BYTES * 8):
        damaged = bytearray(raw)
        damaged[at + bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        got = read_segment(path)
        assert got.parcels == [parcel(0, 40), parcel(2, 40)]
        assert (got.num_lost_frames, got.num_lost_records) == (1, 3)
        assert got.num_damaged_bytes == FRAME_BYTES + 40


@pytest.mark.parametrize("num_mutated", [150, pytest.param(part_of(5000), id="5000", marks=pytest.mark.long)])
def test_mutations_lose_only_what_they_hit(tmp_path: Path, num_mutated: int) -> None:
    fill(tmp_path, 6, size=30)
    path = only_segment(tmp_path)
    whole = path.read_bytes()
    size = FRAME_BYTES + 30
    first = len(whole) - 6 * size

    @given(flips=st.lists(st.tuples(st.integers(0, len(whole) - 1), st.integers(1, 255)), min_size=1, max_size=4))
    @settings(max_examples=num_mutated, deadline=None, database=None)
    def one(flips: list[tuple[int, int]]) -> None:
        raw = bytearray(whole)
        for at, bits in flips:
            raw[at] ^= bits
        path.write_bytes(raw)
        hit = {(at - first) // size if at >= first else -1 for at, _ in flips}
        got = read_segment(path)
        assert {p.seq for p in got.parcels} >= set(range(6)) - hit
        assert all(p == parcel(p.seq, 30) for p in got.parcels), "two flips of one bit may cancel; nothing is invented"

    one()


def test_a_folder_that_was_deleted_is_made_anew_and_what_is_gone_is_counted(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    folder.mkdir()
    spool = fill(folder, 2)  # a file that is closed
    spool.append(parcel(2))
    spool.append(parcel(3))
    shutil.rmtree(folder)
    spool.append(parcel(4))
    assert (spool.num_records, spool.dropped_damaged) == (9, [6, 0])
    assert [p.seq for p in read_segment(only_segment(folder)).parcels] == [2, 3, 4]
    spool.close()
    shutil.rmtree(folder)
    spool.append(parcel(5))
    assert spool.look_after()
    assert (spool.num_records, spool.dropped_damaged) == (3, [15, 0])
    assert not spool.look_after()


def test_a_damaged_segment_of_a_running_session_is_counted_and_left_behind(tmp_path: Path) -> None:
    spool = fill(tmp_path, 3)
    path = only_segment(tmp_path)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    for _ in range(2):
        assert spool.peek() is not None
        spool.advance()
    assert spool.peek() is None
    assert spool.dropped_damaged == [3, 0]
    assert not list(tmp_path.iterdir())
