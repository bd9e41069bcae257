"""A training that a person might run, and what may be changed in it: the words that families, faults, traps and the loop share.

A family builds a `Training`. The loop (`proving.loop`) runs it and calls the seams of a `Change` in this order:

    before_build()                                 nothing exists yet: environment, patches of libraries
    started(t)                                     model and optimizer are built, with fresh weights
    before_resume(t, state) -> state               a later leg only: the checkpoint is read, and not loaded yet
    before_attach(t)                               everything is loaded
    attached(t, watch)                             the product watches
    each step:
        before_step(t, step)
        each micro-batch:
            on_batch(t, step, batch) -> batch
            on_loss(t, step, loss) -> loss         before it is divided by `accumulate` and scaled
        after_backward(t, step)                    all gradients are there, not clipped yet
        before_update(t, step)                     unscaled and clipped
        after_update(t, step)                      the optimizer has stepped (or the GradScaler has skipped)
    undo()                                         also when the training has died

A run may have two *legs*: the second is a new process that builds everything again and loads the first one's checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

SEVERITIES = ("mild", "medium", "severe")


@dataclass
class Training:
    """One training. A change may replace any of its parts between two steps."""

    family: str
    model: nn.Module
    """Before DDP wraps it; module names of expectations are names in this."""
    optimizer: torch.optim.Optimizer
    batch: Callable[[int], Any]
    """Micro-batch number -> its data, a function of (seed, number) alone; numbers of rank r are r modulo `world_size`."""
    loss: Callable[[nn.Module, Any], Tensor]
    """Forward pass and loss, 0-d, of the model (possibly wrapped in DDP) and one micro-batch."""
    recipe: str | None = None
    """What attach(recipe=) is given, or None for its default."""
    accumulate: int = 1
    clip_norm: float | None = 1.0
    clip_value: float | None = None
    """Largest magnitude of an element of a gradient."""
    schedule: Callable[[int], float] | None = None
    """Step -> learning rate, set on all param groups times their `lr_scale` (default 1); None leaves them."""
    scaler: torch.amp.GradScaler | None = None
    resume_at: int | None = None
    """First step of a second leg that is part of this family; a change that resumes says its own."""
    world_size: int = 1
    rank: int = 0
    seed: int = 0
    steps: int = 160
    onset: tuple[int, int] = (72, 112)
    """Steps [first, last] in which a fault may begin: after the warm-up of baselines, with room to be found."""
    log: Callable[[Training, int], dict[str, float]] | None = None
    """Other scalars that a person logs (KL, entropy), given to watch.log."""
    logs: bool = True
    """Whether the person logs loss and gradient norm; if not, the model returns its loss."""
    attach: dict[str, Any] = field(default_factory=dict)
    """Arguments of attach that this family's user has to give; all others stay at their defaults."""
    notes: dict[str, Any] = field(default_factory=dict)
    """Roles for faults -> a list of module names, in the order of the forward pass; a missing role is not in the model.

    "blocks", "attention" (the whole), "attention.q", "attention.k", "attention.v", "attention.qkv" (fused), "attention.out",
    "mlp.up", "mlp.gate", "mlp.down", "norm", "embedding", "head", "router", "experts" (a list for each layer is flattened),
    "positions" (a table of them), "linears" (every nn.Linear that FP8 takes over, in order), "adapter" (LoRA A and B), "recurrent".
    Other keys: "causal": bool; "tokens": True where a batch is {"input_ids": int64 [B, T], "labels": int64 [B, T]} (−100 is
    not scored) and may hold "attention_mask": [B, T]; "vocab": int; "classes": int where labels are classes [B];
    "rotary": True where `parts.rotate` turns q and k; "distillation": what learns from a teacher, whose `taught(tokens)` is log-probabilities [B, T, vocabulary];
    "table_rows": int where a batch is {"history", "item"} of such rows;
    "kv_heads": int where queries are grouped otherwise than in `parts.Attention`. A signal is "pixels" or "frames" [B, …, channels].
    """


@dataclass(frozen=True)
class Expected:
    """What a knowledgeable person would say about a fault."""

    modes: tuple[str, ...]
    """Slugs that are accepted; the first is the right name."""
    modules: tuple[str, ...] | None = None
    """Prefixes of module names, any of them right; None: the fault has no place."""
    operand: str | None = None
    """One of "input", "weight", "grad_output", or None where any is right."""
    fp8: bool | None = None
    """Whether FP8 is the cause; None: cannot be told."""


class Change:
    """What is done to a training. Every seam does nothing unless it is overridden."""

    resumes: bool = False
    """The run gets a second leg, in a new process, that begins at `step`."""
    step: int = 0
    """First step at which anything is changed."""

    def before_build(self) -> None: ...

    def started(self, t: Training) -> None: ...

    def before_resume(self, t: Training, state: dict[str, Any]) -> dict[str, Any]:
        """`state`: {"model": …, "optimizer": …, "scaler": … | None, "watch": watch.state_dict(), "step": int}."""
        return state

    def before_attach(self, t: Training) -> None: ...

    def attached(self, t: Training, watch: Any) -> None: ...

    def before_step(self, t: Training, step: int) -> None: ...

    def on_batch(self, t: Training, step: int, batch: Any) -> Any:
        return batch

    def on_loss(self, t: Training, step: int, loss: Tensor) -> Tensor:
        return loss

    def after_backward(self, t: Training, step: int) -> None: ...

    def before_update(self, t: Training, step: int) -> None: ...

    def after_update(self, t: Training, step: int) -> None: ...

    def undo(self) -> None: ...


class Prepared(Change):
    """What a fault prepares before its first step, and nothing else: its twin is the same training."""

    def __init__(self, fault: Change) -> None:
        self.fault = fault
        self.before_build, self.started = fault.before_build, fault.started  # type: ignore[method-assign]
        self.before_attach, self.attached, self.undo = fault.before_attach, fault.attached, fault.undo  # type: ignore[method-assign]


class Fault(Change):
    """One drawn instance of a fault.

    `draw` is given a training that was built for this alone and is thrown away: keep names of modules, not modules. It is
    called again with an equal `rng` in every process of the run (legs, ranks), so it must be a function of its arguments.
    """

    name: ClassVar[str]
    prepares: ClassVar[bool] = False
    """Something is another one from the first step on, a recipe or what is logged: the run has a twin of its own."""
    generator: ClassVar[str]
    """The group by which faults are split into dev and held-out: the file that makes it."""

    def __init__(
        self,
        *,
        step: int,
        severity: str,
        expected: Expected,
        until: int | None = None,
        drawn: dict[str, Any] | None = None,
    ) -> None:
        self.step = step
        self.until = until
        """First step at which all is right again; None: it stays."""
        self.severity = severity
        """By its effect, not by its knob."""
        self.expected = expected
        self.drawn = drawn or {}
        """What was drawn (site, size, …), written into the results; plain numbers and strings."""

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> Fault | None:
        """One instance, every number from a distribution; None where this training has no such place."""
        raise NotImplementedError

    def active(self, step: int) -> bool:
        """Whether step is within [step, until)."""
        return self.step <= step and (self.until is None or step < self.until)


class Trap(Change):
    """A healthy event that looks like a fault: every incident about it is false, information apart."""

    name: ClassVar[str]

    def __init__(self, *, step: int, drawn: dict[str, Any] | None = None) -> None:
        self.step = step
        self.drawn = drawn or {}

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        """One instance; None where this training has no such place."""
        raise NotImplementedError
