"""Batches in, findings out: runs the detectors over each step and tells causes from their consequences.

Upstream:   fp8watch_server.pipeline.detect_worker (wired in fp8watch_server.app)
Downstream: fp8watch_server.incidents.fold (wired in fp8watch_server.app)
Shapes:     wire.Batch -> list[Finding]
Thread:     detect worker, one Engine per run; not shared between threads

Two halves. Invariants judge every record of every rank as it comes, whatever the order: no past, no warm-up, a few
numpy calls for a healthy batch. Statistics judge the roll-up over ranks, once a step and in order (`assemble`).
Steps that come late or again are judged by the invariants, and left out of everything that needs a past.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fp8watch_agent.record import Measured
from fp8watch_agent.wire import Batch
from fp8watch_server.detect import state
from fp8watch_server.detect.cross_rank_step import CrossRankStep
from fp8watch_server.detect.families import degenerate, gain, invariant, kernel_output, nonfinite, unobserved
from fp8watch_server.detect.families.replica_consistency import Agreement
from fp8watch_server.detect.finding import Finding, Notice, SiteFacts
from fp8watch_server.detect.judged_step import JudgedStep
from fp8watch_server.detect.modes import STEP_CHECKS
from fp8watch_server.detect.modes.recipe_mismatch.scale_history import ScaleHistory
from fp8watch_server.detect.modes.two_jobs_one_run.detector import TwoJobs
from fp8watch_server.detect.precedence import SPREADING
from fp8watch_server.detect.rank_progress import RankProgress
from fp8watch_server.detect.registered_facts import Registry, merge
from fp8watch_server.detect.sample_gaps import SampleGaps
from fp8watch_server.detect.session_state import Attempt, Stream
from fp8watch_server.detect.sessions import SessionFacts
from fp8watch_server.detect.statistics import Statistics, complete
from fp8watch_server.detect.step_alignment import LIVE_RANK_STEPS, Assembly
from fp8watch_server.detect.step_view import BatchColumns, Mask, SiteTable, StepView
from fp8watch_server.detect.tallies import Seen
from fp8watch_server.detect.thresholds import DEFAULTS, Thresholds

_STATE = (
    "_registry",
    "_scales",
    "_agreement",
    "_streams",
    "_num_batches",
    "_restarted",
    "_attempt",
    "_statistics",
    "_assembly",
    "_rhythm",
    "_samples",
)
_LATER = {"_samples", "_attempt"}
"""Parts that a state of an earlier version does not hold: they begin anew."""
LIGHT = "amax_max"  # a field that each observed step has
REMEMBERED_GAPS = 20
_MAX_NOTICES = 1000


class DetectionEngine:
    """The detectors of one run. Pure: no database, no clock; the same batches give the same findings."""

    def __init__(self, sites: Mapping[int, SiteFacts], thresholds: Thresholds = DEFAULTS) -> None:
        self.thresholds = thresholds
        self._table = SiteTable()
        self._registry = Registry()
        self._scales = ScaleHistory()
        self._agreement = Agreement()
        self._streams: dict[str, Stream] = {}
        self._progress = RankProgress()
        self._num_batches = 0
        self._restarted = 0  # _num_batches when an attempt last began
        self._attempt = Attempt()
        self._statistics = Statistics(0, thresholds)
        self._assembly: Assembly[JudgedStep] = self._new_assembly()
        self._notices: list[Notice] = []
        self._samples = SampleGaps()
        self._two_jobs = TwoJobs()
        self._rhythm: dict[str, tuple[int | None, list[int]]] = {}  # field -> last step with it, gaps between the last
        self.add_sites(sites)

    def _new_assembly(self) -> Assembly[JudgedStep]:
        limit = self.thresholds
        return Assembly(limit.late_rank_s, limit.heartbeat_s * limit.missing_heartbeats)

    # ---- what is registered

    def add_sites(self, sites: Mapping[int, SiteFacts]) -> None:
        """Sites that were registered, or whose facts changed, since the engine was made."""
        news = {i: f for i, f in sites.items() if self._table.sites.get(i) != f}
        if not news:
            return
        self._registry.add_sites(self._table.sites, news)
        changed = [i for i in news if i in self._table.sites]
        self._table.add(news)
        for stream in self._streams.values():
            stream.zero_tiles.grow(len(self._table))
        self._statistics.grow(len(self._table))
        if changed:
            self._statistics.forget(self._table.rows(np.array(changed, dtype=np.uint64)))

    def add_sessions(self, sessions: Iterable[SessionFacts]) -> None:
        """Sessions of the run, new ones and known ones: their facts are compared, their ranks waited for."""
        for facts in sorted(sessions, key=lambda f: (f.attempt, f.rank)):
            if self._registry.add_session(facts):
                self._agreement.session(facts)
                if facts.attempt == self._registry.attempt:
                    self._assembly.expect(facts.rank, facts.world_size)

    @property
    def sites(self) -> Mapping[int, SiteFacts]:
        """Facts of every site that the engine knows."""
        return self._table.sites

    # ---- where it stands

    @property
    def delivered_step(self) -> int | None:
        """The last step that every live rank has delivered: what `close_quiet` may count clean steps up to."""
        settled, judged, waits = self._progress.settled, self._assembly.last_step, self._assembly.first_pending
        known = [judged] if judged is not None else [] if waits is None else [waits - 1]
        return min([settled, *known]) if settled is not None else None

    @property
    def settling(self) -> bool:
        """Whether steps wait for ranks that come: what is dumped lacks them."""
        return self._assembly.settling

    @property
    def stride(self) -> int:
        """Steps between observed steps: `every` of the agent."""
        return self._progress.stride

    def take_notices(self) -> list[Notice]:
        """What happened since the last call that is worth a line and no fault."""
        out, self._notices = self._notices + self._progress.take_left_out(), []
        return out

    # ---- what comes

    def observe(self, batch: Batch, at: float | None = None) -> list[Finding]:
        """Judge one batch. A batch that was seen already gives nothing.

        Args:
            at: when it came, by the collector's clock; lets steps go on that wait for a late rank.
        """
        self._num_batches += 1
        header = batch.header
        found: list[Finding] = []
        stream = self._streams.get(header.session)
        if stream is None:
            stream, found = self._begin_session(batch)
        elif self._went_back(stream, batch):
            self._note(
                "rewind", int(batch.steps["step"][0]), header.rank, f"training went back from {stream.last_step}"
            )
            stream, found = self._begin_again(batch, stream.seen, stream)
        stream.heard = self._num_batches
        stream.last_seq = max(stream.last_seq, header.parent_seq)
        ended, keeps = (bool(header.health.get(name)) for name in ("ended", "spooled"))
        self._assembly.heard(header.rank, at, ended=ended, keeps=keeps)
        newest = self._progress.is_newest(header.session, header.rank)
        self._progress.heard(header.session, stream)
        if not stream.seen.add(header.seq):
            return found + self._drain()
        two = self._two_jobs.observe(batch, at, self._registry.sessions, newest=newest)
        found += [f for f in two if f.mode not in self.thresholds.disabled]
        columns = BatchColumns(batch, self._table)
        bad_scale = degenerate.degenerate(columns)
        below, above = invariant.off_scale(columns)
        for view in columns.views():
            again = view.step == stream.last_step or header.seq != header.parent_seq
            judged, of_step = self._step(stream, view, bad_scale[view.part], below[view.part], above[view.part])
            found += of_step
            self._progress.heard(header.session, stream)
            if not self._belongs(stream, view):
                continue
            if self._assembly.add(judged):
                found += self._drain()
            elif not again:
                self._progress.left_out(header.session, view.rank, view.step)
        return found + self._drain()

    def tick(self, now: float) -> list[Finding]:
        """The collector's clock moved on and nothing came: what waited for a late rank goes on."""
        self._assembly.tick(now)
        return self._drain()

    # ---- across restarts of the collector

    def dump(self) -> bytes:
        """The whole state: what `load` goes on from. What came of steps that wait for a rank is left out."""
        return state.dump({name: getattr(self, name) for name in _STATE} | {"sites": self._table.facts})

    @classmethod
    def load(cls, raw: bytes, sites: Mapping[int, SiteFacts], thresholds: Thresholds = DEFAULTS) -> DetectionEngine:
        """The engine that `dump` was called on; `sites` are those of now.

        Raises:
            StateError: of another version, or damaged: begin anew and replay.
        """
        parts = state.load(raw)
        engine = cls({f.id: f for f in parts.pop("sites")}, thresholds)
        if not set(_STATE) - _LATER <= set(parts) <= set(_STATE):
            raise state.StateError(f"state with {sorted(parts)}; this version keeps {sorted(_STATE)}")
        for name, part in parts.items():
            setattr(engine, name, part)
        engine._statistics.adopt(thresholds)
        complete(engine._agreement, Agreement())
        engine._assembly.adopt(engine._new_assembly())
        engine._progress = RankProgress.of(engine._streams, engine._restarted)
        engine.add_sites(sites)
        return engine

    def _note(self, kind: str, step: int, rank: int, text: str) -> None:
        if len(self._notices) < _MAX_NOTICES:
            self._notices.append(Notice(kind, step, rank, text))

    # ---- sessions

    def _begin_session(self, batch: Batch) -> tuple[Stream, list[Finding]]:
        rank = batch.header.rank
        # The session before stays, for its late batches; those before it say no more.
        same_rank = list(self._progress.sessions(rank))
        for name in same_rank[:-1]:
            del self._streams[name]
            self._progress.forget(name, rank)
        step = int(batch.steps["step"][0]) if len(batch.steps) else 0
        if same_rank:
            last = self._streams[same_rank[-1]].last_step
            self._note("restart", step, rank, f"a new session of rank {rank} at step {step}; the last ended at {last}")
        number, newest = (self._registry.attempt_of(name) for name in (batch.header.session, *same_rank[-1:], "")[:2])
        if same_rank and 0 < number < newest:  # of an attempt before, heard for the first time
            return self._begin(batch, Seen(), None, newest=False), []
        return self._begin_again(batch, Seen(), self._streams[same_rank[-1]] if same_rank else None, number)

    def _begin_again(
        self, batch: Batch, seen: Seen, before: Stream | None, number: int = 0
    ) -> tuple[Stream, list[Finding]]:
        """A rank begins, or begins again: with the attempt that is on, or as the first of a new one."""
        found: list[Finding] = []
        step = int(batch.steps["step"][0]) if len(batch.steps) else None
        if before is not None and not self._attempt.is_joined_at(
            step, number, took_part=before.attempt == self._restarted, within=LIVE_RANK_STEPS * self.stride
        ):
            found, self._attempt = self._restart(step), Attempt(step, number)
        return self._begin(batch, seen, before), found

    def _begin(self, batch: Batch, seen: Seen, before: Stream | None, *, newest: bool = True) -> Stream:
        """A stream without a past: of a new session, or of one that went back to an earlier step."""
        tiles, attempt = degenerate.ZeroTiles(len(self._table)), 0 if before is None else self._restarted
        made = self._streams[batch.header.session] = Stream(batch.header.rank, tiles, seen=seen, attempt=attempt)
        self._progress.begin(batch.header.session, made, newest=newest)
        return made

    def _restart(self, step: int | None) -> list[Finding]:
        """An attempt ends: its last steps are judged as they are."""
        found = [f for group in self._assembly.restart() for f in self._roll_up(group)]
        self._restarted = self._num_batches
        self._progress.restart()
        for rank in self._registry.ranks():
            self._assembly.expect(rank)
        self._resume(step)
        self._scales.restart()
        self._rhythm = {name: (None, gaps) for name, (_, gaps) in self._rhythm.items()}
        self._samples.restart()
        return found

    def _resume(self, step: int | None) -> None:
        """Baselines continue where training does: from about the step at which it ended. From far before they begin anew."""
        before = self._statistics
        if before.continues_at(step):
            before.resume()
        else:
            self._statistics = Statistics(len(self._table), self.thresholds)

    @staticmethod
    def _went_back(stream: Stream, batch: Batch) -> bool:
        """Whether training loaded an earlier checkpoint in place. A batch that comes late has an earlier seq."""
        if stream.last_step is None or not len(batch.steps) or batch.header.parent_seq <= stream.last_seq:
            return False
        return int(batch.steps["step"][0]) < stream.last_step

    def _belongs(self, stream: Stream, view: StepView) -> bool:
        """Whether a step is of the attempt that is on: not a late one of a session from before the restart."""
        if self._streams[self._progress.sessions(stream.rank)[-1]] is not stream:
            return False
        last = self._assembly.last_step
        if last is None or stream.attempt == self._restarted:
            return True
        near = abs(view.step - last) <= LIVE_RANK_STEPS * self.stride
        stream.attempt = self._restarted if near else stream.attempt  # a rank that goes on
        return near

    # ---- invariants, rank by rank

    def _step(
        self, stream: Stream, view: StepView, bad_scale: Mask, below: Mask, above: Mask
    ) -> tuple[JudgedStep, list[Finding]]:
        last = stream.last_step
        in_order = stream.advance(view.step)
        if not in_order and view.step != last:  # more of the last step is no other step
            self._note("late", view.step, view.rank, f"step {view.step} came after step {last}")
        if view.scalar("loss") is not None:
            stream.loss_seen = stream.num_steps
        found = self._registry.findings(view.step, view.rank, view.columns.batch.header.session, self._table)
        outputs = kernel_output.faulty_outputs(view)
        nothing_wrong = not (view.nonfinite.any() or bad_scale.any() or outputs.any())
        broken = not nothing_wrong or nonfinite.loss_is_broken(view)
        if broken:
            cause = nonfinite.examine(view, bad_scale, outputs, stream.zero_tiles)
            if cause is not None:
                cause = unobserved.with_unobserved(cause, self._table, self._registry.facts(view.rank))
                found.append(stream.as_cause_or_consequence(cause, in_order))
        stream.note_norm(view)
        if below.any() or above.any():
            off = invariant.examine(
                view, below, above, ~bad_scale & ~gain.rescaled(view, self.thresholds.destroyed_gain)[1]
            )
            found += off
            stream.invariant_seen = stream.num_steps if off else stream.invariant_seen
        found += [f for check in STEP_CHECKS for f in check(view, self.thresholds)]
        if (poisoned_checkpoint := stream.poisoned_checkpoint(view)) is not None:
            found.append(poisoned_checkpoint)
        poisoned = broken or stream.poisoned
        if in_order and not poisoned and len(view):
            stream.zero_tiles.learn(view)
        found = [f for f in merge(found) if f.mode not in self.thresholds.disabled]
        judged = JudgedStep(view, stream.quantiser_is_sound, poisoned, tuple(found))
        apart = (self._apart(f) if f.extra.get("sampled") else stream.stride for f in found)
        return judged, [self._with_context(f, view, (stream,), each) for f, each in zip(found, apart, strict=True)]

    # ---- statistics, over all ranks

    def _drain(self) -> list[Finding]:
        return [f for group in self._assembly.ready() for f in self._roll_up(group)]

    def _roll_up(self, group: list[JudgedStep]) -> list[Finding]:
        views = [j.view for j in group]
        now = CrossRankStep(views, self._table)
        poisoned = any(j.poisoned for j in group)
        sample = self._statistics.sample(now, poisoned=poisoned)
        self._follow_samples(now, now if sample is None else sample)
        found = self._agreement.observe(now)
        resumed = self._scales.observe(now, self.thresholds.resume_scale_octaves)
        found += [resumed] if resumed is not None else []
        roots = [f for j in group for f in j.roots] + [f for f in found if f.severity != "info"]
        found += self._statistics.observe(
            now, sample, roots, clean=all(j.clean for j in group), poisoned=poisoned, stride=self._light_apart()
        )
        found = [f for f in found if f.mode not in self.thresholds.disabled]
        streams = [s for s in self._streams.values() if s.rank in now.ranks]
        for f in found:
            if f.mode in SPREADING and f.severity != "info":
                for stream in streams:
                    stream.note_cause(f)
        return [self._with_context(f, views[0], streams, self._apart(f)) for f in found]

    def _follow_samples(self, now: CrossRankStep, whole: CrossRankStep) -> None:
        """Steps between those in which a field was measured: windows of incidents count these."""
        self._samples.observe(now.step, now.views, len(now))
        if np.count_nonzero(~np.isnan(whole.column(LIGHT))) * 2 >= len(now):
            last, gaps = self._rhythm.get(LIGHT, (None, []))
            self._rhythm[LIGHT] = now.step, gaps if last is None else [*gaps, now.step - last][-REMEMBERED_GAPS:]

    def _light_apart(self) -> int:
        """Steps between those in which most sites were measured."""
        gaps = self._rhythm.get(LIGHT, (None, []))[1]
        return max(self.stride, gaps[-1] if gaps else 1)

    def _apart(self, found: Finding) -> int:
        """Steps between the samples that a finding rests on: those of its site, where they go round."""
        sampled = found.extra.get("sampled")
        if not sampled or found.site is None:
            return self._light_apart()
        rows = self._table.rows(np.array([found.site], dtype=np.uint64))
        return max(self._light_apart(), self._samples.of(sampled, rows[rows >= 0]))

    def _with_context(self, found: Finding, view: StepView, streams: Iterable[Stream], stride: int) -> Finding:
        context: dict[str, Any] = {
            "consequence": False,
            "weight_born": False,
            **found.extra,
            **self._registry.context(found, self._table),
            "loss_seen": any(s.sees_loss() for s in streams),
            "loss_given": view.scalar("loss") is not None,
            "stride": max(stride, int(found.extra.get("apart", 1))),
            "status": view.status,
            "batch_id": found.extra.get("jump_batch_id") or view.batch_id,
            "operands_measured": bool(np.any(view.has(Measured.COUNTS))) if len(view) else False,
        }
        rows = self._table.rows(np.array([] if found.site is None else [found.site], dtype=np.uint64))
        context |= self._samples.not_before(found.step, found.extra, rows)
        destroyed = invariant.destroyed(view, rows, self.thresholds.destroyed_sqnr_db)
        worse = found.severity == "warning" and destroyed  # whatever explains it
        return replace(found, extra=context, severity="critical" if worse else found.severity)
