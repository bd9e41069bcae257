"""A spool folder on NFS or its like: training stores into plain memory, the sender writes the file, and only it waits for the server."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.agents import Collector, eventually, make_ids, make_rows, make_session, make_sites, make_step, record

from fp8watch_agent import file_system, sync
from fp8watch_agent.recorder import Recorder
from fp8watch_agent.ring import Ring
from fp8watch_agent.ring_file import read_boot_id
from fp8watch_agent.ring_recovery import recover
from fp8watch_agent.session import Session
from fp8watch_agent.settings import AgentSettings

TESTS = Path(__file__).parents[1]
MIB = 1 << 20
SLACK = 5.0  # of a limit that is asserted on a shared machine
MOUNTS = """\
23 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
40 23 0:40 / /home rw shared:20 - autofs systemd-1 rw
41 40 0:41 / /home/ada rw shared:21 - nfs4 filer:/ada rw
42 23 0:42 / /mnt/two\\040words rw - lustre mgs:/fs rw
43 23 0:43 / /scratch rw - lustre mgs:/fs rw
44 23 0:44 / /scratch rw - tmpfs tmpfs rw
45 23 0:45 / /scratch/of rw - fuse.sshfs there: rw
a line of a later kernel
"""


@pytest.fixture
def of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = tmp_path / "mountinfo"
    there.write_text("23 1 8:1 / / rw - nfs4 filer:/ rw\n")
    monkeypatch.setattr(file_system, "MOUNTS", there)


@pytest.fixture
def ring(tmp_path: Path, of_a_server: None) -> Iterator[Ring]:
    made = Ring(tmp_path, make_session(), MIB)
    yield made
    made.close(keep=True)


def push(ring: Ring, step: int, num_rows: int = 3) -> None:
    ring.push(make_step(step).tobytes(), make_ids(num_rows), make_rows(num_rows, step))


def path_of(ring: Ring) -> Path:
    assert ring.path is not None
    return ring.path


def steps_of(ring: Ring) -> list[int]:
    return [int(f.steps["step"][0]) for f in recover(path_of(ring), read_boot_id()).frames]


@pytest.mark.parametrize(("folder", "kind", "mapped"), [
    ("/var/tmp", "ext4", True),
    ("/home/ada/runs", "nfs4", False),
    ("/home/ada", "nfs4", False),
    ("/home/adams", "autofs", False),
    ("/mnt/two words/x", "lustre", False),
    ("/scratch/mine", "tmpfs", True),
    ("/scratch/of/others", "fuse.sshfs", False),
])  # fmt: skip
def test_the_kind_of_a_file_system_is_that_of_the_mount_that_is_seen(
    folder: str, kind: str, mapped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "mountinfo"
    there.write_text(MOUNTS)
    monkeypatch.setattr(file_system, "MOUNTS", there)
    assert file_system.kind_of(Path(folder)) == kind
    assert file_system.maps_well(Path(folder)) is mapped


def test_where_nothing_is_known_the_file_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_system, "MOUNTS", tmp_path / "none")
    assert (file_system.kind_of(tmp_path), file_system.maps_well(tmp_path)) == ("", True)


def test_the_folder_of_this_test_is_local(tmp_path: Path) -> None:
    assert file_system.kind_of(tmp_path) in file_system.LOCAL


def test_what_was_polled_is_in_the_file_and_no_later_frame_is_believed(ring: Ring) -> None:
    ring.add_sites(make_sites(3))
    for s in range(5):
        push(ring, s, num_rows=s)
    assert steps_of(ring) == []
    ring.seal()
    push(ring, 5)
    assert steps_of(ring) == [0, 1, 2, 3, 4]
    got = recover(path_of(ring), read_boot_id())
    assert (len(got.registration), got.num_lost_frames) == (3, 0)
    assert [f.rows.tobytes() for f in got.frames] == [make_rows(s, s).tobytes() for s in range(5)]


def test_a_frame_that_is_taken_before_a_poll_saw_it_is_in_the_file(ring: Ring) -> None:
    push(ring, 0)
    assert ring.claim() is not None
    push(ring, 1)
    assert steps_of(ring) == [0]
    ring.seal()
    assert steps_of(ring) == [0, 1]


def test_what_is_in_flight_and_what_is_settled_are_in_the_file_at_once(ring: Ring) -> None:
    for s in range(4):
        push(ring, s)
    ring.seal()
    frames = [ring.claim() for _ in range(2)]
    assert frames[1] is not None
    assert ring.journal(7, 1, 6, b"body", frames[1].end, 2)
    got = recover(path_of(ring), read_boot_id())
    assert got.in_flight is not None
    assert (got.in_flight.seq, got.in_flight.body, got.next_seq) == (7, b"body", 8)
    assert [int(f.steps["step"][0]) for f in got.frames] == [2, 3]
    ring.release(frames[1].end, 2)
    got = recover(path_of(ring), read_boot_id())
    assert (got.in_flight, [int(f.steps["step"][0]) for f in got.frames]) == (None, [2, 3])


def test_half_a_frame_is_not_believed(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may be killed between two pages of a write."""
    push(ring, 0)
    ring.seal()
    push(ring, 1, num_rows=40)
    real = os.pwrite

    def killed(fd: int, piece: memoryview, at: int) -> int:
        real(fd, piece[: min(len(piece), 4096)], at)
        raise OSError(errno.EINTR, "killed")

    monkeypatch.setattr(os, "pwrite", killed)
    ring.seal()
    assert steps_of(ring) == [0]


