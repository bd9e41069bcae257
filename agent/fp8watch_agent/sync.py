"""`fp8watch sync`: sends what a collector outage or a killed process has left on disk.

Thread:     its own process

A ring is first converted to a spool segment with one rename, and removed; nothing of it is sent before. So every body
has its key and its bytes on disk before it is sent, and sync may be killed at any point and run again. Sessions of live
processes are left alone.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import math
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from fp8watch_agent.batch import Kind, Parcel, batches
from fp8watch_agent.ring import RING_SUFFIX
from fp8watch_agent.ring_file import NEW_SUFFIX, DamagedRing, read_boot_id
from fp8watch_agent.ring_memory import live_paths
from fp8watch_agent.ring_recovery import note_durable, recover
from fp8watch_agent.session import Registration, Session
from fp8watch_agent.settings import AgentSettings
from fp8watch_agent.spool_segment import SEGMENT_SUFFIX, SegmentContents, SegmentWriter, quarantine, read_segment
from fp8watch_agent.transport import ResponseMeaning, Transport
from fp8watch_agent.uploader import Uploader
from fp8watch_agent.wire import WireError, decode_batch

RECORDS_PER_BATCH = 4096
FORBIDDEN = (b'"session-key"', b'"token-runs"')
"""Errors of the collector that are about one session, or the run of one."""
MIN_BACKOFF_S = 0.1
MAX_BACKOFF_S = 30.0


@dataclass
class Report:
    """Result of one sync over all sessions."""

    num_records: int = 0
    num_maps: int = 0
    num_bodies: int = 0
    refused: dict[str, int] = field(default_factory=dict)  # records and tile maps, by reason
    num_damaged_bytes: int = 0
    num_lost_frames: int = 0
    num_lost_records: int = 0
    num_rekeyed: int = 0
    num_running: int = 0
    num_left: int = 0  # files left for the next run
    problems: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        yield f"sent {self.num_bodies} bodies: {self.num_records} records, {self.num_maps} tile maps"
        for reason, n in sorted(self.refused.items()):
            yield f"refused by the collector ({reason}): {n}; bodies are kept under refused/"
        if self.num_damaged_bytes or self.num_lost_frames:
            yield (
                f"lost to damage: {self.num_lost_frames} frames and {self.num_lost_records} records that are known of, "
                f"{self.num_damaged_bytes} damaged bytes"
            )
        if self.num_rekeyed:
            yield f"{self.num_rekeyed} bodies went under other sequence numbers: those of theirs were taken"
        if self.num_running:
            yield f"{self.num_running} sessions are running, and send for themselves"
        yield from self.problems
        if self.num_left:
            yield f"{self.num_left} files are left: run `fp8watch sync` again"

    @property
    def complete(self) -> bool:
        return not (self.num_left or self.refused or self.problems or self.num_damaged_bytes or self.num_lost_frames)


@contextlib.contextmanager
def _locked(path: Path, *, create: bool) -> Iterator[bool]:
    """Whether another process holds the file's lock: a live process holds that of its ring."""
    if path.resolve() in live_paths:  # our own ring: opening and closing it would release its POSIX lock
        yield False
        return
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
    try:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)


def session_of(path: Path) -> str:
    """Session id from the name of a file in the spool folder."""
    return path.name.split(".")[0].split("-")[0]


def _started_at(segments: Sequence[Path]) -> float:
    """When the session of these segments started; what does not say so comes last."""
    for path in segments:
        with contextlib.suppress(OSError):
            registration = read_segment(path).registration
            if registration is not None:
                return registration.session.started_at
    return math.inf


