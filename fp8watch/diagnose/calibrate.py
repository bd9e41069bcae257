"""`calibrate`: some steps in high precision, what FP8 would have done to each operand, and the recipe that follows.

Shapes:     model, batches -> per site quantiles of amax, growth and noise; one recipe
Thread:     the caller's

The coarsest recipe is suggested in which the operands of nearly all layers keep their tile SQNR and lose few elements; layers
that do not keep theirs even so, and those that carry most of the loss impact, stay in high precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fp8watch import recipe as recipes
from fp8watch.diagnose.answer_pictures import calibration_picture
from fp8watch.diagnose.diagnosis_copy import DiagnosisCopy, LinearCall
from fp8watch.diagnose.loss_impact import ImpactSums, reading
from fp8watch.diagnose.model_copies import MakeOptimizer, check, optimizer_of, unwrapped
from fp8watch.diagnose.operand_costs import OperandCosts
from fp8watch.diagnose.readers import RecipeReader
from fp8watch.diagnose.subject import LossFn
from fp8watch.diagnose.untouched import untouched
from fp8watch.diagnose.what_if import READ_BY
from fp8watch.recipe import Recipe
from fp8watch.recipe.file import recipe_toml, toml_value
from fp8watch.selection.module_filter import FilterFn

MIN_TILE_SQNR_DB = {"E4M3": 28.0, "E5M2": 22.0}
"""Of a step in which an operand is fine: 3.5 dB below what the format gives data that its tiles fit."""
MAX_UNDERFLOW = 0.02
"""Share of non-zero elements that may become zero."""
BAD_SHARE = 0.05
"""Quantile over steps that is judged, and share of the layers that may be bad before a finer recipe is taken."""
IMPACT_SHARE, MIN_LAYERS = 0.5, 8
"""Share of the squared loss impact from which on one layer of so many stays in high precision."""
SETTLED_OCTAVES = 1.0
"""Growth of an amax over its past from which on a step counts as not settled."""

LADDER = ("current", "blockwise", "mxfp8")
"""Recipes from coarse to fine."""


@dataclass(frozen=True)
class SiteCalibration:
    """One operand of one Linear over the steps."""

    module: str
    operand: str
    amax_p50: float
    amax_p99: float
    amax_max: float
    growth_p99: float  # of amax over the largest before
    tile_sqnr_p05_db: dict[str, float]  # by recipe, in E4M3: the worse of both directions
    underflow_p95: dict[str, float]
    suggested: str | None  # the coarsest recipe that serves it; None: none does


@dataclass(frozen=True)
class Calibration:
    """Result of `calibrate`."""

    recipe: Recipe
    steps: int
    sites: tuple[SiteCalibration, ...]
    reasons: dict[str, str]  # module that stays in high precision -> why
    delayed_margin: int  # octaves that delayed scaling would need
    settled_at: int | None  # step from which on no amax grew by more than an octave; None where the weights stood still

    def toml(self) -> str:
        """The recipe file, with what it rests on."""
        said = [f"{name}: {why}" for name, why in self.reasons.items()]
        comment = "\n".join((f"fp8watch calibrate, {self.steps} steps", *said))
        out = [recipe_toml(self.recipe, comment), "[measured]", f"steps = {self.steps}"]
        out.append(f"delayed_margin = {self.delayed_margin}")
        if self.settled_at is not None:
            out += [f"settled_at = {self.settled_at}", f"warm_up_share = {self.settled_at / self.steps:.3f}"]
        for site in self.sites:
            out += ["", "[[site]]", f"module = {toml_value(site.module)}", f"operand = {toml_value(site.operand)}"]
            out += [f"suggested = {toml_value(site.suggested or 'high precision')}"]
            out += [f"{k} = {getattr(site, k):.6g}" for k in ("amax_p50", "amax_p99", "amax_max", "growth_p99")]
            out += [f"tile_sqnr_p05_db.{name} = {_float(v)}" for name, v in site.tile_sqnr_p05_db.items()]
            out += [f"underflow_p95.{name} = {_float(v)}" for name, v in site.underflow_p95.items()]
        return "\n".join(out) + "\n"

    def as_svg(self) -> str:
        """A picture: tile SQNR of each operand under the suggested recipe, and the coarsest recipe that serves it."""
        return calibration_picture(self)

    def __str__(self) -> str:
        r = self.recipe
        formats = ", ".join(f"{o} {s.format}" for o, s in r.quantised)
        lines = [f"{r.name} ({formats}) from {self.steps} steps"]
        if self.settled_at is not None:
            lines.append(
                f"warm-up: {r.warmup_steps} steps in high precision; no amax grew by an octave after step {self.settled_at}"
            )
        lines.append(f"delayed scaling would need a margin of {self.delayed_margin}")
        lines += [f"in high precision: {name} ({why})" for name, why in self.reasons.items()]
        return "\n".join(lines)


def _float(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else "inf" if value > 0 else "-inf" if value < 0 else "nan"


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFn | None = None,
    steps: int = 20,
    *,
    optimizer: torch.optim.Optimizer | MakeOptimizer | None = None,
    filter_fn: FilterFn | None = None,
    backend: str | None = None,
) -> Calibration:
    """Watch some steps of a copy in high precision, and suggest a recipe.

    Args:
        model: attached or not; nothing of it changes.
        batches: at most `steps` are taken.
        loss_fn: as for `loss_impact`.
        steps: at most.
        optimizer: copied with its state, or a function parameters -> optimizer: the copy trains. None: the weights stand
            still, and nothing is said of a warm-up.
        filter_fn: as for `attach`.
        backend: as for `attach`.

    Raises:
        TypeError, ValueError: an argument that cannot work, with value, rule and remedy; a loss that is not finite.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= 100_000:
        raise ValueError(f"steps={steps!r}: must be a whole number from 1 to 100000")
    check(model)
    inner = unwrapped(model)
    taken: Iterator[Any] = islice(iter(batches), steps)
    with untouched(inner):
        first = next(taken, None)
        if first is None:
            raise ValueError("batches is empty: give at least one")
        copied = DiagnosisCopy(model, loss_fn, first, filter_fn)
        stepper = optimizer_of(optimizer, inner, copied.model)
        seen = _Seen(copied, backend)
        seen.step(first)
        for batch in taken:
            if stepper is not None:
                stepper.step()
                copied.keep_buffers()
            seen.step(batch)
    return seen.result(trains=stepper is not None)


