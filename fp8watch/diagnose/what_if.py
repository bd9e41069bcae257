"""`what_if`: what other formats would do to each operand of each Linear, and to the loss, exactly, on one batch.

Shapes:     model, batch -> per layer and format: of each operand SQNR, underflow, saturation, gain; two numbers in nats
Thread:     the caller's

One forward and one backward pass in high precision; every operand that a GEMM reads is quantised in each format on the way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from fp8watch.diagnose.candidates import Candidate, Formats, candidates_of
from fp8watch.diagnose.diagnosis_copy import DiagnosisCopy, LinearCall
from fp8watch.diagnose.loss_impact import ImpactSums, reading
from fp8watch.diagnose.model_copies import check, delayed_scales, unwrapped
from fp8watch.diagnose.operand_costs import OperandCosts
from fp8watch.diagnose.readers import RecipeReader
from fp8watch.diagnose.subject import LossFn
from fp8watch.diagnose.untouched import untouched
from fp8watch.diagnose.verdict import as_plain
from fp8watch.selection.module_filter import FilterFn

READ_BY = {
    ("input", False): "fprop",
    ("weight", False): "fprop",
    ("grad_output", False): "dgrad",
    ("weight", True): "dgrad",
    ("grad_output", True): "wgrad",
    ("input", True): "wgrad",
}
"""(operand, columnwise) -> the GEMM that reads it."""


@dataclass(frozen=True)
class SiteCost:
    """One operand in one direction, in one format; None where there was nothing to measure."""

    operand: str
    direction: str
    sqnr_db: float | None
    tile_sqnr_db: float | None  # over tiles of 1×128, whatever the format's own
    underflow: float | None  # share of non-zero elements
    saturated: float | None  # share of elements
    gain: float | None


@dataclass(frozen=True)
class LayerCost:
    """One Linear in one format."""

    module: str
    format: str
    sites: tuple[SiteCost, ...]
    impact: float | None  # nats, of the forward alone; None where the format leaves fprop in high precision
    spread: float | None


@dataclass(frozen=True)
class FormatSummary:
    """One format over all Linears. SQNR, underflow, saturation and gain are those of all operands together."""

    format: str
    bits: int
    sqnr_db: float | None
    tile_sqnr_db: float | None
    worst_tile_sqnr_db: float | None  # of a layer's operand
    worst_site: str | None
    underflow: float | None
    saturated: float | None
    gain_error: float | None  # the largest |gain − 1| of an operand, with its sign
    spread: float | None  # nats, all forwards: the root of the sum of squares


@dataclass(frozen=True)
class WhatIf:
    """Result of `what_if`."""

    loss: float
    modules: tuple[str, ...]  # in the order of the forward pass
    candidates: tuple[Candidate, ...]
    layers: tuple[LayerCost, ...]
    costs: dict[str, OperandCosts]  # format -> all operands together

    def of(self, module: str) -> tuple[LayerCost, ...]:
        """One Linear in each format."""
        return tuple(layer for layer in self.layers if layer.module == module)

    def recipe(self, name: str) -> object:
        """The recipe that computes a format; None where none of ours does: the candidate says whose."""
        return next(c.recipe for c in self.candidates if c.name == name)

    def summaries(self) -> tuple[FormatSummary, ...]:
        """One a format, in the order given."""
        return tuple(self._summary(c) for c in self.candidates)

    def _summary(self, candidate: Candidate) -> FormatSummary:
        layers = [layer for layer in self.layers if layer.format == candidate.name]
        sites = [(f"{layer.module}.{s.operand}.{s.direction}", s) for layer in layers for s in layer.sites]
        sqnr = [(s.tile_sqnr_db, name) for name, s in sites if s.tile_sqnr_db is not None]
        worst = min(sqnr, default=(None, None))
        gains = [s.gain - 1 for _, s in sites if s.gain is not None]
        spreads = [layer.spread for layer in layers if layer.spread is not None]
        all_of = self.costs[candidate.name]
        return FormatSummary(
            candidate.name, candidate.bits, all_of.sqnr_db, all_of.tile_sqnr_db, worst[0], worst[1], all_of.underflow, all_of.saturated,
            max(gains, key=abs, default=None),
            math.sqrt(sum(s * s for s in spreads)) if spreads else None,
        )  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        """Plain values; non-finite numbers as "nan", "inf", "-inf"."""
        formats = [
            {"name": c.name, "bits": c.bits, "how": c.how, "recipe": c.recipe.facts() if c.recipe is not None else None}
            for c in self.candidates
        ]
        plain: dict[str, Any] = as_plain(
            {
                "loss": self.loss,
                "formats": formats,
                "summaries": [asdict(s) for s in self.summaries()],
                "layers": [asdict(layer) for layer in self.layers],
            }
        )
        return plain

    def as_svg(self) -> str:
        """A picture: layers by formats, the spread of the loss impact as colour."""
        from fp8watch.diagnose.impact_picture import what_if_picture

        return what_if_picture(self)

    def __str__(self) -> str:
        from fp8watch.diagnose.impact_tables import what_if_table

        return what_if_table(self)


def what_if(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFn | None = None,
    *,
    formats: Formats | None = None,
    history: Iterable[Any] = (),
    filter_fn: FilterFn | None = None,
    backend: str | None = None,
) -> WhatIf:
    """Try formats on the operands of one batch.

    Nothing of the caller's changes. Needs memory for a copy of the model, its gradients and activations. Speaks of this batch
    at these weights, not of the trajectory of a training.

    Args:
        model: attached or not.
        batch: copies are made before each use.
        loss_fn: as for `loss_impact`.
        formats: names of `fp8watch.diagnose.CANDIDATES`, Recipes, or Recipes by a name of your own, such as
            {"delayed, margin 3": fp8watch.delayed(margin=3)}. None: fourteen of them.
        history: earlier batches, the oldest first, from which delayed scales follow, at the weights as they are now. Without:
            the scales that an attached model has, else the batch itself counts as the pass before.
        filter_fn: as for `attach`.
        backend: as for `attach`.

    Raises:
        TypeError, ValueError: an argument that cannot work, with value, rule and remedy; a loss that is not finite.
    """
    candidates = candidates_of(formats)
    check(model)
    inner = unwrapped(model)
    with untouched(inner):
        copied = DiagnosisCopy(model, loss_fn, batch, filter_fn)
        past = list(history)
        scales = None if past else delayed_scales(inner)
        readers = {c.name: c.make(copied.device, backend, scales) for c in candidates}
        _follow(copied, [r for r in readers.values() if isinstance(r, RecipeReader) and r.follows_the_past], past)
        sites: dict[tuple[str, str, str, bool], OperandCosts] = {}
        together = {name: OperandCosts() for name in readers}
        impacts: dict[tuple[str, str], ImpactSums] = {}

        def on_gradient(call: LinearCall, grad_MN: Tensor) -> None:
            given = {"input": call.x_MK, "weight": call.weight_NK, "grad_output": grad_MN}
            for name, reader in readers.items():
                for (operand, columnwise), gemm in READ_BY.items():
                    if gemm not in reader.gemms or (gemm == "dgrad" and not call.has_dgrad):
                        continue
                    seen = reader.see(call.module, operand, given[operand], columnwise)
                    for costs in (
                        sites.setdefault((call.module, name, operand, columnwise), OperandCosts()), together[name]
                    ):  # fmt: skip
                        costs.add(given[operand], seen.values, seen.num_saturated, columnwise=columnwise)
                if "fprop" in reader.gemms:
                    sums = impacts.setdefault((call.module, name), ImpactSums())
                    sums.add(call, grad_MN, reading(reader, call.module))

        loss = copied.visit(on_gradient)
    if not math.isfinite(loss):
        raise ValueError(
            f"the loss is {loss} in high precision: there is nothing to compare; give a batch before the failure"
        )
    seen_modules = tuple(m for m in copied.called if any(key[0] == m for key in sites))
    layers = tuple(_layer(m, c, sites, impacts.get((m, c.name))) for m in seen_modules for c in candidates)
    return WhatIf(loss, seen_modules, candidates, layers, together)


def _follow(copied: DiagnosisCopy, readers: list[RecipeReader], past: list[Any]) -> None:
    """Let delayed scales follow earlier passes."""
    for batch in (past or [None]) if readers else []:

        def note(call: LinearCall, grad_MN: Tensor) -> None:
            for reader in readers:
                reader.note(call, grad_MN)

        copied.visit(note, batch=batch)
        for reader in readers:
            reader.end_pass()


def _layer(
    module: str, candidate: Candidate, sites: dict[tuple[str, str, str, bool], OperandCosts], sums: ImpactSums | None
) -> LayerCost:
    found = []
    for operand, columnwise in READ_BY:
        c = sites.get((module, candidate.name, operand, columnwise))
        if c is not None:
            direction = "columnwise" if columnwise else "rowwise"
            found.append(SiteCost(operand, direction, c.sqnr_db, c.tile_sqnr_db, c.underflow, c.saturated, c.gain))
    return LayerCost(
        module,
        candidate.name,
        tuple(found),
        None if sums is None else sums.impact,
        None if sums is None else sums.spread,
    )
