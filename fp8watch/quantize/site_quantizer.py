"""The quantiser of one site, by recipe: from the operand of a GEMM to what its codes stand for.

Upstream:   fp8watch.layers.custom_ops     Downstream: fp8watch.quantize, fp8watch.kernels.registry
Shapes:     operand [M, K] -> dequantised [M, K] float32, TileStats     Thread: training, and autograd's
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8watch.kernels.registry import Backend, measure, measure_both, quantize_dequantize_both
from fp8watch.numerics.formats import FORMATS
from fp8watch.numerics.tile_stats import TileStats
from fp8watch.quantize.mxfp8 import e8m0_scale, e8m0_scale_inv, mx_amax
from fp8watch.quantize.per_tensor import DelayedScale
from fp8watch.recipe import OPERANDS, AmaxHistory, OperandRecipe, Recipe


class SitePlace(NamedTuple):
    """One site of a Linear: an operand in a direction, and the GEMM that reads it first."""

    operand: str
    direction: str
    gemm: str


_BOTH = {
    "input": (SitePlace("input", "rowwise", "fprop"), SitePlace("input", "columnwise", "wgrad")),
    "weight": (SitePlace("weight", "rowwise", "fprop"), SitePlace("weight", "columnwise", "dgrad")),
    "grad_output": (SitePlace("grad_output", "rowwise", "dgrad"), SitePlace("grad_output", "columnwise", "wgrad")),
}


def places(recipe: Recipe) -> tuple[SitePlace, ...]:
    """The sites of a Linear under a recipe, in the order of their rows in the slab.

    An operand whose rowwise and columnwise copies have the same codes and scales has the rowwise site only: whole
    tensors, and 128×128 blocks. So per-tensor recipes have 3 sites, blockwise 5, mxfp8 6.
    """
    return tuple(p for o in OPERANDS for p in (_BOTH[o][:1] if recipe.operand(o).shared else _BOTH[o]))


@dataclass
class SiteQuantizer:
    """Quantises one site with a scale for each tile from the tile's own amax. Recipes with a state subclass it."""

    spec: OperandRecipe
    columnwise: bool
    backend: Backend

    stateful = False
    """Whether a call leaves something behind that later calls need: then it must see the statistics of each."""

    def tile_for(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Tile in the operand's own rows × columns; a columnwise tile runs along the tokens: (128, 1)."""
        if self.spec.tile is None:
            return shape
        m, k = self.spec.tile
        return (k, m) if self.columnwise else (m, k)

    def begin(self, number: int) -> None:
        """Hear the number of the pass to which the next calls belong."""

    def end(self, stats: TileStats) -> None:
        """Hear the statistics of a call that counts."""

    def settle(self, number: int) -> None:
        """Hear that passes with another number are over."""

    def __call__(self, x_MK: Tensor, *, stats: bool, heavy: bool) -> tuple[Tensor, TileStats | None]:
        """Dequantised [M, K] float32 and, when asked for, the statistics of its tiles."""
        s = self.spec
        tile = self.tile_for((x_MK.shape[0], x_MK.shape[1]))
        out, _, measured = self.backend.quantize_dequantize(
            x_MK, tile, FORMATS[s.format], s.power_2_scale, s.eps, stats=stats, heavy=heavy
        )
        return out, measured

    def measure(self, x_MK: Tensor, *, heavy: bool) -> TileStats:
        """The statistics alone, of an operand that is not multiplied in FP8."""
        s = self.spec
        tile = self.tile_for((x_MK.shape[0], x_MK.shape[1]))
        return measure(self.backend, x_MK, tile, FORMATS[s.format], s.power_2_scale, s.eps, heavy=heavy)

    def codes(self, x_MK: Tensor, *, stats: bool, heavy: bool) -> tuple[tuple[Tensor, Tensor], TileStats | None]:
        """(codes [M, K], scale_inv [Mt, Kt]) and the statistics, for GEMMs that multiply codes."""
        s = self.spec
        tile = self.tile_for((x_MK.shape[0], x_MK.shape[1]))
        data, scale_inv, measured = self.backend.quantize(
            x_MK, tile, FORMATS[s.format], s.power_2_scale, s.eps, stats=stats, heavy=heavy
        )
        return (data, scale_inv), measured


@dataclass
class MxQuantizer(SiteQuantizer):
    """Tiles of 32 with E8M0 scales."""

    def __call__(self, x_MK: Tensor, *, stats: bool, heavy: bool) -> tuple[Tensor, TileStats | None]:
        """As SiteQuantizer."""
        fmt = FORMATS[self.spec.format]
        scale = e8m0_scale(e8m0_scale_inv(mx_amax(x_MK, self.columnwise), fmt))
        tile = self.tile_for((x_MK.shape[0], x_MK.shape[1]))
        out, _, measured = self.backend.quantize_dequantize(
            x_MK, tile, fmt, True, 0.0, scale=scale, stats=stats, heavy=heavy
        )
        return out, measured

    def measure(self, x_MK: Tensor, *, heavy: bool) -> TileStats:
        """As SiteQuantizer."""
        fmt = FORMATS[self.spec.format]
        scale = e8m0_scale(e8m0_scale_inv(mx_amax(x_MK, self.columnwise), fmt))
        tile = self.tile_for((x_MK.shape[0], x_MK.shape[1]))
        return measure(self.backend, x_MK, tile, fmt, True, 0.0, scale=scale, heavy=heavy)


@dataclass
class DelayedQuantizer(SiteQuantizer):
    """One scale for the tensor, from the amax of earlier passes. The scale rolls where a new pass begins, not where
    the old one ends: a recomputation in between reads the scale that its forward had."""

    state: DelayedScale
    number: int | None = None  # of the pass that the history's entry 0 belongs to

    stateful = True

    def begin(self, number: int) -> None:
        """Roll the scale once where the pass is a new one."""
        if self.number is not None and self.number != number:
            self.state.roll()
        self.number = number

    def settle(self, number: int) -> None:
        """Roll where the pass has ended, without waiting for the next."""
        if self.number is not None and self.number != number:
            self.state.roll()
            self.number = None

    def end(self, stats: TileStats) -> None:
        """Note the amax of this call."""
        self.state.record(stats.amax, stats.num_nan)

    def __call__(self, x_MK: Tensor, *, stats: bool, heavy: bool) -> tuple[Tensor, TileStats | None]:
        """As SiteQuantizer."""
        self.state.to(x_MK.device)
        tile, fmt = self.tile_for((x_MK.shape[0], x_MK.shape[1])), self.state.format
        out, _, measured = self.backend.quantize_dequantize(
            x_MK, tile, fmt, False, 0.0, scale=self.state.scale, invariant=False, stats=stats, heavy=heavy
        )
        return out, measured

    def measure(self, x_MK: Tensor, *, heavy: bool) -> TileStats:
        """As SiteQuantizer."""
        self.state.to(x_MK.device)
        tile, fmt = self.tile_for((x_MK.shape[0], x_MK.shape[1])), self.state.format
        return measure(self.backend, x_MK, tile, fmt, False, 0.0, scale=self.state.scale, invariant=False, heavy=heavy)


def run_quantizers(
    used: Sequence[SiteQuantizer], x_MK: Tensor, *, together: bool, stats: bool, heavy: bool, codes: bool = False
) -> list[tuple[Any, TileStats | None]]:
    """Run one quantiser, or both directions of an operand: from one read where `read_together` says so. With `codes` the
    results are (codes, scale_inv), else what they stand for."""
    if codes:
        return _run_for_codes(used, x_MK, stats=stats, heavy=heavy)
    if not together:
        return [q(x_MK, stats=stats, heavy=heavy) for q in used]
    first, s = used[0], used[0].spec
    assert s.tile is not None
    both = getattr(first.backend, "quantize_dequantize_both", None) or partial(quantize_dequantize_both, first.backend)
    (row, _, of_row), (column, _, of_column) = both(
        x_MK, FORMATS[s.format], s.power_2_scale, s.eps,
        length=s.tile[1], scale=_scales(first, x_MK), stats=stats, heavy=heavy,
    )  # fmt: skip
    return [(row, of_row), (column, of_column)]


def measure_operand(used: Sequence[SiteQuantizer], x_MK: Tensor, *, together: bool, heavy: bool) -> list[TileStats]:
    """As `run_quantizers` with statistics, where nobody wants what is quantised: nothing of the operand's size is written."""
    if not together:
        return [q.measure(x_MK, heavy=heavy) for q in used]
    first, s = used[0], used[0].spec
    assert s.tile is not None
    both = getattr(first.backend, "measure_both", None) or partial(measure_both, first.backend)
    return [
        *both(
            x_MK, FORMATS[s.format], s.power_2_scale, s.eps,
            length=s.tile[1], scale=_scales(first, x_MK), heavy=heavy,
        )
    ]  # fmt: skip


def read_together(used: Sequence[SiteQuantizer]) -> bool:
    """Whether these are both directions of one operand, as the recipe made them, so that one read may serve both."""
    if len(used) != 2:
        return False
    first, second = used
    kind = type(first)
    return (
        kind in (SiteQuantizer, MxQuantizer)
        and kind is type(second)
        and not first.columnwise
        and not first.spec.shared
        and first.backend is second.backend
        and first.spec == second.spec
    )


def _scales(first: SiteQuantizer, x_MK: Tensor) -> tuple[Tensor, Tensor] | None:
    """The scales to use in both directions where the backend does not compute them."""
    if type(first) is not MxQuantizer:
        return None
    fmt = FORMATS[first.spec.format]
    rowwise, columnwise = (e8m0_scale(e8m0_scale_inv(mx_amax(x_MK, c), fmt)) for c in (False, True))
    return rowwise, columnwise


def _run_for_codes(
    used: Sequence[SiteQuantizer], x_MK: Tensor, *, stats: bool, heavy: bool
) -> list[tuple[Any, TileStats | None]]:
    first = used[0]
    both = getattr(first.backend, "quantize_both", None)  # one read, and columnwise codes as wgrad wants them
    if len(used) == 2 and both is not None and type(first) is SiteQuantizer and type(used[1]) is SiteQuantizer:
        s = first.spec
        got = both(x_MK, FORMATS[s.format], s.power_2_scale, s.eps, transposed=True, stats=stats, heavy=heavy)
        return [((data, scale_inv), measured) for data, scale_inv, measured in got]
    return [q.codes(x_MK, stats=stats, heavy=heavy) for q in used]


def site_quantizer(
    recipe: Recipe, place: SitePlace, backend: Backend, device: torch.device, state: DelayedScale | None = None
) -> SiteQuantizer:
    """Make the quantiser of a site.

    Args:
        recipe: of the Linear.
        place: operand and direction.
        backend: that does the arithmetic.
        device: where the operand will lie; a state follows its operand if that is elsewhere.
        state: of an earlier attach to go on with, if it is of the same format and history.
    """
    spec, columnwise = recipe.operand(place.operand), place.direction == "columnwise"
    if spec.scaling == "mx":
        return MxQuantizer(spec, columnwise, backend)
    if spec.scaling != "delayed":
        return SiteQuantizer(spec, columnwise, backend)
    fmt, history = FORMATS[spec.format], recipe.history or AmaxHistory()
    if state is None or state.format is not fmt or state.history != history:
        state = DelayedScale(fmt, history, device if device.type != "meta" else "cpu")
    return DelayedQuantizer(spec, columnwise, backend, state)
