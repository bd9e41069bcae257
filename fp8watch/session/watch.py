"""The handle that attach returns: closes steps, hands them to the agent, and takes itself away again.

Shapes:     slab rows [sites] of ROW, once a step
Thread:     training
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp8watch.layers import custom_ops
from fp8watch.layers.attention_calls import logits_summary
from fp8watch.layers.fp8_linear import SITE_KEY, release
from fp8watch.layers.module_hooks import ForwardBegins, LossHook
from fp8watch.observer.pass_counter import graph_task
from fp8watch.session import card, step_boundary
from fp8watch.session.attachment import Attachment, Cadence, Removable, Session
from fp8watch.session.checkpoint_hooks import holds_weights
from fp8watch.session.checkpoint_load import CheckpointLoad
from fp8watch.session.checkpoint_state import load_scale_state, resume_facts, resume_state, scale_state
from fp8watch.session.checkpoint_steps import CheckpointSteps
from fp8watch.session.fingerprint import Fingerprint, fingerprint, moments_fingerprint
from fp8watch.session.gradient_norm import GradientNorm
from fp8watch.session.nested_steps import ALONE, Nesting
from fp8watch.session.optimizer_looks import OptimizerLooks
from fp8watch.session.overhead_budget import Overhead
from fp8watch.session.precision_map import LATE, late_facts
from fp8watch.session.replaced_modules import CHECK_EVERY, FIRST_CHECKS, ReplacedModules
from fp8watch.session.sites import first_rows
from fp8watch.session.step_cycle import StepCycle
from fp8watch.session.step_flush import step_flush
from fp8watch.session.step_optimizer import NO_STEP_ENDED, STUCK_FACT, StepOwner, at_forward, optimizer_scalars
from fp8watch.session.step_scalars import StepScalars
from fp8watch_agent.record import StepStatus


class Watch:
    """Observes one model. Made by `fp8watch.attach`; a context manager that detaches at the end.

    None of its methods raises into training once attached: what goes wrong inside is counted, see `summary()`.
    """

    def __init__(self, attachment: Attachment, session: Session, cadence: Cadence) -> None:
        self._attachment, self.te = attachment, attachment.te
        self._model, self._plan, self._table = attachment.model, attachment.plan, attachment.table
        self._recorder = attachment.recorder
        self.guard, self._recipe, self.identity = session.guard, session.recipe, session.identity
        self.session, self.url, self._say, self._collector = session.id, session.url, session.say, session.collector
        in_turns = self._plan is not None and self._plan.as_they_are
        self._overhead = Overhead(cadence.every, cadence.overhead_budget, session.say, in_turns=in_turns)
        as_they_are = [m.module for m in self.te.modules] if self.te is not None else ()
        self._owner = StepOwner(self._model, as_they_are, cadence.optimizers, session.say)
        standing = OptimizerLooks(self._model, self._plan if self._recorder is not None else None, self._table)
        self._scalars = StepScalars(session.guard, session.say, GradientNorm(self._model, self._owner.has), standing)
        self._on_targets, self._on_loss = self._scalars.batches.see_targets, self._scalars.see_loss
        self._on_clip = self._scalars.norms.see
        self._late = partial(late_facts, self._model, self._owner, self._plan, standing)
        self._owns, self._ending, self._paused, self._stuck = self._owner.owns, False, False, ""
        self._hooks: list[Removable] = list(attachment.hooks)
        plan, recorder, self._detached = self._plan, self._recorder, self._plan is None
        if plan is not None and (recorder is not None or plan.step.warming):
            hook = LossHook(self, custom_ops.site_tensor(plan, 0), plan, self._scalars.batches)
            self._hooks.append(self._model.register_forward_pre_hook(ForwardBegins(self._scalars.batches)))
            self._hooks.append(self._model.register_forward_hook(hook, with_kwargs=True))
            step_boundary.start(self)
        self._flush = step_flush(attachment, plan, recorder, cadence, session, standing)
        self._checkpoints = self._flush.checkpoints if self._flush is not None else CheckpointSteps()
        self._made = partial(fingerprint, self._model, plan, self._table, session.recipe, self._owner)
        self._load = CheckpointLoad(self._made, partial(moments_fingerprint, self._model), session.say, self._tell)
        self._replaced = ReplacedModules(attachment, session)
        self._cycle = StepCycle(attachment, session, cadence, self._overhead, self._flush)
        if plan is not None and recorder is not None and self._flush is not None:
            self.guard.run("begin_step", self._cycle.begin)
            plan.step.on_stuck = weakref.WeakMethod(self._on_stuck)  # the plan outlives a watch that was dropped
            if plan.sites.quantizers:
                plan.step.on_unwatched = weakref.WeakMethod(self._replaced.look)
            self._gone = weakref.finalize(self, step_boundary.abandoned, plan, recorder)
            self._gone.atexit = False

    # ---- what training says -------------------------------------------------------------------------------------

    def log(self, *, batch_id: str | None = None, **values: float | Tensor) -> None:
        """Give scalars of the step that ends next, so before `optimizer.step()`: `loss`, `grad_norm`, `lr`, `max_attention_logit`,
        any name. What is seen by itself (a loss that the model returns, the norm that torch's `clip_grad_norm_` returns, the
        learning rate) need not be given; what is given wins. Tensors of one element are read when the step closes."""
        self.guard.run("log", self._scalars.log, values, batch_id)

    def step(self, step: int | None = None) -> None:
        """End the step by hand, in loops without a torch optimizer. `step` sets the number of the step that ends."""
        self.guard.run("step", self._end_by_hand, step)

    def number(self, step: int) -> None:
        """Number of the step that runs, where training counts its own; the one after it has the next. Adapters call it."""
        self.guard.run("number", self._cycle.renumber, step)

    def _keep(self, hook: Removable) -> None:
        """Take it off with the rest at the end."""
        self._hooks.append(hook)

    def _skipped(self, step: int) -> None:
        """The step that runs was skipped by an engine that does so itself."""
        if self._ran():
            self._close(StepStatus.SKIPPED, step)

    def _share_of(self, ranks: int) -> None:
        """A loss that adds up is this rank's share of the mean over so many."""
        if self._plan is not None:
            self._plan.step.share_of = ranks

    def _end_by_hand(self, step: int | None) -> None:
        if self._owner.ended_by_hand() and not self._ran():
            if step is not None:
                self._cycle.step = int(step) + 1  # the adopted optimizer has ended this one
            return
        self._close(StepStatus.OK, step)

    def pause(self) -> None:
        """Observe nothing until `resume`; the compute path stays."""
        self._paused = True
        if self._plan is not None:
            self._plan.pause(True)

    def resume(self) -> None:
        """Observe again."""
        self._paused = False
        if self._plan is not None:
            self._plan.pause(False)

    def shadow(self, *modules: str) -> None:
        """Hold the GEMMs of these modules, and of no others, against float64 on 64 sampled rows in each sampled step: about
        64/M of each GEMM, in float64. Without it one module after the other has its turn, on fewer rows.

        Args:
            modules: fully qualified names of watched modules; none switches all off.

        Raises:
            ValueError: a name that is not watched.
        """
        rows = first_rows(self._table, modules)
        if self._plan is not None:
            self._plan.canary.forced = frozenset(rows)

    # ---- where steps end ----------------------------------------------------------------------------------------

    def _ran(self) -> bool:
        """Whether there is a step to end."""
        return self._plan is not None and self._plan.step.can_end(frozen=self._owner.frozen)

    def _on_stuck(self, said: str = NO_STEP_ENDED) -> None:
        """Backward after backward, and no end of a step; or step after step of an optimizer, and nothing ran."""
        self._say(said)
        self._stuck = said
        self._tell({STUCK_FACT: said})

    def _tell(self, facts: Mapping[str, Any]) -> None:
        """Facts of the session that only running shows."""
        if self._recorder is not None and facts:
            self._recorder.update_facts(facts)

    def _before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if self._load.pending is not None:
            self._load.before(optimizer, self._owns)
        if not self._detached and graph_task() == -1:
            self._scalars.before(optimizer, self._cycle.step)

    def _on_optimizer(self, optimizer: torch.optim.Optimizer, nesting: Nesting = ALONE) -> None:
        if self._plan is None or self._detached:
            return
        if graph_task() != -1:  # inside backward, one parameter after the other
            if self._owner.owns(optimizer):
                self._scalars.of_optimizer.update(optimizer_scalars(optimizer))
                self._plan.step.on_forward = at_forward(weakref.WeakMethod(self._close))  # or where training ends
            return
        if (is_part := self._owner.is_part(optimizer, nesting)) or self._owner.owns(optimizer):
            looks, parts = not (self._paused or self._plan.step.outside), self._owner.parts(nesting)
            self._scalars.standing.after(optimizer, looks=looks, parts=parts)
        if not is_part and self._owner.closes(optimizer, self._ran(), self._plan.step):
            self._scalars.of_optimizer.update(self._owner.scalars(optimizer, nesting))
            self._close(StepStatus.OK, late=self._owner.take_late())
        elif not is_part and self._owner.may_end:
            self._scalars.of_optimizer.update(self._owner.scalars(optimizer, nesting))
            self._plan.step.on_forward = self._owner.at_forward(optimizer, weakref.WeakMethod(self._close))
        elif self._plan.step.observed and (
            said := self._owner.idle(optimizer, self.last_step, step_boundary.is_watched)
        ):
            self._on_stuck(said)

    def _on_scaler_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._plan is not None and not self._detached:
            self._owner.meets(optimizer, self._ran(), self._plan.step.num_passes)

    def _on_scale(self, optimizer: torch.optim.Optimizer, scale: Tensor | None) -> None:
        if isinstance(scale, Tensor) and not self._detached and self._owner.owns_any({id(optimizer)}):
            self._scalars.see_loss_scale(scale)

    def _on_scaler(self, scale: Tensor | None, optimizers: set[int]) -> None:
        if self._owner.owns_any(optimizers) and self._ran() and not self._cycle.end_before():
            self._close(StepStatus.SKIPPED)

    def _close_unfinished(self) -> None:
        """End a step that no optimizer will end any more."""
        plan = self._plan
        if self._ending:  # a signal came while a step was being closed
            return
        if plan is not None and not self._detached and plan.step.ran:
            self._close(StepStatus.ABORTED if plan.step.on_forward is None else StepStatus.OK)

    def _on_death(self) -> None:
        """Training is over, one way or another: what the slab holds, and what is on its way, goes out now."""
        self.guard.run("death", self._close_unfinished)
        if self._flush is not None:
            self.guard.run("death", self._flush.drain, wait=True)
            self.guard.run("death", self._flush.end)
        if self._recorder is not None:
            self._recorder.close(timeout_s=2.0)

    def _close(self, status: StepStatus, step: int | None = None, *, late: int = 0) -> None:
        """End the step that runs.

        Args:
            status: how it ended.
            step: its number, where training says it.
            late: steps that went by before anybody noticed where they end.
        """
        plan, cycle = self._plan, self._cycle
        if plan is None or self._detached or not (self._flush is not None or plan.step.warming):
            return
        began = plan.stopwatch.mark() if plan.stopwatch is not None else None
        cycle.step = cycle.step + late if step is None else int(step)
        self._ending = True
        try:
            values, batch_id = self._scalars.take(plan.step) if self._flush is not None else ({}, None)
            cycle.close(status, values, batch_id, recorded=not self._paused, began=began)
        finally:
            self._ending = False
            plan.step.on_stuck = None
            if cycle.num_closed <= FIRST_CHECKS or cycle.num_closed % CHECK_EVERY == 0:
                self.guard.run("replaced", self._replaced.look)
            if cycle.num_closed in LATE:
                self._tell(self.guard.run("late", self._late, cycle.num_closed) or {})
            if self._stuck and status is not StepStatus.ABORTED:  # by hand or by an optimizer
                self._stuck = ""
                self._tell({STUCK_FACT: ""})

    # ---- the life of the handle ---------------------------------------------------------------------------------

    @property
    def overhead(self) -> float | None:
        """What observing costs at least, as a share of a step, by what was timed in the last few measured steps; None before
        the first. What entering hooks takes is not timed; checks of quantisers and GEMMs count by their share of the time."""
        return self._overhead.ratio

    @property
    def last_step(self) -> int | None:
        """Number of the last closed step."""
        return self._cycle.step - 1 if self._cycle.num_closed else None

    def flush(self, timeout_s: float = 5) -> bool:
        """Wait until what was recorded has left the process; False when it had not in time."""
        if self._flush is not None:
            self.guard.run("flush", self._flush.drain, wait=True)
        return True if self._recorder is None else bool(self.guard.run("flush", self._recorder.flush, timeout_s))

    def summary(self) -> dict[str, Any]:
        """Where the watch stands: run, steps, sites, and the agent's own health, counts of swallowed errors included."""
        health = self._recorder.health().as_floats() if self._recorder is not None else {}
        return {
            "run_id": self.identity.run_id,
            "session": self.session,
            "rank": self.identity.rank,
            "recipe": self._recipe.name,
            "fingerprint": self._recipe.fingerprint(),
            "num_sites": len(self._table),
            "num_steps": self._cycle.num_closed,
            "last_step": self.last_step,
            "every": self._overhead.every,
            "light_every": self._overhead.light_every,
            "overhead_ratio": self._overhead.ratio,
            "attention_logits": logits_summary(self._plan),
            "loss": "not seen: call watch.log(loss=...)" if self._scalars.loss_is_missing else "seen",
            "steps": self._stuck or ("ending" if self._cycle.num_closed else "none yet"),
            "url": self.url,
            "spool": None if self._recorder is None else str(self._recorder.spool_dir),
            "internal_errors": dict(self.guard.errors),
            "health": health,
        }

    def __repr__(self) -> str:
        """One line."""
        return card.line(self.summary(), detached=self._detached)

    def _repr_html_(self) -> str:
        """A card in a notebook; the collector is asked for incidents and the loss."""
        said = self.guard.call("card", lambda: card.ask(self._collector, self.identity.run_id), card.NOT_ASKED)
        return card.card(self.summary(), said, detached=self._detached)

    def fingerprint(self) -> Fingerprint:
        """Recipe and effective flags, and hashes of weights, of their codes and scales, and of delayed scales with their
        amax histories: plain types, made to be saved. `state_dict` has it, and `load_state_dict` holds what was loaded
        against it. Reads all weights and moments once, and waits for the device; {} where that fails."""
        return dict(self.guard.run("fingerprint", self._made) or {})

    def checkpoint_saved(self, step: int | None = None) -> None:
        """Say that a checkpoint was written, where `torch.save` and `torch.distributed.checkpoint` cannot show it. `step` is the
        last one whose update it holds; None: the last that ended."""
        self._cycle.end_before()
        self.guard.run("checkpoint", self._note_checkpoint, self._cycle.step - 1 if step is None else int(step))

    def _note_checkpoint(self, step: int) -> None:
        if self._plan is not None and not self._detached and self._checkpoints.note(step):
            self._tell(self._checkpoints.fact())
            self._scalars.log({"checkpoint_saved": 1.0}, None)

    def _on_save(self, saved: Any) -> Callable[[], None] | None:
        """What is about to be saved; returns what is called behind that where it is a checkpoint of this model."""
        if not holds_weights(saved, self._table):
            return None
        self._cycle.end_before()
        return partial(self._note_checkpoint, self._cycle.step - 1)

    @property
    def last_good_step(self) -> int | None:
        """The newest step behind which the weights hold no update of a broken step, as this rank saw it; None: none was seen."""
        return self._checkpoints.last_good_step

    @property
    def last_good_checkpoint(self) -> int | None:
        """The newest step with a checkpoint that holds no such update; None: there is none."""
        return self._checkpoints.last_good_checkpoint

    def state_dict(self, *, contents: bool = True) -> dict[str, Any]:
        """What a resumed job gives to `load_state_dict`: the next step, what was quantised how, and `fingerprint()` where
        `contents` are wanted; and `run_id`, which it gives to `attach(run_id=...)`, so that the run goes on."""
        self._cycle.end_before()
        known: dict[str, Any] = {"step": self._cycle.step}
        if self._plan is not None:  # one that was switched off has no run to go on with
            known |= {"run_id": self.identity.run_id, "session": self.session}
            known |= {"contents": self.fingerprint()} if contents else {}
        return known | resume_state(self._recipe) | scale_state(self._plan, self._table)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken: its next step, and its delayed scales with their amax histories. What was
        loaded is held against what was saved, at the latest where the next optimizer steps; what differs is said, and
        told to the collector.

        Raises:
            ValueError: a delayed scale of a site that is not watched, or of another history length; nothing is loaded.
        """
        load_scale_state(self._plan, self._table, state)
        self._cycle.step = int(state.get("step", self._cycle.step))
        if self._plan is not None:
            self._plan.step.warming = self._cycle.step < self._recipe.warmup_steps
        if self._recorder is not None and self._plan is not None:
            self._checkpoints.loaded(self._cycle.step)
            self.guard.run("resume", self._recorder.update_facts, resume_facts(state))
            self.guard.run("fingerprint", self._load.begin, state.get("contents"))
            self._cycle.begin()

    def detach(self) -> None:
        """Put the model back as it was, send what is recorded, and stop. Safe to call twice."""
        if not self._detached:
            self.guard.run("detach", self._detach)

    def _detach(self) -> None:
        assert self._plan is not None
        if self._plan.step.can_end(frozen=False):
            self.guard.run("detach", self._close_unfinished)
        if self._flush is not None:
            self.guard.run("detach", self._flush.drain, wait=True)
            self.guard.run("detach", self._flush.end)
        self._detached = True
        self._scalars.standing.stop()
        self._plan.close_passes()
        for hook in self._hooks:
            hook.remove()
        if self.te is not None:
            self.te.stop()
        for module in list(self._plan.modules):  # one that has left the model since is released as well
            site = module.__dict__.get(SITE_KEY)
            if site is not None and int(site) >> 32 == self._plan.handle:
                release(module)
        custom_ops.remove_plan(self._plan)
        step_boundary.stop(self)
        if self._recorder is not None:
            self._gone.detach()
            self._recorder.close(timeout_s=2.0)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is not None:
            self.guard.run("death", self._on_death)
        self.detach()
