"""How a GEMM reads an operand in each format that is tried: our recipes by our quantisers, other formats emulated.

Shapes:     operand [M, K] -> what its codes stand for, float32 [M, K]
Thread:     the caller's
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fp8watch.diagnose.diagnosis_copy import LinearCall
from fp8watch.diagnose.number_grid import E5M6
from fp8watch.diagnose.nvfp4 import quantize_nvfp4, random_signs
from fp8watch.diagnose.trial_linear import Trial
from fp8watch.kernels.backend import Backend
from fp8watch.kernels.registry import resolve
from fp8watch.numerics.formats import fp8_format
from fp8watch.numerics.quantize_job import quantize_jobs
from fp8watch.quantize.mxfp8 import TILE as MX_TILE
from fp8watch.quantize.mxfp8 import mx_amax
from fp8watch.quantize.per_tensor import DelayedScale
from fp8watch.quantize.site_quantizer import SitePlace, SiteQuantizer, site_quantizer
from fp8watch.recipe import GEMMS, AmaxHistory, Recipe

Scales = Mapping[tuple[str, str], DelayedScale]
"""(module, operand) -> the delayed scale that it has."""


class Seen(NamedTuple):
    """What one operand became."""

    values: Tensor  # float32 [M, K]
    num_saturated: int


class Reader(Protocol):
    """One format for all operands of a model."""

    @property
    def gemms(self) -> tuple[str, ...]:
        """Those whose two operands are quantised."""

    def see(self, module: str, operand: str, x_MK: Tensor, columnwise: bool) -> Seen:
        """Quantise one operand."""

    def note(self, call: LinearCall, grad_MN: Tensor) -> None:
        """Hear of a call of an earlier pass, for scales that follow the past."""

    def end_pass(self) -> None:
        """Hear that a pass is over."""


def trial_of(reader: Reader, module: str, gemms: tuple[str, ...] | None = None) -> Trial:
    """What a Linear computes when a format is tried on it alone, in those of its GEMMs that the format quantises."""
    chosen = reader.gemms if gemms is None else tuple(g for g in gemms if g in reader.gemms)
    return Trial(lambda operand, x, columnwise: reader.see(module, operand, x, columnwise).values, chosen)


class RecipeReader:
    """One of our recipes. Delayed scales are those given, or follow the passes that `note` hears of."""

    def __init__(self, recipe: Recipe, device: torch.device, backend: str | None = None, scales: Scales | None = None):
        self.recipe = recipe
        self._device, self._backend = device, resolve(backend, device)
        self._scales: dict[tuple[str, str], DelayedScale] = dict(scales or {})
        self._made: dict[tuple[str, str, bool], SiteQuantizer] = {}

    @property
    def gemms(self) -> tuple[str, ...]:
        return tuple(name for name, quantised in zip(GEMMS, self.recipe.gemms, strict=True) if quantised)

    def see(self, module: str, operand: str, x_MK: Tensor, columnwise: bool) -> Seen:
        spec = self.recipe.operand(operand)
        if spec is None:
            return Seen(x_MK.float(), 0)
        delayed = spec.scaling == "delayed"
        key = (module if delayed else "", operand, columnwise)
        quantizer = self._made.get(key)
        if quantizer is None:
            state = self._scales.get((module, operand)) if delayed else None
            place = SitePlace(operand, "columnwise" if columnwise else "rowwise", "")
            quantizer = self._made[key] = site_quantizer(self.recipe, place, self._backend, self._device, state)
        values, stats = quantizer(x_MK, stats=True, heavy=False)
        assert stats is not None
        return Seen(values, int(stats.num_saturated.sum()))

    def note(self, call: LinearCall, grad_MN: Tensor) -> None:
        for operand, x in (("input", call.x_MK), ("weight", call.weight_NK), ("grad_output", grad_MN)):
            spec = self.recipe.operand(operand)
            if spec is None or spec.scaling != "delayed":
                continue
            state = self._scales.get((call.module, operand))
            if state is None:
                history = self.recipe.history or AmaxHistory()
                state = self._scales[call.module, operand] = DelayedScale(fp8_format(spec.format), history, x.device)
            state.record(x.detach().abs().amax().float())

    def end_pass(self) -> None:
        for state in self._scales.values():
            state.roll()

    @property
    def follows_the_past(self) -> bool:
        """Whether an operand has a delayed scale that no pass has set yet."""
        return self.recipe.history is not None and not self._scales


class _Stateless:
    """All three GEMMs, nothing remembered."""

    gemms: tuple[str, ...] = tuple(GEMMS)

    def note(self, call: LinearCall, grad_MN: Tensor) -> None:
        """Nothing."""

    def end_pass(self) -> None:
        """Nothing."""


class CastReader(_Stateless):
    """A cast to one of torch's own types: bfloat16, float16. What overflows becomes Inf, as the cast gives it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def see(self, module: str, operand: str, x_MK: Tensor, columnwise: bool) -> Seen:
        values = x_MK.to(self._dtype).float()
        return Seen(values, int((torch.isinf(values) & torch.isfinite(x_MK)).sum()))


