"""`fp8watch sync` delivers what a killed or collector-less process left behind, under the keys it had."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.agents import Collector, Reply, eventually, flat_map, make_maps, make_session, record, serve

from fp8watch_agent import sync, tile_map_queue
from fp8watch_agent.recorder import Recorder
from fp8watch_agent.ring import Ring
from fp8watch_agent.session import Session
from fp8watch_agent.settings import AgentSettings
from fp8watch_agent.spool_segment import SegmentWriter

TESTS = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("FP8WATCH_"):
            monkeypatch.delenv(name)


def run_sync(directory: Path, collector: Collector, timeout_s: float = 5) -> int:
    return sync.main(["--spool-dir", str(directory), "--collector", collector.url, "--timeout", str(timeout_s)])


def child(code: str, directory: Path, *args: str) -> subprocess.Popen[str]:
    """A process that records, says so, and waits to be killed."""
    head = f"""
    import os, sys, time
    sys.path.insert(0, {str(TESTS)!r})
    from pathlib import Path
    from support.agents import make_maps, make_session, record
    from fp8watch_agent.recorder import Recorder
    from fp8watch_agent.settings import AgentSettings
    def settings(**changes):
        given = dict(ring_bytes=1 << 20, poll_interval_s=0.01, batch_interval_s=60.0)
        return AgentSettings(spool_dir=Path({str(directory)!r}), **{{**given, **changes}})
    """
    source = textwrap.dedent(head) + textwrap.dedent(code)
    return subprocess.Popen([sys.executable, "-c", source, *args], stdout=subprocess.PIPE, text=True)


def kill_when_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()


def test_what_a_killed_process_had_in_its_ring_arrives(tmp_path: Path, collector: Collector) -> None:
    code = """
    recorder = Recorder(settings(), make_session())
    record(recorder, range(20))
    print("ready", flush=True)
    time.sleep(60)
    """
    kill_when_ready(child(code, tmp_path))
    assert run_sync(tmp_path, collector) == 0
    assert collector.steps() == list(range(20))
    assert collector.num_records() == 60
    assert not list(tmp_path.glob("*.ring"))
    assert not list(tmp_path.glob("*.spool"))
    assert run_sync(tmp_path, collector) == 0, "the second time there is nothing to do"


def test_of_a_ring_short_by_one_byte_all_arrives_and_of_two_thirds_what_is_there(
    tmp_path: Path, collector: Collector, capsys: pytest.CaptureFixture[str]
) -> None:
    code = """
    recorder = Recorder(settings(batch_interval_s=600.0), make_session())
    record(recorder, range(40), num_sites=25)
    time.sleep(0.1)
    print("ready", flush=True)
    time.sleep(60)
    """
    kill_when_ready(child(code, tmp_path / "0"))
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    for place, size in (("0", (1 << 20) - 1), ("1", (1 << 20) * 2 // 3)):
        collector.stored.clear()
        (ring,) = (tmp_path / place).glob("*.ring")
        os.truncate(ring, size)
        assert run_sync(tmp_path / place, collector) == 1, "somebody must look at that disk"
        said = capsys.readouterr().out
        assert f"cut by {(1 << 20) - size} bytes" in said
        num = collector.num_records()
        if place == "0":
            assert collector.steps() == list(range(40))
            assert "lost to damage" not in said
        else:
            assert 0 < num < 1000
            assert f"{40 - num // 25} frames and {1000 - num} records that are known of" in said


def test_a_spool_folder_deleted_in_mid_run_is_said_and_made_anew(tmp_path: Path, collector: Collector) -> None:
    code = """
    import logging, shutil
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    recorder = Recorder(settings(batch_interval_s=600.0), make_session())
    record(recorder, range(10))
    shutil.rmtree(sys.argv[1])
    deadline = time.monotonic() + 20
    while not list(Path(sys.argv[1]).glob("*.ring")) and time.monotonic() < deadline:
        time.sleep(0.02)
    record(recorder, range(10, 20))
    print("ready", flush=True)
    time.sleep(60)
    """
    process = child(code, tmp_path / "spool", str(tmp_path / "spool"))
    assert process.stdout is not None
    said = process.stdout.readline()
    assert str(tmp_path / "spool") in said
    assert "were deleted while training runs" in said
    kill_when_ready(process)
    assert run_sync(tmp_path / "spool", collector) == 0
    assert collector.steps() == list(range(20))


def test_a_body_that_was_in_flight_at_the_kill_is_sent_again_under_its_key(
    tmp_path: Path, collector: Collector
) -> None:
    collector.always = Reply(500, commit=True)  # committed, but the process never hears of it
    code = """
    recorder = Recorder(settings(collector=sys.argv[1], batch_interval_s=0.02), make_session())
    for s in range(5):
        record(recorder, [s])
        recorder.flush(0.05)
    recorder._sender.flushing = False
    print("ready", flush=True)
    time.sleep(60)
    """
    kill_when_ready(child(code, tmp_path, collector.url))
    before = dict(collector.stored)
    assert before
    collector.always = None
    assert run_sync(tmp_path, collector) == 0
    assert collector.num_conflicts == 0
    assert before.items() <= collector.stored.items()
    assert collector.steps() == list(range(5))
    assert collector.num_records() == 15, "nothing came twice under two keys"


def test_killed_at_any_moment_nothing_is_lost_and_nothing_comes_twice(tmp_path: Path, collector: Collector) -> None:
    code = """
    recorder = Recorder(settings(collector=sys.argv[1], batch_interval_s=0.001, poll_interval_s=0.001), make_session())
    marker = os.open(sys.argv[2], os.O_CREAT | os.O_WRONLY)
    print("ready", flush=True)
    for s in range(100000):
        record(recorder, [s])
        os.pwrite(marker, b"%08d" % s, 0)
        time.sleep(0.0005)
    """
    num_replayed = 0
    for i in range(4):
        directory, marker = tmp_path / str(i), tmp_path / f"marker{i}"
        process = child(code, directory, collector.url, str(marker))
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert eventually(lambda least=3 + 2 * i: len(collector.stored) >= least)
        process.kill()
        process.wait()
        process.stdout.close()
        last = int(marker.read_text() or 0)
        before = dict(collector.stored)
        collector.requests.clear()
        assert run_sync(directory, collector) == 0
        num_replayed += len(collector.stored) - len(before)
        steps = collector.steps()
        assert steps == list(range(len(steps)))
        assert steps[-1] in (last - 1, last, last + 1, last + 2)
        assert collector.num_records() == 3 * len(steps)
        assert collector.num_conflicts == 0
        collector.stored.clear()
    assert num_replayed > 0, "no kill left anything behind: nothing was shown"


def test_a_spool_sent_twice_has_the_same_keys_and_bytes(
    tmp_path: Path, settings: AgentSettings, session: Session, collector: Collector
) -> None:
    recorder = Recorder(settings, session)
    record(recorder, range(6))
    recorder.record_tile_maps(make_maps(2))
    assert recorder.flush(10)
    record(recorder, range(6, 9))
    recorder.close()
    copy = tmp_path / "copy"
    shutil.copytree(settings.spool_dir, copy)
    assert run_sync(settings.spool_dir, collector) == 0
    before = (dict(collector.stored), dict(collector.maps))
    assert collector.steps() == list(range(9))
    assert len(collector.maps) == 1
    assert run_sync(copy, collector) == 0
    assert (collector.stored, collector.maps) == before
    assert collector.num_conflicts == 0


def test_the_session_that_started_first_is_sent_first(tmp_path: Path, collector: Collector) -> None:
    """The collector numbers a run's attempts in the order in which their sessions come."""
    settings = AgentSettings(spool_dir=tmp_path, ring_bytes=1 << 20, poll_interval_s=0.01)
    names = ["c" * 32, "a" * 32, "b" * 32]
    for i, name in enumerate(names):
        recorder = Recorder(settings, make_session(session=name, started_at=1e9 + i))
        record(recorder, range(3))
        recorder.close(5)
    assert run_sync(tmp_path, collector) == 0
    assert list(collector.sessions) == names


