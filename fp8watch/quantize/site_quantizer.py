"""The quantiser of one site, by recipe: from the operand of a GEMM to what its codes stand for.

Upstream:   fp8watch.observer.observation_plan
Downstream: fp8watch.kernels.backend
Shapes:     operand [M, K] -> dequantised [M, K] float32, TileStats     Thread: training, and autograd's
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, partial
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from fp8watch.kernels import reference
from fp8watch.kernels.backend import Backend, Into, Merging, measure, measure_both, quantize_dequantize_both
from fp8watch.numerics.formats import fp8_format, number_format
from fp8watch.numerics.quantize_job import QuantizeJob, quantize_jobs
from fp8watch.numerics.tile_stats import TileStats
from fp8watch.quantize import nvfp4
from fp8watch.quantize.mxfp8 import e8m0_scale, e8m0_scale_inv, mx_amax
from fp8watch.quantize.per_tensor import DelayedScale
from fp8watch.quantize.rowwise import rowwise_scale
from fp8watch.recipe import GEMMS, ROW, AmaxHistory, OperandRecipe, Recipe


class Wanted(Enum):
    """What a call makes of an operand for its GEMMs."""

    VALUES = "what the codes stand for"
    CODES = "codes and scale_inv"
    BOTH = "values now, codes and scale_inv for later"

    __hash__ = object.__hash__  # there is one of each, and Enum's own is a call of Python


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

    An operand whose rowwise and columnwise copies have the same codes and scales has one site, the first: whole
    tensors, and 128×128 and 16×16 blocks. So per-tensor recipes have 3 sites, blockwise and nvfp4 5, mxfp8 and rowwise 6; fewer where an
    operand stays in high precision, because GEMMs that read it read nothing quantised.
    """
    in_fp8 = dict(zip(GEMMS, recipe.gemms, strict=True))
    found: list[SitePlace] = []
    for operand, spec in recipe.quantised:
        read = [place for place in _BOTH[operand] if in_fp8[place.gemm]]
        found += read[:1] if spec.shared else read
    return tuple(found)


