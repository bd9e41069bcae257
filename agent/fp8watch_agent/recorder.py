"""Recorder: the non-blocking API through which training hands over its measurements.

Upstream:   fp8watch.session.step_flush, fp8watch.session.tile_map_flush
Downstream: fp8watch_agent.ring, fp8watch_agent.sender
Shapes:     one step: STEP, site ids uint64 [N], rows [N] of ROW
Thread:     training: `record_*` copy memory and return; they never wait, never raise, and do no I/O
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from fp8watch_agent.accounting import maps_ledger, records_ledger
from fp8watch_agent.expert_vectors import pack
from fp8watch_agent.fitting_text import fitted_facts, fitted_session, fitted_site
from fp8watch_agent.guard import Guard
from fp8watch_agent.health import DROP_CLOSED, DROP_REENTRANT, DeliveryCounts, Health
from fp8watch_agent.record import ROW, STEP, Site, TileMap
from fp8watch_agent.ring import Ring
from fp8watch_agent.ring_file import Extra
from fp8watch_agent.sender import ENDED, Sender
from fp8watch_agent.session import Registration, Session
from fp8watch_agent.settings import AgentSettings
from fp8watch_agent.spool import Spool
from fp8watch_agent.spool_dir import usable_directory
from fp8watch_agent.tile_map_queue import MapQueue
from fp8watch_agent.transport import Transport
from fp8watch_agent.uploader import Uploader

logger = logging.getLogger("fp8watch")

MAX_EXTRA_BYTES = 16 << 10  # logs and batch id of one step
MAX_EXPERT_BYTES = 1 << 20  # vectors over experts of one step
_MORE = msgspec.msgpack.encode(Extra({}, None, more=True))
_CLOSE_RESERVE_S = 0.5  # share of close's timeout that is reserved for spooling
_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()


class Recorder:
    """The agent's public interface. One thread records; any thread may query, flush and close."""

    def __init__(self, settings: AgentSettings, session: Session, guard: Guard | None = None) -> None:
        """Create the ring and start the sender. The caller's thread does no network I/O.

        `guard` is shared with the host library, so the errors that it swallows appear in this agent's health.

        Raises:
            ValueError: settings that cannot work.
        """
        self._settings = settings
        self._session = session = fitted_session(session)
        self._guard = guard or Guard()
        self._registration = Registration(session)
        self._maps = MapQueue()
        self._directory = usable_directory(settings.spool_dir)
        self._ring = self._make_ring()
        spool = None
        if self._directory is not None:
            spool = Spool(self._directory, self._registration, settings.spool_bytes)
        uploader = None
        if settings.collector is not None:
            uploader = Uploader(
                Transport(settings.collector, settings.token, settings.token_file, settings.request_timeout_s)
            )
        self._gauges: dict[str, float] = {}
        self._late = DeliveryCounts()  # written by the training thread: records that came after close
        self._late_maps = DeliveryCounts()
        self._num_steps = 0
        self._last_step = -1
        self._last_raw = b""  # the STEP that was recorded last
        self._pushing = threading.Lock()  # acquired without blocking only
        self._closed = False
        self._inert = False
        self._sender = Sender(
            settings, self._registration, self._ring, self._maps, spool, uploader, self._guard, self._health_floats
        )
        _recorders.add(self)
        self._sender.thread.start()

    @property
    def spool_dir(self) -> Path | None:
        """The folder of ring and spool that is used; None where nothing can be written."""
        return self._directory

    # --- the training thread

    def register_sites(self, sites: Sequence[Site]) -> None:
        """Register static facts of sites: at attach, and again when they change. Only new and changed ones are sent."""
        if self._inert or self._closed:
            return
        try:
            fresh = self._registration.add(map(fitted_site, sites))
            if fresh and not self._ring.add_sites(fresh):
                raise OverflowError(f"{len(fresh)} sites do not fit into the ring file: sync will lack them")
        except Exception as e:  # noqa: BLE001
            self._guard.swallow("register_sites", e)

    def update_facts(self, facts: Mapping[str, str | int | float | bool]) -> None:
        """Add session facts that become known while training runs. They are sent without waiting for a batch."""
        if self._inert or self._closed:
            return
        try:
            self._registration.update_facts(fitted_facts(facts))
        except Exception as e:  # noqa: BLE001
            self._guard.swallow("update_facts", e)

    def record_step(
        self,
        step: np.void | npt.NDArray[np.void],
        site_ids: npt.NDArray[np.uint64],
        rows: npt.NDArray[np.void],
        logs: Mapping[str, float] | None = None,
        batch_id: str | None = None,
        experts: Mapping[int, npt.NDArray[np.void]] | None = None,
    ) -> None:
        """Record one step. The arrays are copied before this returns.

        Args:
            step: one STEP.
            site_ids: [N] uint64.
            rows: [N] of ROW.
            logs: named numbers of this step besides those of STEP.
            batch_id: what the caller calls its data.
            experts: site -> VECTOR [E], what a site says of each of its experts.
        """
        if self._inert:
            return
        if self._closed or not self._pushing.acquire(blocking=False):
            reason = DROP_CLOSED if self._closed else DROP_REENTRANT
            self._guard.call("record_step", lambda: self._late.drop(reason, len(rows)), None)
            return
        try:
            raw = step.tobytes()
            if rows.dtype != ROW or len(raw) != STEP.itemsize or len(site_ids) != len(rows):
                raise ValueError(
                    f"{len(site_ids)} site ids, {len(rows)} rows of {rows.dtype.itemsize} bytes, a step of {len(raw)}: "
                    f"one id a row, rows of ROW ({ROW.itemsize} bytes), one STEP ({STEP.itemsize} bytes)"
                )
            extra = self._pack_extra(logs, batch_id, experts) if logs or batch_id is not None or experts else b""
            self._num_steps += 1
            self._last_step = int(step["step"])
            ids = np.ascontiguousarray(site_ids, dtype=np.uint64)
            self._last_raw = raw
            self._ring.push(raw, ids, np.ascontiguousarray(rows), extra)
        except Exception as e:  # noqa: BLE001
            self._guard.swallow("record_step", e)
        finally:
            self._pushing.release()

    def record_more(self, site_ids: npt.NDArray[np.uint64], rows: npt.NDArray[np.void]) -> None:
        """Record rows of more sites for the step that was recorded last: what was known of it only later.

        In the ring they are a frame of their own, which joins that of the step in a batch, or is the same step in the next
        batch where that one has left.

        Args:
            site_ids: [N] uint64, none of which the step has.
            rows: [N] of ROW.
        """
        if self._inert:
            return
        if self._closed or not self._last_raw or not self._pushing.acquire(blocking=False):
            reason = DROP_CLOSED if self._closed else DROP_REENTRANT
            self._guard.call("record_more", lambda: self._late.drop(reason, len(rows)), None)
            return
        try:
            if rows.dtype != ROW or len(site_ids) != len(rows):
                raise ValueError(f"{len(site_ids)} site ids, {len(rows)} rows of {rows.dtype.itemsize} bytes")
            ids = np.ascontiguousarray(site_ids, dtype=np.uint64)
            self._ring.push(self._last_raw, ids, np.ascontiguousarray(rows), _MORE)
        except Exception as e:  # noqa: BLE001
            self._guard.swallow("record_more", e)
        finally:
            self._pushing.release()

    def _pack_extra(
        self, logs: Mapping[str, float] | None, batch_id: str | None, experts: Mapping[int, npt.NDArray[np.void]] | None
    ) -> bytes:
        """Logs as msgpack, with what is said of experts. What cannot be packed is counted, and the step is recorded without it."""
        try:
            values = {str(k): float(v) for k, v in logs.items()} if logs else {}
            found = values, None if batch_id is None else str(batch_id)
            extra = msgspec.msgpack.encode(found)
            if len(extra) > MAX_EXTRA_BYTES:
                found = _that_fit(*found), found[1]
                left = f"{len(values) - len(found[0])} of {len(values)} logged numbers are left out, the longest names"
                self._guard.swallow("logs", OverflowError(f"{left}: {MAX_EXTRA_BYTES} bytes a step are taken"))
                extra = msgspec.msgpack.encode(found)
                if len(extra) > MAX_EXTRA_BYTES:
                    return b""
            whole = msgspec.msgpack.encode((*found, pack(experts))) if experts else extra
            return whole if len(whole) - len(extra) <= MAX_EXPERT_BYTES else extra
        except Exception as e:  # noqa: BLE001
            self._guard.swallow("logs", e)
            return b""

    def record_tile_maps(self, maps: Sequence[TileMap]) -> None:
        """Record full tile maps. Their arrays are kept by reference and must not be modified afterwards."""
        if self._inert:
            return
        try:
            if self._closed:
                self._late_maps.drop(DROP_CLOSED, len(maps))
                return
            for tile_map in maps:
                self._maps.push(tile_map)
        except Exception as e:  # noqa: BLE001
            self._guard.swallow("record_tile_maps", e)

    def hurry(self) -> None:
        """Let what was recorded so far leave without waiting for more steps: something has happened in it."""
        if not self._inert and not self._closed:
            self._sender.hurry()

    def wanted_captures(self) -> frozenset[int]:
        """Ids of the sites whose full tile maps the collector asks for in the step that comes, or has asked for of the last."""
        wanted, last_step = self._sender.captures.items(), self._last_step
        return frozenset(site for site, (first, last) in wanted if first - 1 <= last_step <= last)

    def set_gauge(self, name: str, value: float) -> None:
        """Set a number about the agent itself, such as `overhead_ratio`; sent in the header of each batch."""
        self._gauges[name] = float(value)

    # --- any thread

    @property
    def settings(self) -> AgentSettings:
        """What the agent was told."""
        return self._settings

    def health(self) -> Health:
        """A health snapshot."""
        if self._inert:
            return Health(state="inert")
        sender = self._sender
        locked = sender.lock.acquire(timeout=0.2)  # slow disk: take the snapshot without the lock
        try:
            return self._snapshot()
        finally:
            if locked:
                sender.lock.release()

    def _snapshot(self) -> Health:
        state = "closed" if self._closed else self._sender.state
        return Health(
            state=state,
            records=records_ledger(self._ring, self._sender, self._late.dropped),
            maps=maps_ledger(self._maps, self._sender, self._late_maps.dropped),
            num_steps=self._num_steps,
            num_batches=self._sender.num_batches,
            num_retries=self._sender.num_retries,
            num_bytes=self._sender.num_bytes,
            internal_errors=dict(self._guard.errors),
            last_error=self._sender.last_error,
            gauges=dict(self._gauges),
        )

    def _health_floats(self) -> dict[str, float]:
        return self._snapshot().as_floats()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything recorded is acknowledged (without a collector: on disk). False on timeout."""
        if self._inert or self._closed:
            return False
        sender, ring = self._sender, self._ring
        target = ring.pushed_frames
        until = time.monotonic() + timeout_s
        sender.flushing = True
        try:
            while True:
                sender.wake.set()
                in_ring = sender.oldest_unsent() < target or len(self._maps) > 0
                spooled = sender.spool is not None and bool(sender.spool) and self._settings.collector is not None
                if not in_ring and not spooled:
                    return True
                left_s = until - time.monotonic()
                if left_s <= 0 or (not in_ring and sender.away_for_s() > left_s):
                    return False
                time.sleep(min(0.01, left_s))
        finally:
            sender.flushing = False

    def close(self, timeout_s: float = 2.0) -> None:
        """Send what can be sent in `timeout_s`, spool the rest, end the thread. Idempotent, never raises."""
        if self._inert or self._closed:
            return
        self._closed = True
        try:
            self._close(timeout_s)
        except Exception as e:  # noqa: BLE001
            self._guard.swallow("close", e)
        self._guard.emit()

    def _close(self, timeout_s: float) -> None:
        sender = self._sender
        self._gauges[ENDED] = 1.0
        until = time.monotonic() + max(0.1, timeout_s)
        sender.deadline = until - min(_CLOSE_RESERVE_S, timeout_s / 2)
        if sender.uploader is not None:
            sender.uploader.transport.deadline = sender.deadline
        sender.wake.set()
        sender.thread.join(max(0.0, sender.deadline - time.monotonic()))
        # Still in a request: its outcome is ignored from here on. The current parcel is spooled under its key.
        if not sender.lock.acquire(timeout=max(0.01, until - time.monotonic())):
            return  # the sender hangs in disk I/O: leave the ring file with all of its data for sync
        try:
            sender.take_over()
            left = sender.in_hand is not None or sender.num_building > 0 or len(self._ring) > 0
            if sender.spool is not None:
                self._guard.call("close", sender.spool.close, None)
            self._ring.close(keep=left)
        finally:
            sender.lock.release()
        if sender.thread.is_alive():
            return
        if sender.uploader is not None:
            sender.uploader.transport.close()
        if self._pushing.acquire(timeout=0.1):  # not while another thread records a step
            self._ring.unmap()
            self._pushing.release()

    def _make_ring(self) -> Ring:
        size = self._settings.ring_bytes
        if self._directory is not None:
            try:
                return Ring(self._directory, self._session, size)
            except OSError as e:
                logger.warning("no ring file in %s (%s): a SIGKILL would lose the last steps", self._directory, e)
        return Ring(None, self._session, size)

    def _after_fork(self) -> None:
        """In a forked child: the ring belongs to the parent, and the sender thread does not exist."""
        self._inert = True


def _inert_after_fork() -> None:
    for recorder in list(_recorders):
        recorder._after_fork()


os.register_at_fork(after_in_child=_inert_after_fork)


def _that_fit(values: Mapping[str, float], batch_id: str | None) -> dict[str, float]:
    """Those that fit into MAX_EXTRA_BYTES beside the name of the data, the shortest names first."""
    room = MAX_EXTRA_BYTES - len(msgspec.msgpack.encode(batch_id)) - 8
    kept: dict[str, float] = {}
    for name in sorted(values, key=len):
        room -= len(msgspec.msgpack.encode(name)) + 9
        if room < 0:
            break
        kept[name] = values[name]
    return kept
