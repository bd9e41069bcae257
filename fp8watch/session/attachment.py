"""What attach hands to the watch: what it put on the model, who is told of it, and how often what is looked at.

Thread:     training, once
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from fp8watch.integrations.transformer_engine import TeObserver
from fp8watch.layers import custom_ops
from fp8watch.layers.fp8_linear import release
from fp8watch.layers.own_turns import OwnGemms
from fp8watch.observer.observation_plan import ObservationPlan
from fp8watch.recipe import Recipe
from fp8watch.selection.flop_coverage import Coverage
from fp8watch.selection.own_parameters import OwnModule
from fp8watch.selection.tied_heads import TiedHead
from fp8watch.session.computed_products import ComputedProducts
from fp8watch.session.identity import Identity
from fp8watch.session.sampling_schedule import Schedule
from fp8watch.session.sites import SlabSite
from fp8watch_agent.guard import Guard
from fp8watch_agent.recorder import Recorder


class Removable(Protocol):
    """What attach put on a model: a hook, or a class of its own."""

    def remove(self) -> None:
        """Take it off."""


@dataclass
class Attachment:
    """What attach put on a model."""

    model: nn.Module
    plan: ObservationPlan | None = None  # None: switched off
    table: list[SlabSite] = field(default_factory=list)  # one a row of the slab
    recorder: Recorder | None = None  # None: nothing is recorded
    hooks: list[Removable] = field(default_factory=list)
    te: TeObserver | None = None  # what observes Transformer Engine's modules
    own: Mapping[str, tuple[OwnGemms, str]] = field(default_factory=dict)
    """Products with own parameters, by the name of their sites: what is seen of the module, path of the parameter."""
    own_modules: Sequence[OwnModule] = ()
    heads: Sequence[TiedHead] = ()
    coverage: Coverage = field(default_factory=Coverage)
    computed: ComputedProducts | None = None

    def cover(self, covered: Coverage) -> None:
        """What is observed of the model as its modules are now."""
        self.coverage = covered if self.computed is None else self.computed.besides(covered)

    def undo(self) -> None:
        """Take everything off again where nobody got a handle to detach."""
        for hook in self.hooks:
            hook.remove()
        if self.plan is not None:
            for module in self.plan.modules:
                release(module)
            custom_ops.remove_plan(self.plan)


@dataclass(frozen=True)
class Session:
    """Whose steps these are, and who is told."""

    recipe: Recipe
    identity: Identity
    id: str
    guard: Guard
    say: Callable[[str], None]
    url: str | None = None  # the run's page
    collector: str | None = None


@dataclass(frozen=True)
class Cadence:
    """Which steps are observed, how often in full, and what ends them.

    `every` and `overhead_budget`, `tile_maps` and `start_step` are those of `attach`, checked.
    """

    schedule: Schedule
    every: int
    tile_maps: tuple[str, int]
    overhead_budget: float | None
    optimizers: Sequence[torch.optim.Optimizer]
    start_step: int
    merge_steps: int = 0  # FP8WATCH_MERGE_STEPS; 0: by the number of ranks