@dataclass
class SiteQuantizer:
    """Quantises one site with a scale for each tile from the tile's own amax. Recipes with a state subclass it."""

    spec: OperandRecipe
    columnwise: bool
    backend: Backend

    stateful: ClassVar[bool] = False
    """Whether a call leaves something behind that later calls need: then it must see the statistics of each."""

    force_scale_1: ClassVar[bool] = True
    """Whether a tile whose amax is zero or infinite has scale 1."""

    invariant: ClassVar[bool] = True
    """Whether scales are bound to the amax of the tensor that they quantise."""

    rows_bound: ClassVar[bool] = True
    """Whether what rounding takes of an element follows from the amax of the tensor, see `rounding_bound`."""

    def __post_init__(self) -> None:
        fixed = self.spec.tile not in (None, ROW)
        self._jobs = self._jobs_for(self.tile_for((0, 0))) if fixed else None

    @property
    def computed_by(self) -> str:
        """Name of the backend whose arithmetic this is."""
        return self.backend.NAME

    def as_cast(self, x_MK: Tensor) -> Tensor:
        """The operand as it enters the cast."""
        return x_MK

    def tile_for(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Tile in the operand's own rows × columns; a columnwise tile runs along the tokens: (128, 1)."""
        if self.spec.tile is None:
            return max(shape[0], 1), max(shape[1], 1)  # an expert without tokens has no rows
        if self.spec.tile == ROW:
            return (max(shape[0], 1), 1) if self.columnwise else (1, shape[1])
        m, k = self.spec.tile
        return (k, m) if self.columnwise else (m, k)

    def begin(self, number: int) -> None:
        """Hear the number of the pass to which the next calls belong."""

    def end(self, stats: TileStats) -> None:
        """Hear the statistics of a call that counts."""

    def close_passes(self, number: int) -> None:
        """Hear that passes with another number are over."""

    def scale(self, x_MK: Tensor) -> Tensor | None:
        """The scales [Mt, Kt] to use, or None: those that the backend computes."""
        return None

    def job(self, x_MK: Tensor, *, stats: bool, heavy: bool) -> QuantizeJob:
        """What the backend is asked for."""
        jobs = self._jobs or self._jobs_for(self.tile_for((x_MK.shape[0], x_MK.shape[1])))
        return jobs[stats + (stats and heavy)]

    def _jobs_for(self, tile: tuple[int, int]) -> tuple[QuantizeJob, QuantizeJob, QuantizeJob]:
        s = self.spec
        return quantize_jobs(tile, s.format, s.power_2_scale, s.eps, self.force_scale_1, self.invariant)

    def __call__(self, x_MK: Tensor, *, stats: bool, heavy: bool) -> tuple[Tensor, TileStats | None]:
        """Dequantised [M, K] float32 and, when asked for, the statistics of its tiles."""
        job = self.job(x_MK, stats=stats, heavy=heavy)
        out, _, measured = self.backend.quantize_dequantize(x_MK, job, self.scale(x_MK))
        return out, measured

    def measure(self, x_MK: Tensor, *, heavy: bool) -> TileStats:
        """The statistics alone, of an operand that is not multiplied in FP8."""
        return measure(self.backend, x_MK, self.job(x_MK, stats=True, heavy=heavy), self.scale(x_MK))

    def codes(self, x_MK: Tensor, *, stats: bool, heavy: bool) -> tuple[tuple[Tensor, Tensor], TileStats | None]:
        """(codes [M, K], scale_inv [Mt, Kt]) and the statistics, for GEMMs that multiply codes."""
        job = self.job(x_MK, stats=stats, heavy=heavy)
        data, scale_inv, measured = self.backend.quantize(x_MK, job, self.scale(x_MK))
        return (data, scale_inv), measured


@dataclass
class MxQuantizer(SiteQuantizer):
    """Tiles of 32 with E8M0 scales."""

    def scale(self, x_MK: Tensor) -> Tensor:
        """The amax of each tile over FP8_MAX, rounded up to a power of two."""
        return e8m0_scale(e8m0_scale_inv(mx_amax(x_MK, self.columnwise), fp8_format(self.spec.format)))


@dataclass
class RowwiseQuantizer(SiteQuantizer):
    """One scale a row."""

    def scale(self, x_MK: Tensor) -> Tensor:
        """What torchao computes from the amax of each row."""
        return rowwise_scale(x_MK, self.columnwise, self.spec)


@dataclass
class Nvfp4Quantizer(SiteQuantizer):
    """E2M1 in blocks of 16, by torch operations whatever the backend; that one dequantises what was kept."""

    invariant = False
    rows_bound = False

    @property
    def computed_by(self) -> str:
        """Always the reference: no other backend has these scales."""
        return reference.NAME

    def _jobs_for(self, tile: tuple[int, int]) -> tuple[QuantizeJob, QuantizeJob, QuantizeJob]:
        fmt = number_format(self.spec.format)
        none, light, full = (
            QuantizeJob(tile, fmt, False, invariant=False, stats=stats, heavy=heavy)
            for stats, heavy in ((False, False), (True, False), (True, True))
        )
        return none, light, full

    def as_cast(self, x_MK: Tensor) -> Tensor:
        """The operand, after the Hadamard transform where this is the columnwise copy of one that goes through it."""
        return nvfp4.rotated(x_MK) if self.columnwise and self.spec.random_hadamard_transform else x_MK

    def _cast(self, x_MK: Tensor, *, stats: bool, heavy: bool) -> tuple[nvfp4.Nvfp4, Tensor, TileStats | None]:
        job, x = self.job(x_MK, stats=stats, heavy=heavy), self.as_cast(x_MK)
        noise = nvfp4.noise_of(x) if self.spec.stochastic_rounding else None
        made = nvfp4.cast(x, job.tile, noise)
        return made, x, nvfp4.measure(made, (x.shape[0], x.shape[1]), job, x.dtype) if stats else None

    def __call__(self, x_MK: Tensor, *, stats: bool, heavy: bool) -> tuple[Tensor, TileStats | None]:
        """As of any quantiser."""
        made, x, measured = self._cast(x_MK, stats=stats, heavy=heavy)
        return reference.untiled(made.kept_t() * reference.spread(made.scale_inv), x), measured

    def measure(self, x_MK: Tensor, *, heavy: bool) -> TileStats:
        """As of any quantiser."""
        measured = self._cast(x_MK, stats=True, heavy=heavy)[2]
        assert measured is not None
        return measured

    def codes(self, x_MK: Tensor, *, stats: bool, heavy: bool) -> tuple[tuple[Tensor, Tensor], TileStats | None]:
        """Codes are those of E4M3 for the same numbers."""
        made, x, measured = self._cast(x_MK, stats=stats, heavy=heavy)
        fmt = number_format(self.spec.format)
        return (reference.untiled(made.kept_t().to(fmt.dtype), x), made.scale_inv), measured


@dataclass
class DelayedQuantizer(SiteQuantizer):
    """One scale for the tensor, from the amax of earlier passes. The scale rolls where a new pass begins, not where
    the old one ends: a recomputation in between reads the scale that its forward had."""

    state: DelayedScale
    number: int | None = None  # of the pass that the history's entry 0 belongs to

    stateful = True
    invariant = False

    def begin(self, number: int) -> None:
        """Roll the scale once where the pass is a new one."""
        if self.number is not None and self.number != number:
            self.state.roll()
        self.number = number

    def close_passes(self, number: int) -> None:
        """Roll where the pass has ended, without waiting for the next."""
        if self.number is not None and self.number != number:
            self.state.roll()
            self.number = None

    def end(self, stats: TileStats) -> None:
        """Note the amax of this call."""
        self.state.record(stats.amax, stats.num_nan)

    def scale(self, x_MK: Tensor) -> Tensor:
        """The scale [1, 1] of this pass, on the operand's device."""
        self.state.to(x_MK.device)
        return self.state.scale


def run_quantizers(
    used: Sequence[SiteQuantizer],
    x_MK: Tensor,
    *,
    together: bool,
    stats: bool,
    heavy: bool,
    wanted: tuple[Wanted, ...] = (),
    into: Into | None = None,
) -> list[tuple[Any, TileStats | None]]:
    """Run one quantiser, or both directions of an operand: from one read where `read_together` says so.

    `wanted` says for each what the result is: values (as without it), (codes, scale_inv), or (values, (codes, scale_inv)).
    `into` may be given where `can_merge` says so.
    """
    if into is not None:
        return [*zip(*run_into(used, x_MK, heavy=heavy, wanted=wanted, into=into), strict=True)]
    first, codes = used[0], [w is not Wanted.VALUES for w in wanted] or [False] * len(used)
    if all(codes):
        found = _run_for_codes(used, x_MK, stats=stats, heavy=heavy)
    elif not together or any(codes):
        mixed = getattr(first.backend, "values_and_codes", None)
        if together and mixed is not None and codes == [False, True]:
            job = first.job(x_MK, stats=stats, heavy=heavy)
            values, of_row, later, of_column = mixed(x_MK, job, _scales(used, x_MK))
            return [(values, of_row), (later, of_column)]
        found = [(q.codes if c else q)(x_MK, stats=stats, heavy=heavy) for q, c in zip(used, codes, strict=True)]
    else:
        found = _run_together(used, x_MK, stats=stats, heavy=heavy)
    if Wanted.BOTH in wanted:
        shape = (x_MK.shape[0], x_MK.shape[1])
        found = [
            ((q.backend.dequantize(out[0], out[1], q.tile_for(shape)), out), seen) if w is Wanted.BOTH else (out, seen)
            for q, w, (out, seen) in zip(used, wanted, found, strict=True)
        ]
    return found


def run_into(
    used: Sequence[SiteQuantizer], x_MK: Tensor, *, heavy: bool, wanted: tuple[Wanted, ...], into: Into
) -> tuple[list[Any], list[TileStats]]:
    """As `run_quantizers`, in one call that merges what it measures: results, and statistics, one a quantiser."""
    first = used[0]
    job = first.job(x_MK, stats=True, heavy=heavy)
    outs, seen = cast(Merging, first.backend).values_into(x_MK, job, into, codes=_asks_codes(len(used), wanted))
    if wanted and wanted[0] is Wanted.BOTH:
        codes, scale_inv = outs[0]
        outs[0] = first.backend.dequantize(codes, scale_inv, job.tile), outs[0]
    return outs, seen


@lru_cache(maxsize=64)
def _asks_codes(num: int, wanted: tuple[Wanted, ...]) -> tuple[bool, ...]:
    return tuple(w is not Wanted.VALUES for w in wanted) or (False,) * num


def _run_together(
    used: Sequence[SiteQuantizer], x_MK: Tensor, *, stats: bool, heavy: bool
) -> list[tuple[Any, TileStats | None]]:
    first = used[0]
    job = first.job(x_MK, stats=stats, heavy=heavy)
    both = getattr(first.backend, "quantize_dequantize_both", None) or partial(quantize_dequantize_both, first.backend)
    (row, _, of_row), (column, _, of_column) = both(x_MK, job, _scales(used, x_MK))
    return [(row, of_row), (column, of_column)]


def measure_operand(
    used: Sequence[SiteQuantizer], x_MK: Tensor, *, together: bool, heavy: bool, into: Into | None = None
) -> list[TileStats]:
    """As `run_quantizers` with statistics, where nobody wants what is quantised: nothing of the operand's size is written."""
    if into is not None:
        job = used[0].job(x_MK, stats=True, heavy=heavy)
        return cast(Merging, used[0].backend).measure_into(x_MK, job, into, both=together)
    if not together:
        return [q.measure(x_MK, heavy=heavy) for q in used]
    first = used[0]
    job = first.job(x_MK, stats=True, heavy=heavy)
    both = getattr(first.backend, "measure_both", None) or partial(measure_both, first.backend)
    return [*both(x_MK, job, _scales(used, x_MK))]


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
        and (first.spec is second.spec or first.spec == second.spec)
    )


