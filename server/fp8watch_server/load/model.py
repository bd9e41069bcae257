"""Sites of a synthetic transformer and their statistics in healthy training.

Shapes:     number of sites -> list[record.Site], SiteTraits of arrays [S]
Thread:     any; pure

Seven Linears a layer, five operands a Linear, in the order of the data flow: as attach would register them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8watch_agent.record import AMAX_BUCKET_OFFSET, NUM_AMAX_BUCKETS, NUM_DEPTH_BUCKETS, Site, site_id

Array = npt.NDArray[Any]

NUM_TOKENS, WIDTH = 8192, 4096
LINEARS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
# operand, direction, GEMM, tile, shape, log2 of a typical tile amax
OPERANDS = (
    ("input", "rowwise", "fprop", (1, 128), (NUM_TOKENS, WIDTH), 2.0),
    ("input", "columnwise", "wgrad", (128, 1), (NUM_TOKENS, WIDTH), 2.0),
    ("weight", "rowwise", "fprop", (128, 128), (WIDTH, WIDTH), -3.0),
    ("grad_output", "rowwise", "dgrad", (1, 128), (NUM_TOKENS, WIDTH), -14.0),
    ("grad_output", "columnwise", "wgrad", (128, 1), (NUM_TOKENS, WIDTH), -14.0),
)
SITES_PER_LAYER = len(LINEARS) * len(OPERANDS)
_FORWARD = 3  # operands quantised in the forward pass


def make_sites(num_sites: int, *, power_2_scale: bool = True, recipe: str = "blockwise") -> list[Site]:
    """The first `num_sites` sites of a model that is deep enough."""
    num_modules = -(-num_sites // len(OPERANDS))
    made = []
    for m in range(num_modules):
        module = f"model.layers.{m // len(LINEARS)}.{LINEARS[m % len(LINEARS)]}"
        for k, (operand, direction, gemm, tile, shape, _) in enumerate(OPERANDS):
            back = num_modules * _FORWARD + (num_modules - 1 - m) * (len(OPERANDS) - _FORWARD) + k - _FORWARD
            made.append(
                Site(
                    id=site_id(module, operand, direction),
                    module=module,
                    operand=operand,
                    direction=direction,
                    gemm=gemm,
                    order=m * _FORWARD + k if k < _FORWARD else back,
                    shape=shape,
                    tile=tile,
                    format="E4M3",
                    power_2_scale=power_2_scale,
                    eps=0.0,
                    recipe=recipe,
                    backend="load",
                    evidence={"all": "exact"},
                )
            )
    return made[:num_sites]


@dataclass(frozen=True)
class SiteTraits:
    """Constants of each site. Arrays are [S], or [S, buckets]."""

    ids: Array
    num_elements: Array
    num_tiles: Array
    grid: Array  # [S, 2], tile rows and columns
    log2_amax: Array
    wander: Array  # octaves by which amax_max moves from step to step
    spread: Array  # octaves between the tiles of one step
    sqnr_db: Array
    underflow_share: Array
    weight: Array  # bool
    gradient: Array  # bool
    bucket: Array  # [64], log2 of the middle of each bucket of amax_hist
    depth_share: Array  # [S, 32], share of the elements by depth


def traits_of(sites: list[Site], seed: int) -> SiteTraits:
    """Traits from a seed, the same for every rank: replicas differ by their data only."""
    rng, n = np.random.default_rng((seed, 1)), len(sites)
    usual = {(o, d): level for o, d, _, _, _, level in OPERANDS}
    operand = np.array([s.operand for s in sites])
    shape = np.array([s.shape for s in sites], dtype=np.int64).reshape(n, 2)
    tile = np.array([s.tile for s in sites], dtype=np.int64).reshape(n, 2)
    grid = -(-shape // tile)
    weight, gradient = operand == "weight", operand == "grad_output"
    level = np.array([usual[s.operand, s.direction] for s in sites]) + rng.normal(0, 0.7, n)
    depth = np.arange(NUM_DEPTH_BUCKETS) + 0.5
    share = 2.0 ** -depth[None, :] * rng.uniform(0.8, 1.2, (n, NUM_DEPTH_BUCKETS))  # density flat at zero
    return SiteTraits(
        ids=np.array([s.id for s in sites], dtype=np.uint64),
        num_elements=shape.prod(axis=1),
        num_tiles=grid.prod(axis=1),
        grid=grid,
        log2_amax=level,
        wander=np.where(weight, 0.002, np.where(gradient, 0.5, 0.09)),
        spread=np.where(gradient, 1.6, np.where(weight, 0.4, 0.6)),
        sqnr_db=31.6 + rng.normal(0, 0.3, n),
        underflow_share=np.where(gradient, 3e-3, 2e-5) * rng.uniform(0.5, 2.0, n),
        weight=weight,
        gradient=gradient,
        bucket=np.arange(NUM_AMAX_BUCKETS) - float(AMAX_BUCKET_OFFSET) + 0.5 + np.log2(1.75),
        depth_share=share / share.sum(axis=1, keepdims=True),
    )
