"""`loss_impact`: what FP8 costs layer by layer, in nats of the loss, from one forward and one backward pass.

Shapes:     model, batch -> per layer two numbers in nats
Thread:     the caller's

For a Linear with output y, to first order its FP8 forward changes the loss by

    impact = Σ over rows and features of ∂ℒ/∂y · (y_fp8 − y_high)

with y_high and ∂ℒ/∂y of the model in high precision. Its sign is that of this batch: rounding errors point anywhere, and half of
the layers lower the loss of a batch by chance. What says how much is at stake is the spread, the root of the sum over rows of
the squared impact of each row: the impact that independent rows would have by chance.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fp8watch.diagnose.backward_impact import BackwardImpact, BackwardPass
from fp8watch.diagnose.diagnosis_copy import DiagnosisCopy, LinearCall
from fp8watch.diagnose.model_copies import MakeOptimizer, check, delayed_scales, plan_of, unwrapped
from fp8watch.diagnose.readers import Reader, RecipeReader, trial_of
from fp8watch.diagnose.subject import LossFn
from fp8watch.diagnose.trial_linear import Read, plain_fprop, trial_fprop
from fp8watch.diagnose.untouched import untouched
from fp8watch.diagnose.verdict import as_plain
from fp8watch.recipe import Recipe, resolve_recipe
from fp8watch.selection.module_filter import FilterFn


@dataclass
class ImpactSums:
    """Sums over the calls of one Linear."""

    impact: float = 0.0
    square: float = 0.0
    num_rows: int = 0
    error_energy: float = 0.0
    output_energy: float = 0.0

    def add(self, call: LinearCall, grad_MN: Tensor, read: Read) -> None:
        """Add one call."""
        y = plain_fprop(call.x_MK, call.weight_NK, call.bias_N, call.dtype).double()
        error = trial_fprop(call.x_MK, call.weight_NK, call.bias_N, read, call.dtype).double() - y
        by_row = (grad_MN.double() * error).sum(1)
        self.impact += float(by_row.sum())
        self.square += float(by_row.square().sum())
        self.num_rows += len(by_row)
        self.error_energy += float(error.square().sum())
        self.output_energy += float(y.square().sum())

    @property
    def spread(self) -> float:
        """In nats."""
        return math.sqrt(self.square)

    @property
    def output_error(self) -> float:
        """RMS of the error over RMS of the output."""
        return math.sqrt(self.error_energy / self.output_energy) if self.output_energy else 0.0


@dataclass(frozen=True)
class LayerImpact:
    """One Linear."""

    module: str
    impact: float  # nats, to first order
    spread: float  # nats
    num_rows: int  # tokens
    output_error: float  # RMS(y_fp8 − y_high) / RMS(y_high)
    measured: float | None = None  # nats: the loss with only this forward in FP8, less the loss
    backward: BackwardImpact | None = None


@dataclass(frozen=True)
class LossImpact:
    """Result of `loss_impact`; layers in the order of the forward pass."""

    recipe: str
    loss: float  # nats, in high precision
    layers: tuple[LayerImpact, ...]
    measured_total: float | None = None  # nats: the loss with all of these forwards in FP8, less the loss
    descent: float | None = None  # nats that the update of this batch lowers the loss by, to first order

    @property
    def spread(self) -> float:
        """Of all forwards together, in nats: the root of the sum of squares. Impacts of layers do not add up: where a layer
        upstream moves an input, its rounding errors are drawn anew."""
        return math.sqrt(sum(layer.spread**2 for layer in self.layers))

    def ranked(self) -> tuple[LayerImpact, ...]:
        """The layers by spread, the dearest first."""
        return tuple(sorted(self.layers, key=lambda layer: -layer.spread))

    def as_json(self) -> dict[str, Any]:
        """Plain values; non-finite numbers as "nan", "inf", "-inf"."""
        plain: dict[str, Any] = as_plain({**asdict(self), "spread": self.spread})
        return plain

    def __str__(self) -> str:
        from fp8watch.diagnose.impact_tables import impact_table

        return impact_table(self)


def loss_impact(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFn | None = None,
    *,
    recipe: object = None,
    filter_fn: FilterFn | None = None,
    backend: str | None = None,
    measure: bool = False,
    backward: bool = False,
    optimizer: torch.optim.Optimizer | MakeOptimizer | None = None,
) -> LossImpact:
    """Say what FP8 costs in each Linear, on one batch, to first order; all rows count.

    Nothing of the caller's changes. Needs memory for a copy of the model, its gradients and activations; with `backward` as
    much again as the inputs of all Linears. It speaks of this batch at these weights, not of the trajectory of a training.

    Args:
        model: attached or not. An attached one is asked about its own recipe, sites and scales.
        batch: copies are made before each use.
        loss_fn: (model, batch) -> loss, 0-d, in nats where it is a cross-entropy. None: the model returns its loss.
        recipe: as for `attach`, for a model that is not attached, or to ask about another recipe. "observe" asks about the
            recipe that it observes.
        filter_fn: as for `attach`.
        backend: as for `attach`.
        measure: also compute the loss with each forward in FP8 alone: a pass for each Linear. With `backward` as well two
            steps for each.
        backward: also say what dgrad and wgrad cost, see `BackwardImpact`.
        optimizer: with `backward`: the one that trains the model, which is copied with its state, or a function parameters
            -> optimizer; None: steepest descent.

    Raises:
        TypeError, ValueError: an argument that cannot work, with value, rule and remedy; a loss that is not finite.
    """
    check(model)
    chosen, inner = recipe_asked(model, recipe), unwrapped(model)
    with untouched(inner):
        copied = DiagnosisCopy(model, loss_fn, batch, filter_fn, chosen.high_precision_modules)
        attached = recipe is None and plan_of(inner) is not None
        reader = RecipeReader(chosen, copied.device, backend, delayed_scales(inner) if attached else None)
        if reader.follows_the_past:
            copied.visit(reader.note)
            reader.end_pass()
        found, loss, passed = _visit(copied, reader, backward)
        made = passed.finish(optimizer, inner) if passed is not None else None
        layers = []
        for name, sums in found.items():
            layer = LayerImpact(name, sums.impact, sums.spread, sums.num_rows, sums.output_error)
            if measure and "fprop" in reader.gemms:
                under = copied.loss_under({name: trial_of(reader, name, ("fprop",))})
                layer = replace(layer, measured=under - loss)
            if made is not None:
                layer = replace(layer, backward=made.of(name, measure=measure))
            layers.append(layer)
        total = None
        if measure and "fprop" in reader.gemms:
            total = copied.loss_under({name: trial_of(reader, name, ("fprop",)) for name in found}) - loss
    return LossImpact(chosen.name, loss, tuple(layers), total, made.descent if made is not None else None)


def recipe_asked(model: nn.Module, recipe: object) -> Recipe:
    """The recipe of an attached model, else the requested one, as one that computes."""
    plan = plan_of(unwrapped(model))
    chosen = plan.recipe if plan is not None and recipe is None else resolve_recipe(recipe)
    return replace(chosen, observe_only=False, name="") if chosen.observe_only else chosen


def _visit(
    copied: DiagnosisCopy, reader: Reader, backward: bool
) -> tuple[dict[str, ImpactSums], float, BackwardPass | None]:
    found: dict[str, ImpactSums] = {}
    passed = BackwardPass(copied, reader) if backward else None

    def on_gradient(call: LinearCall, grad_MN: Tensor) -> None:
        if "fprop" in reader.gemms:
            found.setdefault(call.module, ImpactSums()).add(call, grad_MN, reading(reader, call.module))
        else:
            found.setdefault(call.module, ImpactSums())
        if passed is not None:
            passed.see(call, grad_MN)

    loss = copied.visit(on_gradient)
    if not math.isfinite(loss):
        raise ValueError(
            f"the loss is {loss} in high precision: there is nothing to compare; give a batch before the failure"
        )
    return {name: found[name] for name in copied.called if name in found}, loss, passed


def reading(reader: Reader, module: str) -> Read:
    """How the GEMMs of one module read their operands."""

    def read(operand: str, x: Tensor, columnwise: bool) -> Tensor:
        return reader.see(module, operand, x, columnwise).values

    return read