class Sync:
    """One pass over a spool folder."""

    def __init__(self, directory: Path, uploader: Uploader, timeout_s: float) -> None:
        self._directory = directory
        self._uploader = uploader
        self._until = time.monotonic() + timeout_s
        self._forbidden: set[str] = set()  # sessions that are refused by themselves: the others go on
        self._waiting: set[str] = set()  # sessions whose rings could not be taken, and need what their segments say
        self._noted: set[Path] = set()  # rings that say by themselves what of them is in segments
        self._left: set[Path] = set()
        self.report = Report()

    def run(self) -> Report:
        """Send the data of all sessions whose process is gone."""
        running: set[str] = set()
        failed = self._take_rings(sorted(self._directory.glob(f"*{RING_SUFFIX}")), running)
        self._clear(running)
        self.report.num_running = len(running)
        if self._send_all(running | self._waiting) and failed:
            failed = self._take_rings(list(failed), running)  # what was sent may have made room
            self._send_all(running | self._waiting)
        for path in self._directory.glob(f"*{SEGMENT_SUFFIX}"):
            if session_of(path) in self._waiting:
                self._left.add(path)
        self._left |= failed.keys()
        self.report.problems += [f"{ring}: {error}" for ring, error in failed.items()]
        self.report.num_left = len(self._left)
        return self.report

    def _take_rings(self, rings: Sequence[Path], running: set[str]) -> dict[Path, OSError]:
        """Convert the rings of dead processes, add sessions of live ones to `running`, and return what went wrong."""
        failed: dict[Path, OSError] = {}
        for ring in rings:
            self._waiting.discard(session_of(ring))
            try:
                with _locked(ring, create=False) as ours:
                    if ours:
                        self._take_ring(ring)
                    else:
                        running.add(session_of(ring))
            except OSError as e:
                if isinstance(e, FileNotFoundError) and not ring.exists():
                    continue  # its process has ended just now, and has left nothing in it
                failed[ring] = e
                if ring not in self._noted:
                    self._waiting.add(session_of(ring))
        return failed

    def _clear(self, running: set[str]) -> None:
        """Delete what processes left that died before the final rename."""
        for leftover in (*self._directory.glob(f"*{NEW_SUFFIX}"), *self._directory.glob("*.tmp")):
            if session_of(leftover) not in running:
                try:
                    with _locked(leftover, create=False) as ours:
                        if ours:
                            leftover.unlink(missing_ok=True)
                        else:
                            running.add(session_of(leftover))
                except FileNotFoundError:  # its process lives, and has given it its final name
                    running.add(session_of(leftover))
                except OSError as e:
                    self._leave(leftover, e)

    def _leave(self, path: Path, error: OSError) -> None:
        self.report.problems.append(f"{path}: {error}")
        self._left.add(path)

    def _send_all(self, but: set[str]) -> bool:
        """Send the segments of all sessions but some; False where the collector takes no more."""
        there = {p for p in self._directory.glob(f"*{SEGMENT_SUFFIX}") if session_of(p) not in but}
        segments = self._in_order(list(there - self._left))
        for i, path in enumerate(segments):
            if session_of(path) in self._forbidden:
                self._left.add(path)
                continue
            try:
                sent = self._send_segment(path)
            except OSError as e:
                self._leave(path, e)
                continue
            if not sent:
                if session_of(path) not in self._forbidden:
                    self._left.update(segments[i:])
                    return False
                self._left.add(path)
        return True

    def _in_order(self, segments: Sequence[Path]) -> list[Path]:
        """Session by session, the one that started first before all others: the collector numbers a run's attempts in
        the order in which their sessions come."""
        sessions: dict[str, list[Path]] = {}
        for path in sorted(segments):
            sessions.setdefault(session_of(path), []).append(path)
        return [path for paths in sorted(sessions.values(), key=_started_at) for path in paths]

    def _take_ring(self, ring: Path) -> None:
        """Convert the ring's contents to one segment and remove the ring."""
        spooled_to = self._spooled_to(session_of(ring))
        try:
            got = recover(ring, read_boot_id(), spooled_to)
        except DamagedRing as e:
            aside = ring.with_suffix(".damaged")
            ring.rename(aside)
            self.report.num_damaged_bytes += aside.stat().st_size
            self.report.problems.append(f"{aside}: {e}; put aside, nothing of it can be sent")
            return
        problems, parcels = [], []
        if got.num_missing_bytes:
            problems.append(f"{ring}: cut by {got.num_missing_bytes} bytes; what is left of it was read")
        if got.in_flight is not None:
            f = got.in_flight
            parcels.append(Parcel(Kind(f.kind), f.seq, f.body, f.num_records))
        seq = got.next_seq
        for builder in batches(got.registration.session, got.frames, RECORDS_PER_BATCH):
            try:
                parcels.append(builder.build(seq, float(builder.frames[-1].steps["time"][0]), {}))
            except ValueError as e:
                problems.append(f"{ring}: {builder.num_records} records cannot be encoded: {e}")
            seq += 1
        if parcels:
            try:
                self._write_segment(ring, got.registration, parcels)
            except OSError:  # no room, it may be: then the segments go first, and the ring must do without them
                note_durable(ring, spooled_to)
                self._noted.add(ring)
                raise
        self.report.problems += problems
        self.report.num_lost_frames += got.num_lost_frames
        self.report.num_lost_records += got.num_lost_records
        ring.unlink()

    def _write_segment(self, ring: Path, registration: Registration, parcels: Sequence[Parcel]) -> None:
        # Sorts behind the numbered segments, which are older.
        final = self._directory / f"{session_of(ring)}-ring{SEGMENT_SUFFIX}"
        part = final.with_suffix(".tmp")
        try:
            with contextlib.closing(SegmentWriter(part)) as writer:
                writer.append_registration(registration)
                for parcel in parcels:
                    writer.append(parcel)
            os.replace(part, final)
        except OSError:
            part.unlink(missing_ok=True)
            raise

    def _spooled_to(self, session: str) -> int:
        """Ring position up to which the spool has the data; without it, a kill between spooling and marking would send
        a batch twice under two keys.
        """
        ends = [0]
        for path in self._directory.glob(f"{session}-*{SEGMENT_SUFFIX}"):
            ends += [p.end for p in read_segment(path).parcels]
        return max(ends)

    def _send_segment(self, path: Path) -> bool:
        """Send a segment; True when the file is finished and removed.

        Raises:
            OSError: it cannot be read, or not removed.
        """
        contents = read_segment(path)
        registration = self._registration(path, contents)
        if registration is None and contents.parcels:
            aside = path.with_suffix(".damaged")
            path.rename(aside)
            self.report.problems.append(f"{aside}: no session can be read; put aside, nothing of it can be sent")
            return True
        for parcel in contents.parcels:
            if registration is None or not self._send(parcel, registration):
                return False
        self.report.num_damaged_bytes += contents.num_damaged_bytes
        self.report.num_lost_frames += contents.num_lost_frames
        self.report.num_lost_records += contents.num_lost_records
        path.unlink(missing_ok=True)
        return True

    def _registration(self, path: Path, contents: SegmentContents) -> Registration | None:
        """Registration from the segment, from another segment of its session, or minimal, from the header of a body."""
        if contents.registration is not None:
            return contents.registration
        for other in self._directory.glob(f"{session_of(path)}-*{SEGMENT_SUFFIX}"):
            found = read_segment(other).registration
            if found is not None:
                return found
        for parcel in contents.parcels:
            if parcel.kind == Kind.BATCH:
                with contextlib.suppress(WireError):
                    return Registration(_minimal_session(parcel))
        return None

    def _send(self, parcel: Parcel, registration: Registration) -> bool:
        num_failures = 0
        while True:
            receipt = self._uploader.send(parcel, registration)
            if receipt.verdict is ResponseMeaning.ACKNOWLEDGED:
                break
            delay_s = random.uniform(0, min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2.0 ** min(num_failures, 16)))
            delay_s = max(delay_s, receipt.answer.retry_after_s or 0.0)
            num_failures += 1
            if receipt.answer.status == 403 and any(e in receipt.answer.body for e in FORBIDDEN):
                self._forbidden.add(registration.session.session)
            if receipt.verdict is ResponseMeaning.HOLD or time.monotonic() + delay_s > self._until:
                self.report.problems.append(f"the collector does not take it: {receipt.answer}")
                return False
            time.sleep(delay_s)
        report = self.report
        report.num_bodies += 1
        report.num_rekeyed += receipt.num_rekeyed
        if parcel.kind == Kind.BATCH:
            report.num_records += receipt.acknowledged
        else:
            report.num_maps += receipt.acknowledged
        for reason, n in receipt.refused.items():
            report.refused[reason] = report.refused.get(reason, 0) + n
        for refused, reason in receipt.refused_bodies:
            with contextlib.suppress(OSError):
                quarantine(self._directory, registration.session.session, refused, reason)
        return True


