"""From the end of a step to the agent: what it left is copied out without waiting, and handed over when it has arrived.

Upstream:   fp8watch.observer.observation_plan, fp8watch.sketch.host_copy
Downstream: fp8watch_agent.recorder, fp8watch.session.tile_map_flush
Shapes:     slab rows [sites] of ROW and a few scalars, once a step
Thread:     training

On the CPU a step is handed over in the moment it ends. On a GPU it is on its way as long as the host runs ahead of the
device, mostly for one step. With MAX_ON_THE_WAY of them in the device's queue the host waits for the oldest: what it holds
is bounded, and a device that has as much before it does not notice.
Where training ends (an exception, SIGTERM, exit, detach) everything is handed over, in bounded time.
"""

from __future__ import annotations

import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fp8watch.observer.expert_rows import Calls, named_experts
from fp8watch.observer.expert_turns import named_turns
from fp8watch.observer.nonfinite_checks import gradient_faults, gradients_of, named_gradients
from fp8watch.observer.observation_plan import TILE_BYTES, ObservationPlan
from fp8watch.observer.step_sample import StepSample
from fp8watch.observer.stopwatch import FIXED, SAMPLING
from fp8watch.session.attachment import Attachment, Cadence, Session
from fp8watch.session.causal_attention import CausalAttention
from fp8watch.session.checkpoint_steps import CheckpointSteps, weights_broken
from fp8watch.session.event_follow import NOTHING_FOLLOWED, EventFollow
from fp8watch.session.row_glance import glance
from fp8watch.session.site_registration import Rows, SiteRegistration
from fp8watch.session.sites import site_name
from fp8watch.session.standing_state import StandingState
from fp8watch.session.step_optimizer import FOUND_INF
from fp8watch.session.tile_map_flush import TileMapFlush
from fp8watch.session.window_merge import WindowMerge, steps_to_merge
from fp8watch.sketch.host_copy import HostCopies, HostCopy, side_by_side
from fp8watch.sketch.tile_cache import StepTiles, TileHistory
from fp8watch_agent.guard import Guard
from fp8watch_agent.nonfinite_names import NONFINITE_INPUT
from fp8watch_agent.record import ROW, STEP, STEP_SCALARS, StepStatus
from fp8watch_agent.recorder import Recorder

MAX_ON_THE_WAY = 8
"""Steps that wait for the device, after which the host waits for the oldest."""
PARAMETERS_EVERY = 64  # steps after which the list of parameters is made anew


@dataclass
class PendingStep:
    """What one step left, on its way."""

    step: int
    status: StepStatus
    time: float
    recorded: bool  # not paused
    batch_id: str | None
    numbers: dict[str, float]
    names: list[str]  # of the numbers that are on the device
    sample: StepSample  # what it looked at
    gradients: list[str]  # parameters whose gradients were looked at
    suspects: list[int]  # rows of Transformer Engine that may be broken
    experts: Calls | None  # whose rows its operands had
    vectors: list[int]  # rows with a vector over experts
    turns: tuple[dict[int, int], dict[int, int]]  # row -> expert whose codes, and whose product, had their turn
    parts: list[str]  # what the tensors of `copy` are
    tiles: StepTiles
    copy: HostCopy
    handed_over: bool = False


class StepMirror(Protocol):
    """Who is shown the rows of each step as well."""

    def see(self, step: int, rows: Rows) -> None:
        """They have arrived on the host."""

    def stop(self) -> None:
        """The watch ends."""