class _Seen:
    """What the steps left."""

    def __init__(self, copied: DiagnosisCopy, backend: str | None) -> None:
        self._copied = copied
        made = {name: _e4m3(name) for name in LADDER} | {"e5m2": recipes.blockwise(fp8_format="E5M2", environ={})}
        self._readers = {name: RecipeReader(recipe, copied.device, backend) for name, recipe in made.items()}
        self.num_steps = 0
        self.amax: dict[tuple[str, str], list[float]] = {}
        """Of the finite elements."""
        self.nonfinite: dict[tuple[str, str], int] = {}
        """In how many steps an operand was not finite."""
        self.sqnr: dict[tuple[str, str, str], list[float]] = {}
        self.underflow: dict[tuple[str, str, str], list[float]] = {}
        self.square: dict[str, float] = {}

    def step(self, batch: Any) -> None:
        """One pass; gradients are left for the optimizer."""
        costs: dict[tuple[str, str, str, bool], OperandCosts] = {}
        amax: dict[tuple[str, str], float] = {}
        nonfinite: set[tuple[str, str]] = set()
        impacts: dict[str, ImpactSums] = {}

        def on_gradient(call: LinearCall, grad_MN: Tensor) -> None:
            given = {"input": call.x_MK, "weight": call.weight_NK, "grad_output": grad_MN}
            for operand, x in given.items():
                key = (call.module, operand)
                size = x.detach().abs()
                amax[key] = max(amax.get(key, 0.0), float(size.where(size.isfinite(), 0.0).amax()))
                if not bool(size.isfinite().all()):
                    nonfinite.add(key)
            for name, reader in self._readers.items():
                for (operand, columnwise), gemm in READ_BY.items():
                    if gemm == "dgrad" and not call.has_dgrad:
                        continue
                    seen = reader.see(call.module, operand, given[operand], columnwise)
                    cost = costs.setdefault((call.module, operand, name, columnwise), OperandCosts())
                    cost.add(given[operand], seen.values, seen.num_saturated, columnwise=columnwise)
            sums = impacts.setdefault(call.module, ImpactSums())
            sums.add(call, grad_MN, reading(self._readers["blockwise"], call.module))

        loss = self._copied.visit(on_gradient, batch=batch)
        if not math.isfinite(loss):
            raise ValueError(
                f"the loss is {loss} in high precision: there is nothing to measure; give batches before the failure"
            )
        self.num_steps += 1
        for key in nonfinite:
            self.nonfinite[key] = self.nonfinite.get(key, 0) + 1
        for key, value in amax.items():
            self.amax.setdefault(key, []).append(value)
        for name, sum_ in impacts.items():
            if math.isfinite(sum_.square):
                self.square[name] = self.square.get(name, 0.0) + sum_.square
        for (module, operand, name, columnwise), cost in costs.items():
            other = costs.get((module, operand, name, not columnwise))
            if columnwise and other is not None:
                continue  # told with the other direction
            both = [c for c in (cost, other) if c is not None]
            sqnr = [c.tile_sqnr_db for c in both if c.tile_sqnr_db is not None]
            flushed = [c.underflow for c in both if c.underflow is not None]
            if sqnr:
                self.sqnr.setdefault((module, operand, name), []).append(min(sqnr))
            if flushed:
                self.underflow.setdefault((module, operand, name), []).append(max(flushed))

    def result(self, *, trains: bool) -> Calibration:
        """The suggestion."""
        order = [m for m in self._copied.called if (m, "input") in self.amax]
        sites = tuple(self._site(m, o) for m in order for o in recipes.OPERANDS if (m, o) in self.amax)
        chosen = next((name for name in LADDER if len(self._bad(name, order)) <= BAD_SHARE * len(order)), LADDER[1])
        reasons = self._bad(chosen, order)
        total = sum(self.square.values())
        for name, square in self.square.items():
            if len(order) >= MIN_LAYERS and total > 0 and square / total >= IMPACT_SHARE:
                reasons.setdefault(name, f"carries {square / total:.0%} of the squared loss impact")
        settled = self._settled() if trains else None
        grows = max((s.growth_p99 for s in sites), default=1.0)
        grad = self._gradient_format(chosen, order)
        recipe = replace(
            recipes.RECIPES[chosen].build(fp8_format=("E4M3", "E4M3", grad)),
            warmup_steps=settled or 0,
            high_precision_modules=tuple(m for m in order if m in reasons),
        )
        margin = max(0, math.ceil(math.log2(grows))) if math.isfinite(grows) else 0
        return Calibration(
            recipe, self.num_steps, sites, {m: reasons[m] for m in order if m in reasons}, margin, settled
        )

    def _site(self, module: str, operand: str) -> SiteCalibration:
        values = np.array(self.amax[module, operand])
        growth = self._growth(values)
        sqnr = {n: _quantile(self.sqnr.get((module, operand, n), ()), BAD_SHARE) for n in LADDER}
        lost = {n: _quantile(self.underflow.get((module, operand, n), ()), 1 - BAD_SHARE) for n in LADDER}
        serves = next((n for n in LADDER if self._why(module, operand, n) is None), None)
        return SiteCalibration(
            module, operand, _quantile(values, 0.5), _quantile(values, 0.99), float(values.max()),
            _quantile(growth, 0.99) if len(growth) else 1.0, sqnr, lost, serves,
        )  # fmt: skip

    def _growth(self, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        before = np.maximum.accumulate(values)[:-1]
        found: np.ndarray[Any, Any] = values[1:][before > 0] / before[before > 0]
        return found

    def _why(self, module: str, operand: str, name: str) -> str | None:
        """What is wrong with an operand under a recipe; a gradient may be E5M2 where E4M3 flushes too much of it. Of zeros
        nothing is lost."""
        if steps := self.nonfinite.get((module, operand)):
            return f"{operand} is not finite in {steps} of {self.num_steps} steps"
        lost = _quantile(self.underflow.get((module, operand, name), ()), 1 - BAD_SHARE)
        sqnr = _quantile(self.sqnr.get((module, operand, name), ()), BAD_SHARE)
        in_e5m2 = operand == "grad_output" and self._prefers_e5m2(module)
        if in_e5m2:
            sqnr = _quantile(self.sqnr.get((module, operand, "e5m2"), ()), BAD_SHARE)
        if math.isnan(sqnr) and max(self.amax[module, operand]) > 0:
            return f"{operand} was not measured"
        if in_e5m2:
            return f"{operand} at {sqnr:.1f} dB in E5M2" if sqnr < MIN_TILE_SQNR_DB["E5M2"] else None
        if sqnr < MIN_TILE_SQNR_DB["E4M3"]:
            return f"{operand} at {sqnr:.1f} dB"
        return f"{lost:.1%} of {operand} becomes zero" if lost > MAX_UNDERFLOW else None

    def _prefers_e5m2(self, module: str) -> bool:
        e4m3 = _quantile(self.underflow.get((module, "grad_output", "blockwise"), ()), 1 - BAD_SHARE)
        e5m2 = _quantile(self.underflow.get((module, "grad_output", "e5m2"), ()), 1 - BAD_SHARE)
        return e4m3 > MAX_UNDERFLOW and e5m2 < e4m3 / 2

    def _gradient_format(self, chosen: str, order: Sequence[str]) -> str:
        wanting = sum(self._prefers_e5m2(m) for m in order)
        return "E5M2" if wanting * 2 > len(order) else "E4M3"

    def _bad(self, name: str, order: Sequence[str]) -> dict[str, str]:
        found: dict[str, str] = {}
        for module in order:
            for operand in recipes.OPERANDS:
                why = self._why(module, operand, name)
                if why is not None:
                    found.setdefault(module, why)
        return found

    def _settled(self) -> int:
        """The first step from which on no amax grew by more than an octave over its past."""
        last = 0
        for values in self.amax.values():
            line = np.array(values)
            before = np.maximum.accumulate(line)[:-1]
            jumps = np.flatnonzero((before > 0) & (line[1:] > before * 2**SETTLED_OCTAVES))
            if len(jumps):
                last = max(last, int(jumps[-1]) + 2)
        return last


def _e4m3(name: str) -> Recipe:
    made: Recipe = recipes.RECIPES[name].build(fp8_format="E4M3")
    return made


def _quantile(values: Sequence[float] | np.ndarray[Any, Any], share: float) -> float:
    """NaN without values: comparisons with it are false."""
    return float(np.quantile(np.asarray(values, dtype=np.float64), share)) if len(values) else math.nan