def can_merge(used: Sequence[SiteQuantizer]) -> bool:
    """Whether one call of the backend quantises, measures and merges what these are asked for: one direction, or both from
    one read, with the scales that the backend computes itself."""
    return (
        all(type(q) is SiteQuantizer and getattr(q.backend, "MERGES", False) for q in used)
        and (len(used) == 1 or read_together(used))
    )  # fmt: skip


def _scales(used: Sequence[SiteQuantizer], x_MK: Tensor) -> tuple[Tensor, Tensor] | None:
    """The scales to use in both directions where the backend does not compute them."""
    rowwise, columnwise = (q.scale(x_MK) for q in used)
    return None if rowwise is None or columnwise is None else (rowwise, columnwise)


def _run_for_codes(
    used: Sequence[SiteQuantizer], x_MK: Tensor, *, stats: bool, heavy: bool
) -> list[tuple[Any, TileStats | None]]:
    first = used[0]
    both = getattr(first.backend, "quantize_both", None)  # one read, and columnwise codes as wgrad wants them
    if len(used) == 2 and both is not None and type(first) is SiteQuantizer and type(used[1]) is SiteQuantizer:
        got = both(x_MK, first.job(x_MK, stats=stats, heavy=heavy), transposed=True)
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
    if spec is None:
        raise ValueError(f"{place.operand} stays in high precision in this recipe: it has no quantiser")
    if spec.tile == ROW:
        return RowwiseQuantizer(spec, columnwise, backend)
    if spec.scaling == "mx":
        return MxQuantizer(spec, columnwise, backend)
    if spec.scaling == "nvfp4":
        return Nvfp4Quantizer(spec, columnwise, backend if device.type == "cpu" else cast("Backend", reference))
    if spec.scaling != "delayed":
        return SiteQuantizer(spec, columnwise, backend)
    fmt, history = fp8_format(spec.format), recipe.history or AmaxHistory()
    if state is None or state.format is not fmt or state.history != history:
        state = DelayedScale(fmt, history, device if device.type != "meta" else "cpu")
    return DelayedQuantizer(spec, columnwise, backend, state)