@dataclass
class StepFlush:
    """Takes what the steps of one watch leave, and hands it over when it has arrived on the host."""

    plan: ObservationPlan
    site_ids: Sequence[int]
    recorder: Recorder
    guard: Guard
    registration: SiteRegistration
    te: Any  # TeObserver | None
    model: nn.Module
    copies: HostCopies
    events: EventFollow
    maps: TileMapFlush
    merge: WindowMerge | None  # None: each step leaves by itself
    standing: StandingState
    names: Callable[[int], str]  # row -> "module.operand.direction"
    expert_names: Mapping[int, str] = field(default_factory=dict)  # row -> "module.operand.direction" of experts
    mirrors: list[StepMirror] = field(default_factory=list)  # are shown the rows of each step as well
    weights: npt.NDArray[np.bool_] | None = None  # [sites], which of them are weights
    checkpoints: CheckpointSteps = field(default_factory=CheckpointSteps)
    causal: CausalAttention = field(default_factory=CausalAttention)
    _ids: npt.NDArray[np.uint64] = field(init=False)
    _host_rows: Rows | None = None  # of a slab on the CPU, as they lie there; None: nobody has asked
    _on_the_way: deque[PendingStep] = field(default_factory=deque)
    _newest: int = -1  # the step that ended last; those before it may still be on their way
    _parameters: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    _num_taken: int = 0
    _left_there: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._ids = np.array(self.site_ids, dtype=np.uint64)

    # ---- the step ends ------------------------------------------------------------------------------------------

    def take(
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
        observing = recorded and not plan.step.outside
        parts: dict[str, Tensor] = {"rows": slab.buffer} if self.copies.late or not slab.is_cpu else {}
        numbers, waiting = self._split({**values, **plan.why.take()} if plan.why.on_the_way else values)
        names: list[str] = []
        if waiting and (one := self.guard.run("values", side_by_side, waiting)) is not None:
            names, parts["numbers"] = one
        gradients: list[str] = []
        if observing and plan.step.sample.any_outputs:
            began = plan.stopwatch.mark() if plan.stopwatch is not None else None
            gradients, found = self._gradients(slab.device, *plan.step.sample.gradients)
            try:
                if found:
                    parts["gradients"] = gradient_faults(found)
            except Exception as error:  # noqa: BLE001 - the step leaves without them, and the guard counts
                self.guard.swallow("gradients", error)
            if plan.stopwatch is not None:  # the end of a step is timed as fixed
                ended = plan.stopwatch.mark()
                plan.stopwatch.add(SAMPLING, began, ended)
                plan.stopwatch.add(FIXED, began, ended, -1)
        suspects: list[int] = []
        if self.te is not None and plan.step.sampled:
            self.te.end_step()
            suspects, counts = self.te.pop_suspects()
            if counts is not None:
                parts["suspects"] = counts
        experts = plan.experts.take() if self.expert_names else None
        if experts is not None and experts.tensor is not None:
            parts["experts"] = experts.tensor
        vectors, found_vectors = plan.experts.vectors.take() if self.expert_names else ([], None)
        if found_vectors is not None:
            parts["vectors"] = found_vectors
        self.registration.observed |= observing and plan.step.ran
        self._num_taken += 1
        self._newest = step
        left = PendingStep(
            step, status, time.time(), recorded, batch_id, numbers, names, plan.step.sample, gradients, suspects, experts, vectors, plan.experts.turns.take(), list(parts),
            plan.tiles.take(), self.copies.begin(*parts.values()),
        )  # fmt: skip
        self._on_the_way.append(left)
        self.drain()

    def _split(self, values: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Numbers that are here, and tensors that are still on the device. One that cannot be read here costs itself alone."""
        numbers: dict[str, float] = {}
        waiting: dict[str, Tensor] = {}
        for name, value in values.items():
            try:
                if not isinstance(value, Tensor):
                    numbers[name] = float(value)
                elif self.copies.late and value.device.type == self.copies.device.type:
                    waiting[name] = value.to(self.copies.device, non_blocking=True)
                elif value.device.type not in ("cpu", self.copies.device.type):
                    self._leave_there(name, value)
                elif type(value) is Tensor and value.numel() == 1:
                    numbers[name] = float(value.item())
                else:
                    whole = value.detach()
                    numbers[name] = float((whole.double() if whole.device.type == "cpu" else whole.float()).mean())
            except Exception as error:  # noqa: BLE001 - the step leaves without it, and the guard counts
                self.guard.swallow("values", error)
        return numbers, waiting

    def _leave_there(self, name: str, value: Tensor) -> None:
        """A number on another device than what is observed is not read, which would wait for it; said once of each."""
        if name not in self._left_there:
            self._left_there.add(name)
            here = self.copies.device.type
            self.registration.say(
                f"{name} is on {value.device} and what is observed on {here}: it is not recorded, reading it would wait for the device"
            )

    def _gradients(self, device: torch.device, part: int, parts: int) -> tuple[list[str], list[Tensor]]:
        """Names and gradients of one part of the parameters, of so many parts."""
        known = self._parameters
        if self._num_taken % PARAMETERS_EVERY == 0 or not known or all(p.grad is None for _, p in known):
            known = self._parameters = list(self.model.named_parameters())  # FSDP2 replaces them
        first, end = (-(-i * len(known) // parts) for i in (part, part + 1))
        return gradients_of(known[first:end], device)

    # ---- it has arrived -----------------------------------------------------------------------------------------

    def drain(self, *, wait: bool = False) -> None:
        """Hand over the steps that have arrived; with `wait` all of them, in bounded time."""
        while self._on_the_way:
            left = self._on_the_way[0]
            if wait and not left.copy.wait():
                self.guard.swallow("arrival", TimeoutError(f"step {left.step} did not come from the device"))
                self._on_the_way.clear()
                break
            if not wait and not left.copy.ready() and len(self._on_the_way) <= MAX_ON_THE_WAY:
                break
            try:
                self._hand_over(left, left.copy.tensors())
            finally:  # whatever failed: the next step is not held up by it
                if self._on_the_way and self._on_the_way[0] is left:
                    self._on_the_way.popleft()
                left.copy.release()
        self.maps.drain(wait=wait)

    def end(self) -> None:
        """Nothing follows: windows leave as they are, and each mirror tells what it has not told yet."""
        self.registration.stop()
        self._end_windows()
        while self.mirrors:
            self.mirrors.pop().stop()

    def _end_windows(self) -> None:
        if self.merge is not None:
            self._record_windows(*self.merge.rest())

    def _record_windows(self, sites: npt.NDArray[np.bool_], windows: Rows) -> None:
        """Windows that ended with the step that was recorded last."""
        if len(windows):
            self.recorder.record_more(self._ids[sites], windows)

    def _rows_here(self) -> Rows:
        """The rows of a slab on the CPU, where they are."""
        if self._host_rows is None:
            assert self.plan.slab is not None
            self._host_rows = self.plan.slab.rows_on_host()[: len(self._ids)]
        return self._host_rows

    def _hand_over(self, left: PendingStep, tensors: list[Tensor]) -> None:
        if left.handed_over:  # a signal came in between
            return
        left.handed_over = True
        parts = dict(zip(left.parts, tensors, strict=True))
        if "rows" in parts:
            rows: Rows = parts["rows"].numpy().reshape(-1).view(ROW)[: len(self._ids)]
        else:
            rows = self._rows_here()
        self.registration.see(rows, whole=left.status is not StepStatus.ABORTED)
        if not self.registration.known.all():  # nobody knows these sites, and for one of them a collector refuses all
            rows["measured"][~self.registration.known] = 0
        numbers = left.numbers
        if "numbers" in parts:
            numbers.update(zip(left.names, parts["numbers"].tolist(), strict=True))
        self.standing.named(numbers)
        self.causal.only_news(numbers)
        if self.plan.why.kinds:
            self.guard.run("why", self.plan.why.arrived, numbers)
        if "gradients" in parts and any(faults := parts["gradients"].tolist()):
            numbers.update(named_gradients(left.gradients, faults))
        if any(left.turns):
            numbers.update(self.guard.run("experts", named_turns, *left.turns, rows, self.expert_names) or {})
        if left.experts is not None:
            first_rows = parts["experts"].numpy() if "experts" in parts else np.empty(0, np.int64)
            numbers.update(
                self.guard.run("experts", named_experts, left.experts, first_rows, rows, self.expert_names) or {}
            )
        if self.plan.why.late or self.plan.why.found:
            numbers.update(self.guard.run("why", self.plan.why.told, rows, self.names) or {})
        if (scale := numbers.get("loss_scale", 1.0)) > 0 and scale != 1.0:  # gradients were as much larger
            rows["impact_energy"] /= scale**2
        if numbers.pop(FOUND_INF, 0.0) and left.status == StepStatus.OK:
            left.status = StepStatus.SKIPPED
        if not left.recorded:
            self._end_windows()
            return
        seen, look = glance(rows), self.events.look
        followed = self.guard.run("jumps", look, left.step, self._newest, rows, seen, numbers) or NOTHING_FOLLOWED
        nan_weight = seen.any_broken and self.weights is not None and weights_broken(rows, self.weights)
        self.checkpoints.arrived(left.step, left.status, broken=self.events.is_broken, broken_weights=nan_weight)
        records, ids = rows, self._ids
        if self.merge is not None:
            calm = self.events.calm() if left.status == StepStatus.OK else None
            in_burst = left.step <= self.events.follow.burst_until
            leaves, records, before, windows = self.merge.leaving(left.step, rows, calm, in_burst=in_burst)
            ids = ids[leaves]
            self._record_windows(before, windows)
        elif not seen.all_there:
            # what was measured leaves, between samples too: then without energies, moments and depth
            leaves = rows["measured"] != 0
            records, ids = rows[leaves], ids[leaves]
        logs = {k: v for k, v in numbers.items() if k not in STEP_SCALARS and (v or not k.startswith(NONFINITE_INPUT))}
        vectors = None
        if "vectors" in parts:
            flat = parts["vectors"].numpy()
            vectors = self.guard.run("experts", self.plan.experts.vectors.vectors, left.vectors, flat, self.site_ids)
        more = {"experts": vectors} if vectors else {}
        self.recorder.record_step(_header(left, numbers), ids, records, logs, left.batch_id, **more)
        for mirror in self.mirrors:
            self.guard.run("mirror", mirror.see, left.step, rows)
        if followed.jumped:
            self.recorder.hurry()
        counts = parts["suspects"].tolist() if "suspects" in parts else []
        suspects = {row for row, num in zip(left.suspects, counts, strict=False) if num}
        self.maps.capture(left.step, left.sample, rows, left.tiles, seen, suspects, followed)


_HEADER = struct.Struct(f"<qBBd{len(STEP_SCALARS)}d")  # as STEP; numpy takes as long for each of its fields
_SCALARS = [(name, int(bit)) for name, bit in STEP_SCALARS.items()]


def _header(left: PendingStep, numbers: Mapping[str, float]) -> np.ndarray[Any, Any]:
    present, values = 0, [0.0] * len(_SCALARS)
    for at, (name, bit) in enumerate(_SCALARS):
        if name in numbers:
            values[at] = numbers[name]
            present |= bit
    return np.frombuffer(_HEADER.pack(left.step, left.status, present, left.time, *values), dtype=STEP).reshape(())


def step_flush(
    attachment: Attachment,
    plan: ObservationPlan | None,
    recorder: Recorder | None,
    cadence: Cadence,
    session: Session,
    standing: StandingState,
) -> StepFlush | None:
    """What takes the steps of this session; None where nothing is recorded."""
    if plan is None or plan.slab is None or recorder is None:
        return None
    ids = [site.site_id for site in attachment.table]
    plan.tiles.keeps_one = cadence.tile_maps[0] != "triggered"
    expert_names = {row: site_name(attachment.table[row]) for row in plan.experts.num_experts}
    copies, registration = HostCopies(plan.slab.device), SiteRegistration(attachment, plan, recorder, session.say)
    maps = TileMapFlush(ids, recorder, plan.tiles, copies, TileHistory(TILE_BYTES // 4))
    identity = session.identity
    steps = steps_to_merge(cadence.merge_steps, identity.world_size)
    merge = None
    if steps > 1:
        merge = WindowMerge(len(ids), steps, identity.rank)
        recorder.update_facts({"merge_steps": steps})
    table, of_state = attachment.table, weakref.ref(standing)  # which holds the model: the plan must not
    plan.why.late = copies.late
    plan.why.scales_before = lambda row: _scales_before(maps.history, row)
    plan.why.update_of = lambda row: _update_of(of_state(), table[row].fqn)
    return StepFlush(
        plan, ids, recorder, session.guard, registration, attachment.te, attachment.model, copies,
        EventFollow(len(ids)), maps, merge, standing, lambda row: site_name(table[row]), expert_names,
        weights=np.array([site.operand == "weight" for site in attachment.table], dtype=bool),
    )  # fmt: skip


def _scales_before(history: TileHistory, row: int) -> Tensor | None:
    """scale_inv of a row in the last step that is known."""
    known = history.before(1 << 62, row)
    return known[-1][1].scale_inv if known else None


def _update_of(standing: StandingState | None, module: str) -> Tensor | None:
    if standing is None:
        return None
    found = standing.update_of(f"{module}.weight")
    return standing.update_of(module) if found is None else found
