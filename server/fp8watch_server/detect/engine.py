"""Batches in, findings out: runs the detectors over each step and tells causes from their consequences.

Upstream:   fp8watch_server.ingest           Downstream: fp8watch_server.incidents.fold
Shapes:     wire.Batch -> list[Finding]
Thread:     detect worker, one Engine per run; not shared between threads

Detectors see whole columns; a healthy batch costs a few numpy calls, and per step only the growth of the weights. One
`stream` per session (one attach of one process, so one rank): its order of steps, its baselines, its last cause.
Steps that come late or again are judged by the invariants, which need no past, and left out of everything that does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fp8watch_agent.record import Measured
from fp8watch_agent.wire import Batch

from . import degenerate, invariant, nonfinite
from .finding import NONFINITE_MODES, Evidence, Finding, SiteFacts
from .trend import Divergence
from .view import WEIGHT, BatchColumns, Mask, SiteTable, StepView

CONSEQUENCE_STEPS = 6
"""Observed steps for which a cause answers for what follows it."""
AFTER_INVARIANT_STEPS = 20
"""Observed steps after a broken quantiser in which growth of the weights is its consequence, not a cause."""
NO_LOSS_STEPS = 20
LIVE_RANK_STEPS = 200
"""A rank this far behind the newest is gone, and holds nobody up."""
_REMEMBERED_BATCHES = 4096


@dataclass
class _Stream:
    """What is remembered of one session."""

    rank: int
    zero_tiles: degenerate.ZeroTiles
    divergence: Divergence
    num_steps: int = 0  # observed, in order
    last_step: int | None = None
    stride: int = 1
    apart: int = 1  # steps between the last two observed
    cause: Finding | None = None  # the last cause of non-finite values or of divergence
    cause_seen: int = -(1 << 40)  # num_steps when it or a consequence was last seen
    invariant_seen: int = -(1 << 40)
    loss_seen: int | None = None  # num_steps of the last loss
    cause_step: int = 0  # the step in which the cause or a consequence was last seen
    last_seq: int = -1
    heard: int = 0  # Engine._num_batches when its last batch came
    seqs: OrderedDict[int, None] = field(default_factory=OrderedDict)


class Engine:
    """The detectors of one run. Pure: no database, no clock; the same batches give the same findings."""

    def __init__(self, sites: Mapping[int, SiteFacts]) -> None:
        self._table = SiteTable(sites)
        self._streams: dict[str, _Stream] = {}
        self._num_batches = 0
        self._restarted = 0  # _num_batches when a rank last came back with a new session

    def add_sites(self, sites: Mapping[int, SiteFacts]) -> None:
        """Sites that were registered, or whose facts changed, since the engine was made."""
        if all(self._table.sites.get(i) == f for i, f in sites.items()):
            return
        old = self._table
        self._table = SiteTable({**old.sites, **sites})
        source = old.rows(self._table.ids)
        weights = self._weight_ids()
        for stream in self._streams.values():
            stream.zero_tiles.remap(source)
            stream.divergence.remap(weights)

    @property
    def sites(self) -> Mapping[int, SiteFacts]:
        """Facts of every site that the engine knows."""
        return self._table.sites

    @property
    def settled_step(self) -> int | None:
        """The last step that every live rank has delivered: what `close_quiet` may count clean steps up to."""
        newest = {s.rank: s for s in self._streams.values()}  # of each rank, the session that came last
        # Where a rank has restarted, what the others said before is of the attempt that ended: it may be far ahead.
        last = [s.last_step for s in newest.values() if s.last_step is not None and s.heard >= self._restarted]
        if not last:
            return None
        return min(step for step in last if step >= max(last) - LIVE_RANK_STEPS * self.stride)

    @property
    def stride(self) -> int:
        """Steps between observed steps: `every` of the agent."""
        return max((s.stride for s in self._streams.values()), default=1)

    def observe(self, batch: Batch) -> list[Finding]:
        """Judge one batch. A batch that was seen already gives nothing."""
        self._num_batches += 1
        stream = self._stream(batch)
        if self._went_back(stream, batch):
            stream = self._begin(batch, seqs=stream.seqs)
        stream.heard = self._num_batches
        stream.last_seq = max(stream.last_seq, batch.header.seq)
        if batch.header.seq in stream.seqs:
            return []
        stream.seqs[batch.header.seq] = None
        if len(stream.seqs) > _REMEMBERED_BATCHES:
            stream.seqs.popitem(last=False)
        columns = BatchColumns(batch, self._table)
        bad_scale = degenerate.degenerate(columns)
        below, above = invariant.off_scale(columns)
        found: list[Finding] = []
        for view in columns.views():
            found += self._step(stream, view, bad_scale[view.part], below[view.part], above[view.part])
        return found

    def _weight_ids(self) -> Any:
        return self._table.ids[self._table.role == WEIGHT]

    def _stream(self, batch: Batch) -> _Stream:
        stream = self._streams.get(batch.header.session)
        if stream is None:
            # The session before stays, for its late batches; those before it say no more.
            same_rank = [name for name, other in self._streams.items() if other.rank == batch.header.rank]
            for name in same_rank[:-1]:
                del self._streams[name]
            stream = self._begin(batch, seqs=OrderedDict(), restarted=bool(same_rank))
        return stream

    def _begin(self, batch: Batch, seqs: OrderedDict[int, None], restarted: bool = True) -> _Stream:
        """A stream without a past: of a new session, or of one that went back to an earlier step."""
        if restarted:
            self._restarted = self._num_batches
        made = self._streams[batch.header.session] = _Stream(
            rank=batch.header.rank,
            zero_tiles=degenerate.ZeroTiles(len(self._table.ids)),
            divergence=Divergence(self._weight_ids()),
            seqs=seqs,
        )
        return made

    @staticmethod
    def _went_back(stream: _Stream, batch: Batch) -> bool:
        """Whether training loaded an earlier checkpoint in place. A batch that comes late has an earlier seq."""
        if stream.last_step is None or not len(batch.steps) or batch.header.seq <= stream.last_seq:
            return False
        return int(batch.steps["step"][0]) < stream.last_step

    def _step(self, stream: _Stream, view: StepView, bad_scale: Mask, below: Mask, above: Mask) -> list[Finding]:
        in_order = stream.last_step is None or view.step > stream.last_step
        if in_order:
            if stream.last_step is not None:
                apart = view.step - stream.last_step
                if stream.num_steps == 1 or apart == stream.apart:  # one gap is a gap, two alike are the sampling
                    stream.stride = apart
                stream.apart = apart
            stream.last_step = view.step
            stream.num_steps += 1
        if view.scalar("loss") is not None:
            stream.loss_seen = stream.num_steps
        found: list[Finding] = []
        broken = bool(view.nonfinite.any()) or bool(bad_scale.any()) or nonfinite.loss_is_broken(view)
        if broken:
            cause = nonfinite.examine(view, bad_scale, stream.zero_tiles)
            if cause is not None:
                found.append(self._as_cause_or_consequence(stream, cause, in_order))
        if below.any() or above.any():
            off = invariant.examine(view, below, above, ~bad_scale)
            found += off
            stream.invariant_seen = stream.num_steps if off else stream.invariant_seen
        if in_order and len(view):
            recent = stream.num_steps - stream.cause_seen <= CONSEQUENCE_STEPS
            poisoned = recent and stream.cause is not None and stream.cause.mode in NONFINITE_MODES
            clean = not broken and not poisoned and stream.num_steps - stream.invariant_seen > AFTER_INVARIANT_STEPS
            if broken or poisoned:
                stream.divergence.forget()
            else:
                stream.zero_tiles.learn(view)
                growth = stream.divergence.observe(view, clean=clean)
                if growth is not None:
                    found.append(growth)
                    stream.cause, stream.cause_seen, stream.cause_step = growth, stream.num_steps, view.step
        return [self._with_context(stream, view, f) for f in found]

    def _as_cause_or_consequence(self, stream: _Stream, found: Finding, in_order: bool) -> Finding:
        """A cause keeps its name; what follows from a cause that is known is reported under that cause's name."""
        cause, since = stream.cause, stream.num_steps - stream.cause_seen
        if not in_order:  # it came late, or training went back: the steps themselves say how far they are apart
            since = max(since, abs(found.step - stream.cause_step) // stream.stride)
        follows = cause is not None and since <= CONSEQUENCE_STEPS and _follows(cause, found, since)
        stream.cause_seen, stream.cause_step = stream.num_steps, found.step
        if cause is None or not follows:
            if cause is None or since > CONSEQUENCE_STEPS or cause.mode != found.mode:
                stream.cause = found
            return found
        return replace(
            cause,
            step=found.step,
            evidence=(Evidence("nonfinite_sites", found.extra["num_sites"], 0, "sites", found.step),),
            extra={**found.extra, "sites": [*_named(cause), *found.extra["sites"]], "consequence": True},
        )

    def _with_context(self, stream: _Stream, view: StepView, found: Finding) -> Finding:
        seen = stream.loss_seen is not None and stream.num_steps - stream.loss_seen < NO_LOSS_STEPS
        context = {
            "consequence": False,
            "weight_born": False,
            **found.extra,
            "loss_seen": seen,
            "loss_given": view.scalar("loss") is not None,
            "stride": stream.stride,
            "status": view.status,
            "batch_id": view.batch_id,
            "operands_measured": bool(np.any(view.has(Measured.COUNTS))) if len(view) else False,
        }
        return replace(found, extra=context)


def _named(cause: Finding) -> list[int]:
    return [] if cause.site is None else [cause.site]


def _follows(cause: Finding, found: Finding, since: int) -> bool:
    """Whether `found`, `since` observed steps after `cause` was last seen, is its consequence.

    Weights change only by an update, so non-finite weights come from an earlier step. A cause that made NaN keeps
    making it in the steps right behind; laundered Infs do not, so what comes after them stands alone unless the weights
    tell.
    """
    if found.extra.get("weight_born"):
        return True
    if found.mode == cause.mode or found.mode == "zero-tile-eps":
        return False
    if cause.mode == "optimizer-divergence":
        return True
    return cause.mode != "inf-laundering" and since <= 1