class MxFloorReader(_Stateless):
    """MXFP8 with the shared exponent rounded down, as the OCP specification has it: what lies above 448 of it clips."""

    def __init__(self, device: torch.device, backend: str | None = None, fp8: str = "E4M3") -> None:
        self._backend: Backend = resolve(backend, device)
        self._fmt = fp8_format(fp8)
        self._max_exponent = 8 if fp8 == "E4M3" else 15

    def see(self, module: str, operand: str, x_MK: Tensor, columnwise: bool) -> Seen:
        amax = mx_amax(x_MK, columnwise)
        exponent = ((amax.view(torch.int32) >> 23) - 127 - self._max_exponent).clamp(-126, 127)
        scale = torch.ldexp(torch.ones_like(amax), -exponent).masked_fill(amax.isnan(), torch.nan)
        tile = (MX_TILE, 1) if columnwise else (1, MX_TILE)
        job = quantize_jobs(tile, self._fmt.name, invariant=False)[1]
        values, _, stats = self._backend.quantize_dequantize(x_MK, job, scale)
        assert stats is not None
        return Seen(values, int(stats.num_saturated.sum()))


class Nvfp4Reader(_Stateless):
    """NVFP4 with what its training recipe adds: 16×16 blocks of weights, stochastic rounding of gradients, the random
    Hadamard transform of what wgrad reads."""

    def __init__(
        self, *, square: bool = False, stochastic: bool = False, transform: bool = False, seed: int = 0
    ) -> None:
        self._square, self._stochastic, self._transform, self._seed = square, stochastic, transform, seed

    def see(self, module: str, operand: str, x_MK: Tensor, columnwise: bool) -> Seen:
        generator = None
        if self._stochastic and operand == "grad_output":
            generator = torch.Generator(device=x_MK.device).manual_seed(self._seed)
        turned = self._transform and columnwise and operand != "weight"
        found = quantize_nvfp4(
            x_MK, columnwise=columnwise, square=self._square and operand == "weight", generator=generator,
            signs=random_signs(self._seed, x_MK.device) if turned else None,
        )  # fmt: skip
        return Seen(found.values, int(found.num_saturated))


class E5M6Reader:
    """E5M6 inputs in 1×128 tiles with power-of-two scales, as DeepSeek-V3 keeps those of the Linear behind attention; the
    other operands as another reader has them."""

    def __init__(self, others: Reader) -> None:
        self._others = others

    @property
    def gemms(self) -> tuple[str, ...]:
        return self._others.gemms

    def see(self, module: str, operand: str, x_MK: Tensor, columnwise: bool) -> Seen:
        if operand != "input":
            return self._others.see(module, operand, x_MK, columnwise)
        return Seen(round_e5m6(x_MK, columnwise=columnwise), 0)

    def note(self, call: LinearCall, grad_MN: Tensor) -> None:
        self._others.note(call, grad_MN)

    def end_pass(self) -> None:
        self._others.end_pass()


def round_e5m6(x_MK: Tensor, *, columnwise: bool = False) -> Tensor:
    """x in E5M6, tiles of 128 with power-of-two scales rounded down so that nothing finite clips: float32 [M, K]."""
    x = x_MK.detach().float()
    x = x.t() if columnwise else x
    k = x.shape[1]
    tiles = nn.functional.pad(x, (0, -k % 128)).reshape(len(x), -(-k // 128), 128)
    amax = torch.nan_to_num(tiles.abs(), nan=0.0, posinf=0.0).amax(2, keepdim=True)
    quotient = torch.full_like(amax, E5M6.max_finite) / amax
    exponent = (torch.frexp(torch.where(amax > 0, quotient, torch.ones_like(amax))).exponent - 1).clamp(-126, 126)
    scale = torch.ldexp(torch.ones_like(amax), exponent)
    values = (E5M6.round(tiles * scale) / scale).flatten(1)[:, :k]
    return (values.t() if columnwise else values).contiguous()
