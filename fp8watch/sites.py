"""What a row of the slab stands for, as the collector is told of it: once, when its operand was first seen.

Upstream:   fp8watch.watch     Downstream: fp8watch_agent.recorder
Shapes:     one row -> one Site     Thread: training
"""

from __future__ import annotations

from dataclasses import dataclass

from fp8watch_agent.record import Site

from .integrations.transformer_engine import TeObserver
from .ops import Plan
from .recipe import Recipe


@dataclass
class SiteTable:
    """What a row of the slab stands for; shape and order are known after the first step."""

    fqn: str
    operand: str
    direction: str
    gemm: str
    site_id: int


def describe(row: int, s: SiteTable, order: int, plan: Plan, te: TeObserver | None, recipe: Recipe) -> Site:
    """The site of a row whose operand has been seen. One of Transformer Engine is what its tensors say, whatever our
    recipe is."""
    shape = plan.shapes[row]
    if row >= len(plan.quantizers):
        assert te is not None
        facts = te.facts[row]
        return Site(
            id=s.site_id, module=s.fqn, operand=s.operand, direction=s.direction, gemm=s.gemm, order=order, shape=shape,
            tile=facts.tile, format=facts.format, power_2_scale=facts.power_2_scale, eps=facts.eps,
            recipe="transformer_engine", backend="transformer_engine", evidence=facts.evidence,
        )  # fmt: skip
    quantizer = plan.quantizers[row]
    spec = quantizer.spec
    return Site(
        id=s.site_id, module=s.fqn, operand=s.operand, direction=s.direction, gemm=s.gemm, order=order, shape=shape,
        tile=quantizer.tile_for(shape), format=spec.format, power_2_scale=spec.power_2_scale, eps=spec.eps,
        recipe=recipe.site_recipe(s.operand), backend=quantizer.backend.NAME, evidence={"all": "exact"},
    )  # fmt: skip