def _minimal_session(parcel: Parcel) -> Session:
    h = decode_batch(parcel.body).header
    return Session(
        run_id=h.run,
        run_name=h.run,
        session=h.session,
        rank=h.rank,
        world_size=h.rank + 1,
        mesh={},
        host="",
        pid=0,
        started_at=h.clock,
        versions={},
        recipe="",
        fingerprint="",
        backend="",
    )


def main(argv: list[str]) -> int:
    """Entry point of `fp8watch sync`. Exit status: 0 all is delivered, 1 something is left or lost, 2 refused."""
    parser = argparse.ArgumentParser(prog="fp8watch sync", description="Send what training left on disk.")
    parser.add_argument("--spool-dir", help="folder of the spool (FP8WATCH_SPOOL_DIR)")
    parser.add_argument("--collector", help="URL of the collector (FP8WATCH_COLLECTOR)")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="how long to try again (60)")
    args = parser.parse_args(argv)
    try:
        settings = AgentSettings.from_environ(spool_dir=args.spool_dir, collector=args.collector)
        if settings.collector is None:
            raise ValueError("--collector=None: sync needs a collector; give its URL, or set FP8WATCH_COLLECTOR")
        if not args.timeout >= 0:
            raise ValueError(f"--timeout={args.timeout}: must be 0 or more; give seconds, such as 60")
    except ValueError as e:
        print(f"fp8watch sync: {e}", file=sys.stderr)
        return 2
    if not settings.spool_dir.is_dir():
        print(f"nothing to send: {settings.spool_dir} does not exist")
        return 0
    transport = Transport(settings.collector, settings.token, settings.token_file, settings.request_timeout_s)
    try:
        with _locked(settings.spool_dir / "sync.lock", create=True) as ours:
            if not ours:
                print(f"another `fp8watch sync` is at work in {settings.spool_dir}", file=sys.stderr)
                return 1
            report = Sync(settings.spool_dir, Uploader(transport), args.timeout).run()
    except (OSError, msgspec.MsgspecError) as e:
        print(f"fp8watch sync: {settings.spool_dir}: {e}", file=sys.stderr)
        return 1
    finally:
        transport.close()
    for line in report.lines():
        print(line)
    return 0 if report.complete else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
