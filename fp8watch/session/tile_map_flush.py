"""Which tile maps leave with a step: those that are asked for, those of what broke or jumped, and what led up to that.

Upstream:   fp8watch.session.step_flush
Downstream: fp8watch_agent.recorder
Shapes:     TileStats [Mt, Kt] of some rows -> TileMap [Mt·Kt]
Thread:     training

The statistics are on the device, held by reference for a few steps. A map is copied out like a step: begun at once, and
handed over when it has arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fp8watch.numerics.tile_stats import TileStats
from fp8watch.observer.step_sample import NO, StepSample
from fp8watch.session.event_follow import Followed
from fp8watch.session.jumps import Rows
from fp8watch.session.row_glance import Glance
from fp8watch.sketch.host_copy import HostCopies, HostCopy
from fp8watch.sketch.tile_cache import Held, HeldTiles, StepTiles, TileHistory
from fp8watch.sketch.tile_map import tile_map_from, tile_tensors
from fp8watch_agent.recorder import Recorder

MAX_TRIGGERED_BYTES = 4 << 20  # of tile maps that one step triggers: those that broke first go first
MAX_BURST_BYTES = 16 << 20  # of the tile maps that follow a jump
MAX_BROKEN_SAMPLES = 4
"""After so many broken samples in a row a site triggers no more maps until it was healthy again."""
MAP_BYTES_PER_TILE = 11
FORGET_SENT_STEPS = 16


@dataclass
class TileMapFlush:
    """Chooses and hands over the tile maps of one watch."""

    site_ids: Sequence[int]
    recorder: Recorder
    tiles: HeldTiles  # of the running step: it is told which sites are wanted
    copies: HostCopies
    history: TileHistory
    _on_the_way: deque[tuple[int, int, HostCopy]] = field(default_factory=deque)
    _num_broken: dict[int, int] = field(default_factory=dict)  # row -> broken samples in a row
    _sent: set[tuple[int, int]] = field(default_factory=set)  # (row, step) of maps that have left
    _burst_bytes: int = 0  # of the maps that follow a jump, what may still be sent

    def capture(
        self,
        step: int,
        sample: StepSample,
        rows: Rows,
        tiles: StepTiles,
        seen: Glance,
        suspects: AbstractSet[int],
        followed: Followed,
    ) -> None:
        """Begin the maps of one step that has arrived.

        Args:
            step: its number.
            sample: what it looked at.
            rows: [sites] of ROW.
            tiles: what the step left.
            seen: which rows broke; `suspects` may have.
            followed: rows that follow a jump.
        """
        asked = self.recorder.wanted_captures()
        streamed, triggered = set(), self._triggered(rows, seen, suspects)
        held = tiles.by_row if asked or sample.maps is not NO or triggered or followed.rows else {}
        if asked or sample.maps is not NO:
            streamed = {row for row in held if sample.maps[row] or (asked and self.site_ids[row] in asked)}
        budget = MAX_TRIGGERED_BYTES
        for row in triggered:
            if row in streamed or self._num_broken[row] > MAX_BROKEN_SAMPLES or budget <= 0:
                continue
            if row in held:
                streamed.add(row)
                budget -= _map_bytes(held[row][-1][1])
            if self._num_broken[row] == 1:
                for earlier, stats in self.history.before(step, row):
                    budget -= _map_bytes(stats)
                    self._begin(row, earlier, stats)
        for row in sorted(streamed):
            self._begin(row, step, _of_event(held[row], rows[row]))
        for row, at, stats in self._of_jump(step, held, budget, followed) if followed.rows else ():
            self._begin(row, at, stats)
        wanted = {row for row in triggered if self._num_broken[row] <= MAX_BROKEN_SAMPLES}
        if asked:
            wanted |= {row for row, site in enumerate(self.site_ids) if site in asked}
        self.tiles.wanted = frozenset(wanted.union(followed.rows))
        self.history.add(step, tiles)
        if self._sent:
            self._sent = {(row, at) for row, at in self._sent if at > step - FORGET_SENT_STEPS}

    def drain(self, *, wait: bool = False) -> None:
        """Hand over the maps that have arrived; with `wait` all of them, in bounded time."""
        maps = []
        while self._on_the_way:
            row, step, copy = self._on_the_way[0]
            if not (copy.wait() if wait else copy.ready()):
                break
            self._on_the_way.popleft()
            maps.append(tile_map_from(self.site_ids[row], step, copy.tensors()))
            copy.release()
        if maps:
            self.recorder.record_tile_maps(maps)

    def _triggered(self, rows: Rows, seen: Glance, suspects: AbstractSet[int]) -> list[int]:
        """Rows that broke, in the order of execution; each is counted."""
        if not (self._num_broken or suspects or seen.any_broken):
            return []
        broken = seen.broken
        for row in [row for row in self._num_broken if not broken[row]]:
            del self._num_broken[row]
        triggered: list[int] = [*np.flatnonzero(broken).tolist(), *sorted(suspects)]
        for row in triggered:
            self._num_broken[row] = self._num_broken.get(row, 0) + 1
        return sorted(triggered, key=lambda row: int(rows["order"][row]))

    def _of_jump(self, step: int, held: Held, budget: int, followed: Followed) -> list[tuple[int, int, TileStats]]:
        """Maps of the sites that told of a jump, as (row, step, statistics): in each step of its burst the step's own, and
        where it has just begun those that led up to it, the newest first, within the bytes of the step and the burst."""
        if followed.begun:
            self._burst_bytes = MAX_BURST_BYTES
        found = []
        for row in followed.rows:
            steps = [(step, stats) for _, stats in held.get(row, [])[-1:]]
            steps += reversed(self.history.before(step, row)) if followed.begun else []
            for at, stats in steps:
                size = _map_bytes(stats)
                if size > min(budget, self._burst_bytes):
                    break
                budget -= size
                self._burst_bytes -= size
                found.append((row, at, stats))
        return sorted(found, key=lambda of: of[:2])

    def _begin(self, row: int, step: int, stats: TileStats) -> None:
        if (row, step) not in self._sent:
            self._sent.add((row, step))
            self._on_the_way.append((row, step, self.copies.begin(*tile_tensors(stats))))


def _map_bytes(stats: TileStats) -> int:
    return MAP_BYTES_PER_TILE * stats.amax.numel()


def _of_event(calls: list[tuple[int, TileStats]], row: Any) -> TileStats:
    """Statistics of the call that broke, else of the last one."""
    call = int(row["first_nonfinite"][2])
    for order, stats in calls:
        if order == call:
            return stats
    return calls[-1][1]