def test_what_passes_a_limit_of_the_format_holds_up_no_other_session(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an agent of before has left it: a map that a collector refuses, and that cannot be split."""
    monkeypatch.setattr(tile_map_queue, "MAX_TILES", 1 << 40)
    settings = AgentSettings(spool_dir=tmp_path, ring_bytes=1 << 20, poll_interval_s=0.01)
    for i, name in enumerate(["a" * 32, "b" * 32]):
        recorder = Recorder(settings, make_session(session=name, started_at=1e9 + i))
        record(recorder, range(3))
        recorder.record_tile_maps([flat_map(4097, 4096)] if i == 0 else make_maps(1))
        recorder.close(5)
    assert run_sync(tmp_path, collector) == 1
    assert list(collector.sessions) == ["a" * 32, "b" * 32]
    assert collector.num_records() == 2 * 9
    assert len(collector.maps) == 1


def test_a_kill_between_spooling_and_noting_it_sends_nothing_twice(
    tmp_path: Path,
    settings: AgentSettings,
    session: Session,
    collector: Collector,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Ring, "release", lambda *args: None)
    monkeypatch.setattr(Ring, "journal", lambda *args: False)
    recorder = Recorder(settings, session)
    for s in range(3):
        record(recorder, [s])
        assert recorder.flush(10)
    killed = tmp_path / "killed"
    shutil.copytree(settings.spool_dir, killed)  # what a SIGKILL would leave
    recorder.close()
    assert len(list(killed.glob("*.ring"))) == 1
    assert run_sync(killed, collector) == 0
    assert (collector.steps(), collector.num_records()) == ([0, 1, 2], 9)


def test_sync_goes_on_where_it_was_stopped(
    settings: AgentSettings, session: Session, collector: Collector, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder(settings, session)
    for s in range(4):
        record(recorder, [s])
        assert recorder.flush(10)
    recorder.close()
    collector.script = [Reply(200, commit=True, body=b'{"acked": 0}')]
    collector.always = Reply(401)
    assert run_sync(settings.spool_dir, collector) == 1
    assert "HTTP 401" in capsys.readouterr().out
    collector.always = None
    assert run_sync(settings.spool_dir, collector) == 0
    assert collector.steps() == [0, 1, 2, 3]
    assert collector.num_conflicts == 0


def test_damage_is_counted_and_the_rest_arrives(
    settings: AgentSettings, session: Session, collector: Collector, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder(settings, session)
    for s in range(4):
        record(recorder, [s])
        assert recorder.flush(10)
    recorder.close()
    (path,) = settings.spool_dir.glob("*.spool")
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    path.write_bytes(raw)
    assert run_sync(settings.spool_dir, collector) == 1
    out = capsys.readouterr().out
    assert "1 frames and 3 records" in out
    assert len(collector.steps()) == 3
    assert run_sync(settings.spool_dir, collector) == 0, "said once; it does not come again"


def test_a_file_of_garbage_does_not_hold_up_the_others(
    settings: AgentSettings, session: Session, collector: Collector, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder(settings, session)
    record(recorder, [0])
    recorder.close()
    (settings.spool_dir / "00.ring").write_bytes(b"garbage" * 100_000)
    (settings.spool_dir / "00-000000.spool").write_bytes(b"garbage")
    assert run_sync(settings.spool_dir, collector) == 1
    assert collector.steps() == [0]
    assert "put aside" in capsys.readouterr().out
    assert run_sync(settings.spool_dir, collector) == 0


def killed_with_spool_and_ring(folder: Path, session: str) -> None:
    """Four steps in the spool and five in the ring, which has not noted the four, as a SIGKILL leaves them."""
    live = folder.parent / f"live-{session}"
    settings = AgentSettings(spool_dir=live, ring_bytes=1 << 20, poll_interval_s=0.01, batch_interval_s=0.01)
    recorder = Recorder(settings, make_session(session=session))
    for s in range(4):
        record(recorder, [s])
        assert recorder.flush(10)
    with recorder._sender.lock:
        record(recorder, range(4, 9))
        shutil.copytree(live, folder, dirs_exist_ok=True)
    recorder.close(0.3)


def test_a_ring_that_cannot_be_opened_or_has_gone_holds_up_nobody_else(
    tmp_path: Path, settings: AgentSettings, session: Session, collector: Collector, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder(settings, session)
    record(recorder, [0])
    recorder.close()
    (own,) = settings.spool_dir.glob("*.spool")
    shutil.copy(own, settings.spool_dir / "00-000000.spool")
    (settings.spool_dir / "00.ring").mkdir()  # fails to open for root, too
    (settings.spool_dir / "02.tmp").mkdir()
    for gone in ("01.ring", "03.new"):  # their processes end, or give them their final names, behind the look
        (settings.spool_dir / gone).symlink_to(tmp_path / "nowhere")
    assert run_sync(settings.spool_dir, collector) == 1
    assert collector.steps() == [0]
    said = capsys.readouterr().out
    assert "00.ring: [Errno 21]" in said
    assert "02.tmp: [Errno 21]" in said
    assert "01.ring" not in said
    assert "03.new" not in said
    assert "1 sessions are running" in said
    assert "3 files are left" in said, "with the segment that tells what of the ring was spooled"
    assert (settings.spool_dir / "00-000000.spool").exists()


def test_where_there_is_no_room_to_convert_a_ring_what_is_sent_makes_some(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "spool"
    with monkeypatch.context() as patched:
        patched.setattr(Ring, "release", lambda *args: None)
        patched.setattr(Ring, "journal", lambda *args: False)
        killed_with_spool_and_ring(folder, "a" * 32)
    append, full = SegmentWriter._append, True

    def on_a_full_disk(self: SegmentWriter, kind: int, *args: Any) -> None:
        if kind and (full or list(folder.glob("*-0*.spool"))):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(self, kind, *args)

    monkeypatch.setattr(SegmentWriter, "_append", on_a_full_disk)
    shutil.copytree(folder, tmp_path / "full")
    assert run_sync(folder, collector) == 1, "the disk stays full whatever is sent"
    assert collector.steps() == [0, 1, 2, 3]
    assert "a.ring: [Errno 28]" in capsys.readouterr().out
    assert [p.suffix for p in folder.glob("a*")] == [".ring"]
    full = False
    assert run_sync(folder, collector) == 0
    assert (collector.steps(), collector.num_records()) == (list(range(9)), 27), "nothing came twice under two keys"
    collector.stored.clear()
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "full", folder)
    assert run_sync(folder, collector) == 0, "what was sent made room"
    assert (collector.steps(), collector.num_records()) == (list(range(9)), 27)
    assert not list(folder.glob("a*"))


def test_a_session_that_runs_is_left_alone(
    settings: AgentSettings, session: Session, collector: Collector, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder(settings, session)
    record(recorder, [0])
    assert recorder.flush(10)
    assert run_sync(settings.spool_dir, collector) == 0
    assert "1 sessions are running" in capsys.readouterr().out
    assert not collector.stored
    other = subprocess.run(
        [
            sys.executable,
            "-m",
            "fp8watch_agent.sync",
            "--spool-dir",
            str(settings.spool_dir),
            "--collector",
            "http://h",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 sessions are running" in other.stdout, other.stderr
    recorder.close()
    assert run_sync(settings.spool_dir, collector) == 0
    assert collector.steps() == [0]


def test_without_a_collector_it_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sync.main(["--spool-dir", str(tmp_path)]) == 2
    assert "FP8WATCH_COLLECTOR" in capsys.readouterr().err


@pytest.mark.parametrize(
    "body",
    [b"<html>The plain HTTP request was sent to HTTPS port</html>", b'{"status": 400, "error": "Bad Request"}', b""],
)
def test_nothing_is_given_up_for_a_refusal_that_is_not_the_collectors(
    tmp_path: Path, collector: Collector, settings: AgentSettings, body: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder(replace(settings, spool_dir=tmp_path, collector=None), make_session())
    record(recorder, range(20))
    recorder.close()
    with serve(Collector(refuse_all=Reply(400, body=body))) as proxy:
        assert run_sync(tmp_path, proxy) == 1
    assert "the collector does not take it: HTTP 400" in capsys.readouterr().out
    assert not (tmp_path / "refused").exists()
    assert run_sync(tmp_path, collector) == 0
    assert collector.steps() == list(range(20))


def test_no_folder_is_nothing_to_do(tmp_path: Path, collector: Collector) -> None:
    assert run_sync(tmp_path / "none", collector) == 0


def test_a_session_whose_name_is_no_file_name_is_refused(settings: AgentSettings) -> None:
    with pytest.raises(ValueError, match="letters and digits"):
        Recorder(settings, replace(make_session(), session="../../etc"))
