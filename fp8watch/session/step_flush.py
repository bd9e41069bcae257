"""From the end of a step to the agent: what it left is copied out without waiting, and handed over when it has arrived.

Upstream:   fp8watch.observer.plan, fp8watch.sketch.host_copy
Downstream: fp8watch_agent.recorder
Shapes:     slab rows [sites] of ROW and a few scalars, once a step
Thread:     training

On the CPU a step is handed over in the moment it ends. On a GPU it is on its way for one step, two at most: the host runs
ahead of the device, and with two steps waiting it waits for the older one, which the device has long had in its queue.
Where training ends (an exception, SIGTERM, exit, detach) everything is handed over, in bounded time.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fp8watch.observer.nonfinite_checks import gradient_faults, gradients_of, named_gradients
from fp8watch.observer.plan import TILE_BYTES, Plan
from fp8watch.session.jumps import Follow, RowJumps, ScalarJumps, most_telling
from fp8watch.session.site_registration import Rows, SiteRegistration
from fp8watch.sketch.host_copy import HostCopies, HostCopy
from fp8watch.sketch.tile_cache import Held, TileHistory
from fp8watch.sketch.tile_map import tile_map_from, tile_tensors
from fp8watch_agent.guard import Guard
from fp8watch_agent.record import ROW, STEP, STEP_SCALARS, StepStatus
from fp8watch_agent.recorder import Recorder

MAX_ON_THE_WAY = 2
ARRIVAL_TIMEOUT_S = 2.0
MAX_TRIGGERED_BYTES = 4 << 20  # of tile maps that one step triggers: those that broke first go first
MAX_BROKEN_SAMPLES = 4
"""After so many broken samples in a row a site triggers no more maps until it was healthy again."""
MAX_BURST_BYTES = 16 << 20  # of the tile maps that follow a jump
MAX_FOLLOWED = 8  # sites whose tile maps follow a jump
FOUND_INF = "found_inf"
PARAMETERS_EVERY = 64  # steps after which the list of parameters is made anew


@dataclass
class Left:
    """What one step left, on its way."""

    step: int
    status: StepStatus
    time: float
    sampled: bool
    recorded: bool  # not paused
    batch_id: str | None
    numbers: dict[str, float]
    names: list[str]  # of the numbers that are on the device
    gradients: list[str]  # parameters whose gradients were looked at
    suspects: list[int]  # rows of Transformer Engine that may be broken
    parts: list[str]  # what the tensors of `copy` are
    tiles: Held
    tile_bytes: int
    copy: HostCopy
    handed_over: bool = False


@dataclass
class Closing:
    """Closes the steps of one watch."""

    plan: Plan
    site_ids: Sequence[int]
    recorder: Recorder
    guard: Guard
    registration: SiteRegistration
    tile_maps: tuple[str, int]
    te: Any  # TeObserver | None
    model: nn.Module
    copies: HostCopies
    follow: Follow = field(default_factory=Follow)  # steps in which everything is looked at, because something happened
    _ids: npt.NDArray[np.uint64] = field(init=False)
    _on_the_way: deque[Left] = field(default_factory=deque)
    _maps: deque[tuple[int, int, HostCopy]] = field(default_factory=deque)
    _history: TileHistory = field(default_factory=lambda: TileHistory(TILE_BYTES // 4))
    _num_broken: dict[int, int] = field(default_factory=dict)  # row -> broken samples in a row
    _sent: set[tuple[int, int]] = field(default_factory=set)  # (row, step) of tile maps that have left
    _row_jumps: RowJumps = field(init=False)
    _scalar_jumps: ScalarJumps = field(default_factory=ScalarJumps)
    _was_broken: bool = False  # in the step before
    _followed: list[int] = field(default_factory=list)  # rows whose tile maps follow a jump
    _burst_bytes: int = 0  # of those maps, what may still be sent
    _newest: int = -1  # the step that ended last; those before it may still be on their way
    _parameters: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    _num_begun: int = 0

    def __post_init__(self) -> None:
        self._ids = np.array(self.site_ids, dtype=np.uint64)
        self._row_jumps = RowJumps(len(self._ids))

    # ---- the step ends ------------------------------------------------------------------------------------------

    def begin(
        self, step: int, status: StepStatus, values: Mapping[str, Any], batch_id: str | None, *, recorded: bool
    ) -> None:
        """Take what a step left; behind this call the slab may be cleared.

        Args:
            step: its number.
            status: how it ended.
            values: scalars by name, numbers or tensors; `FOUND_INF` says whether an optimizer was told to skip.
            batch_id: name of its data.
            recorded: False while paused: nothing of it leaves.
        """
        plan, slab = self.plan, self.plan.slab
        assert slab is not None
        parts: dict[str, Tensor] = {"rows": slab.buffer}
        numbers, waiting = self._split(values)
        if waiting:
            parts["numbers"] = torch.stack([v.detach().double().mean() for v in waiting.values()])
        gradients: list[str] = []
        if recorded and plan.step.checks_outputs and plan.observing:
            gradients, found = self._gradients(slab.device)
            if found:
                parts["gradients"] = gradient_faults(found)
        suspects: list[int] = []
        if self.te is not None and plan.step.sampled:
            self.te.end_step()
            suspects, counts = self.te.pop_suspects()
            if counts is not None:
                parts["suspects"] = counts
        self._num_begun += 1
        self._newest = step
        left = Left(
            step, status, time.time(), plan.step.sampled, recorded, batch_id, numbers, list(waiting), gradients, suspects,
            list(parts), *plan.tiles.take(), self.copies.begin(*parts.values()),
        )  # fmt: skip
        self._on_the_way.append(left)
        self.settle()

    def _split(self, values: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Numbers that are here, and tensors that are still on the device."""
        numbers: dict[str, float] = {}
        waiting: dict[str, Tensor] = {}
        for name, value in values.items():
            if not isinstance(value, Tensor):
                numbers[name] = float(value)
            elif self.copies.late and value.device.type == self.copies.device.type:
                waiting[name] = value.to(self.copies.device, non_blocking=True)
            else:
                numbers[name] = float(value.detach().float().mean())
        return numbers, waiting

    def _gradients(self, device: torch.device) -> tuple[list[str], list[Tensor]]:
        if self._num_begun % PARAMETERS_EVERY == 0 or not self._parameters:
            self._parameters = list(self.model.named_parameters())
        names, found = gradients_of(self._parameters, device)
        if not found:  # FSDP2 replaces parameters
            self._parameters = list(self.model.named_parameters())
            names, found = gradients_of(self._parameters, device)
        return names, found

    # ---- it has arrived -----------------------------------------------------------------------------------------

    def settle(self, *, everything: bool = False) -> None:
        """Hand over the steps that have arrived; with `everything` wait for all of them, in bounded time."""
        while self._on_the_way:
            left = self._on_the_way[0]
            if everything and not left.copy.wait(ARRIVAL_TIMEOUT_S):
                self.guard.swallow("arrival", TimeoutError(f"step {left.step} did not come from the device"))
                self._on_the_way.clear()
                break
            if not everything and not left.copy.ready() and len(self._on_the_way) <= MAX_ON_THE_WAY:
                break
            try:
                self._hand_over(left)
            finally:  # whatever failed: the next step is not held up by it
                if self._on_the_way and self._on_the_way[0] is left:
                    self._on_the_way.popleft()
                left.copy.release()
        self._deliver(everything=everything)

    def _hand_over(self, left: Left) -> None:
        if left.handed_over:  # a signal came in between
            return
        left.handed_over = True
        parts = dict(zip(left.parts, left.copy.tensors(), strict=True))
        rows: Rows = parts["rows"].numpy().reshape(-1).view(ROW)[: len(self._ids)]
        self.registration.see(rows)
        numbers = dict(left.numbers)
        if "numbers" in parts:
            numbers.update(zip(left.names, parts["numbers"].tolist(), strict=True))
        if "gradients" in parts:
            numbers.update(named_gradients(left.gradients, parts["gradients"].tolist()))
        suspects = parts["suspects"].tolist() if "suspects" in parts else []
        if numbers.pop(FOUND_INF, 0.0) and left.status == StepStatus.OK:
            left.status = StepStatus.SKIPPED
        if not left.recorded:
            return
        broken = _broken(rows)
        touched = rows["measured"] != 0  # between samples too: then without energies, moments and depth
        logs = {k: v for k, v in numbers.items() if k not in STEP_SCALARS}
        self.recorder.record_step(_header(left, numbers), self._ids[touched], rows[touched], logs, left.batch_id)
        begins = self.guard.call("jumps", lambda: self._look_for_events(left.step, rows, broken, numbers), False)
        held = {row for row, n in zip(left.suspects, suspects, strict=False) if n}
        self._capture(left, rows, broken, held, begins)

    def _look_for_events(
        self, step: int, rows: Rows, broken: npt.NDArray[np.bool_], numbers: Mapping[str, float]
    ) -> bool:
        """Let full statistics follow what broke or jumped. True where a jump has begun that, and its maps are to go."""
        is_broken = bool(broken.any() or np.any(rows["output_num_nonfinite"] > 0))
        is_broken |= not all(math.isfinite(numbers.get(name, 0.0)) for name in ("loss", "grad_norm"))
        self.follow.reached(self._newest)
        if is_broken:
            self.follow.broke(step, self._newest, fresh=not self._was_broken)
        self._was_broken = is_broken
        score = self._row_jumps.see(rows, broken)
        jumped = self._scalar_jumps.see(numbers) or bool((score > 1).any())
        if is_broken or not jumped or not self.follow.jumped(self._newest):
            return False
        self._followed = most_telling(score, rows["order"], MAX_FOLLOWED)
        self._burst_bytes = MAX_BURST_BYTES
        return True

    # ---- tile maps ----------------------------------------------------------------------------------------------

    def _capture(self, left: Left, rows: Rows, broken: npt.NDArray[np.bool_], suspects: set[int], jumped: bool) -> None:
        """Send the maps of what is asked for and of what broke or jumped, and what led up to that where it is fresh."""
        mode, n = self.tile_maps
        everything = mode == "all" or (mode == "every" and left.step % n == 0)
        asked = self.recorder.wanted_captures()
        wanted = (
            {row for row in left.tiles if everything or int(self._ids[row]) in asked} if everything or asked else set()
        )
        for row in [row for row in self._num_broken if not broken[row]]:
            del self._num_broken[row]
        triggered: list[int] = [*np.flatnonzero(broken).tolist(), *sorted(suspects)]
        triggered.sort(key=lambda row: int(rows["order"][row]))
        for row in triggered:
            self._num_broken[row] = self._num_broken.get(row, 0) + 1
        budget = MAX_TRIGGERED_BYTES
        for row in triggered:
            if row in wanted or self._num_broken[row] > MAX_BROKEN_SAMPLES or budget <= 0:
                continue
            if row in left.tiles:
                wanted.add(row)
                budget -= 11 * left.tiles[row][-1][1].amax.numel()
            if self._num_broken[row] == 1:
                for step, stats in self._history.before(left.step, row):
                    budget -= 11 * stats.amax.numel()
                    self._begin_map(row, step, stats)
        for row in sorted(wanted):
            self._begin_map(row, left.step, _of_event(left.tiles[row], rows[row]))
        for row, step, stats in self._maps_of_jump(left, budget, jumped):
            self._begin_map(row, step, stats)
        alert = {row for row in triggered if self._num_broken[row] <= MAX_BROKEN_SAMPLES}
        alert |= {row for row, site in enumerate(self._ids.tolist()) if site in asked} if asked else set()
        self.plan.tiles.wanted = frozenset(alert.union(self._followed))
        self._history.add(left.step, left.tiles, left.tile_bytes)
        if self._sent:
            self._sent = {(row, step) for row, step in self._sent if step > left.step - 16}

    def _maps_of_jump(self, left: Left, budget: int, jumped: bool) -> list[tuple[int, int, Any]]:
        """Maps of the sites that told of a jump, as (row, step, statistics): in each step of its burst the step's own, and
        where it has just begun those that led up to it, the newest first, within the bytes of the step and the burst."""
        if left.step > self.follow.full_until:
            self._followed = []
        found = []
        for row in self._followed:
            steps = [(left.step, stats) for _, stats in left.tiles.get(row, [])[-1:]]
            steps += reversed(self._history.before(left.step, row)) if jumped else []
            for step, stats in steps:
                size = 11 * stats.amax.numel()
                if size > min(budget, self._burst_bytes):
                    break
                budget -= size
                self._burst_bytes -= size
                found.append((row, step, stats))
        return sorted(found, key=lambda of: of[:2])

    def _begin_map(self, row: int, step: int, stats: Any) -> None:
        if (row, step) not in self._sent:
            self._sent.add((row, step))
            self._maps.append((row, step, self.copies.begin(*tile_tensors(stats))))

    def _deliver(self, *, everything: bool) -> None:
        maps = []
        while self._maps:
            row, step, copy = self._maps[0]
            if not (copy.wait(ARRIVAL_TIMEOUT_S) if everything else copy.ready()):
                break
            self._maps.popleft()
            maps.append(tile_map_from(int(self._ids[row]), step, copy.tensors()))
            copy.release()
        if maps:
            self.recorder.record_tile_maps(maps)


def _broken(rows: Rows) -> npt.NDArray[np.bool_]:
    """Rows with a non-finite value, a broken invariant or a sentinel tile. [sites]"""
    found: npt.NDArray[np.bool_] = (
        (rows["num_nan"] > 0)
        | (rows["num_inf"] > 0)
        | (rows["num_off_scale_tiles"] > 0)
        | (rows["num_sentinel_tiles"] > 0)
    )
    return found


def _header(left: Left, numbers: Mapping[str, float]) -> np.ndarray[Any, Any]:
    header = np.zeros((), dtype=STEP)
    header["step"], header["status"], header["time"] = left.step, int(left.status), left.time
    for name, bit in STEP_SCALARS.items():
        if name in numbers:
            header[name] = numbers[name]
            header["present"] |= int(bit)
    return header


def _of_event(calls: list[tuple[int, Any]], row: Any) -> Any:
    """Statistics of the call that broke, else of the last one."""
    call = int(row["first_nonfinite"][2])
    for order, stats in calls:
        if order == call:
            return stats
    return calls[-1][1]