def test_laps_are_told_apart(ring: Ring) -> None:
    for s in range(500):
        push(ring, s, num_rows=40)
        if s % 7 == 0:
            ring.seal()
    ring.seal()
    there = steps_of(ring)
    assert there == list(range(500 - len(there), 500))
    assert len(there) == len(ring) > 10


def test_a_file_that_was_deleted_is_made_anew_with_all_that_is_there(ring: Ring) -> None:
    for s in range(4):
        push(ring, s)
    ring.seal()
    path_of(ring).unlink()
    push(ring, 4)
    assert ring.renew()
    assert steps_of(ring) == [0, 1, 2, 3]
    push(ring, 5)
    ring.seal()
    assert steps_of(ring) == [0, 1, 2, 3, 4, 5]
    assert not ring.renew()


def test_a_file_that_cannot_be_written_is_given_up_and_made_anew_later(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(ring, 0)
    ring.seal()
    real, tries = os.pwrite, []

    def fails(*given: object) -> int:
        tries.append(given)
        raise OSError(errno.EIO, "gone")

    monkeypatch.setattr(os, "pwrite", fails)
    for s in (1, 2):
        push(ring, s)
        ring.seal()  # raises nothing
        ring.note_next_seq(s)
    assert (len(tries), getattr(ring.failed, "errno", None)) == (1, errno.EIO)
    with pytest.raises(OSError, match="gone"):
        ring.renew()
    monkeypatch.setattr(os, "pwrite", real)
    assert not ring.renew()  # nobody has deleted it
    assert ring.failed is None
    assert steps_of(ring) == [0, 1, 2]
    assert recover(path_of(ring), read_boot_id()).next_seq == 2
    assert [p.suffix for p in path_of(ring).parent.glob("*.ring*")] == [".ring"]


def test_no_ring_file_where_it_cannot_be_written_from_the_start(
    tmp_path: Path, of_a_server: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> int:
        raise OSError(errno.EIO, "gone")

    monkeypatch.setattr(os, "pwrite", fails)
    with pytest.raises(OSError, match="gone"):
        Ring(tmp_path, make_session(), MIB)
    assert not list(tmp_path.glob("*.ring*"))


def test_training_waits_for_no_server(
    settings: AgentSettings, session: Session, of_a_server: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, hangs, waits = os.pwrite, threading.Event(), threading.Event()
    hangs.set()

    def pwrite(*given: object) -> int:
        if hangs.is_set() and threading.current_thread() is not threading.main_thread():
            waits.set()
            while hangs.is_set():
                time.sleep(0.01)
        return real(*given)  # type: ignore[arg-type]

    recorder = Recorder(settings, session)
    monkeypatch.setattr(os, "pwrite", pwrite)
    record(recorder, range(2))
    assert waits.wait(10)
    start = time.monotonic()
    record(recorder, range(2, 200))
    recorder.close(1.0)
    assert time.monotonic() - start < 2.0 * SLACK
    hangs.clear()
    recorder._sender.thread.join(10)


def test_what_cannot_be_kept_is_sent_all_the_same_and_said_once(
    settings: AgentSettings,
    session: Session,
    collector: Collector,
    of_a_server: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(*_: object) -> int:
        raise OSError(errno.ESTALE, "stale")

    recorder = Recorder(replace(settings, collector=collector.url), session)
    monkeypatch.setattr(os, "pwrite", fails)
    record(recorder, range(30))
    assert eventually(lambda: collector.steps() == list(range(30)))
    assert eventually(lambda: "cannot be written" in caplog.text)
    record(recorder, range(30, 60))
    recorder.close(5.0)
    assert collector.steps() == list(range(60))
    assert caplog.text.count("cannot be written") == 1
    assert recorder.health().internal_errors == {}


HEAD = f"""
import os, sys, time
sys.path.insert(0, {str(TESTS)!r})
from pathlib import Path
from support.agents import make_session, record
from fp8watch_agent import file_system
from fp8watch_agent.recorder import Recorder
from fp8watch_agent.settings import AgentSettings
folder = Path(sys.argv[1])
file_system.MOUNTS = folder.parent / "mountinfo"
file_system.MOUNTS.write_text("23 1 8:1 / / rw - " + sys.argv[2] + " there rw\\n")
recorder = Recorder(
    AgentSettings(spool_dir=folder, ring_bytes=1 << 20, poll_interval_s=0.01, batch_interval_s=60.0), make_session()
)
"""


def child(code: str, folder: Path, kind: str) -> subprocess.Popen[str]:
    source = HEAD + textwrap.dedent(code)
    return subprocess.Popen([sys.executable, "-c", source, str(folder), kind], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("kind", "ends"), [("ext4", -signal.SIGBUS), ("nfs4", 0)])
def test_a_page_that_the_server_does_not_give_ends_no_training(tmp_path: Path, kind: str, ends: int) -> None:
    """What a file loses that is mapped, a store finds out by SIGBUS; so it is where a server gives up."""
    code = """
    for ring in folder.glob("*.ring"):
        os.truncate(ring, 0)
    record(recorder, range(20))
    os._exit(0)
    """
    process = child(code, tmp_path / "spool", kind)
    process.communicate()
    assert process.returncode == ends


def test_what_a_killed_process_had_polled_arrives(tmp_path: Path, collector: Collector) -> None:
    code = """
    record(recorder, range(20))
    time.sleep(1)
    print("ready", flush=True)
    time.sleep(60)
    """
    process = child(code, tmp_path / "spool", "nfs4")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert sync.main(["--spool-dir", str(tmp_path / "spool"), "--collector", collector.url, "--timeout", "5"]) == 0
    assert collector.steps() == list(range(20))
    assert collector.num_records() == 60


def test_what_a_process_that_is_killed_in_the_midst_leaves_is_whole(tmp_path: Path, collector: Collector) -> None:
    code = """
    for step in range(10**6):
        record(recorder, [step], 40)
        if step == 40:
            print("ready", flush=True)
    """
    for n in range(4):
        process = child(code, tmp_path / "spool", "nfs4")
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.03 * n)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        [ring] = (tmp_path / "spool").glob("*.ring")
        got = recover(ring, read_boot_id())
        steps = [int(f.steps["step"][0]) for f in got.frames]
        assert steps
        assert steps == sorted(steps)
        for frame, step in zip(got.frames, steps, strict=True):
            assert frame.rows.tobytes() == make_rows(40, step).tobytes()
        ring.unlink()
