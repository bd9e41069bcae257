"""Every quantiser and every FP8 GEMM of this machine, held against what they must give, outside of training.

Shapes:     made-up operands [M, K], [N, K], [M, N] -> results, one a quantiser or GEMM
Thread:     the caller's
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fp8watch import recipe as recipes
from fp8watch.kernels import BACKEND_NAMES, available, emulated_gemm, reference, scaled_mm
from fp8watch.kernels.scaled_mm import Codes
from fp8watch.layers.shadow_gemm import Factor, check_gemm
from fp8watch.quantize.backend_choice import NO_KERNEL, backend_of
from fp8watch.quantize.self_consistency import Reads, check_quantiser
from fp8watch.quantize.site_quantizer import DelayedQuantizer, SitePlace, SiteQuantizer, places, site_quantizer
from fp8watch.recipe import Recipe

Status = Literal["PASS", "FAIL", "NOT AVAILABLE"]

GEMM_ERROR, GEMM_GAIN = 0.002, 0.05
"""Of a GEMM that passes: error, and distance of the gain from 1. As the collector judges them by default."""

PHASES = 8
"""Looks at a quantiser, at other tiles each."""

LENGTHS = (128, 512, 2048, 8192)
"""Contractions whose error is shown: an accumulator that is too narrow loses more the longer it adds."""

PATHS = ("emulated", "scaled_mm")
"""How attach computes GEMMs: products of dequantised operands, or torch._scaled_mm of codes."""

GEMMS = ("fprop", "dgrad", "wgrad")


class Shape(NamedTuple):
    """Of a Linear: M tokens, K features in, N features out."""

    m: int
    k: int
    n: int

    def __str__(self) -> str:
        return f"{self.m}×{self.k}×{self.n}"


SHAPES = (Shape(256, 1024, 384), Shape(200, 304, 144))


@dataclass(frozen=True)
class Result:
    """One line of the table."""

    what: str  # quantisers or GEMMs
    where: str  # backend or path, and recipe
    shape: str
    status: Status
    said: str


def named_recipes() -> dict[str, Recipe]:
    """What is checked, by the name in the table. The environment is left out."""
    none: dict[str, str] = {}
    return {
        "blockwise": recipes.blockwise(environ=none),
        "blockwise FP32 scales": recipes.blockwise(environ=none, power_2_scale=False),
        "blockwise HYBRID": recipes.blockwise(environ=none, fp8_format="HYBRID"),
        "current": recipes.current(environ=none),
        "delayed": recipes.delayed(),
        "mxfp8": recipes.mxfp8(),
        "rowwise": recipes.rowwise(),
        "nvfp4": recipes.nvfp4(environ=none),
    }


def operands(shape: Shape, device: torch.device, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Input [M, K], weight [N, K] and grad_output [M, N]: normal, with rows that differ by octaves, and a zero row."""
    g = torch.Generator().manual_seed(seed)

    def made(rows: int, columns: int, size: float) -> Tensor:
        x = torch.randn(rows, columns, generator=g) * torch.exp2(torch.randn(rows, 1, generator=g)) * size
        x[rows // 2] = 0
        return x.to(device=device, dtype=dtype)

    return {
        "input": made(shape.m, shape.k, 1.0),
        "weight": made(shape.n, shape.k, 0.02),
        "grad_output": made(shape.m, shape.n, 1e-4),
    }


def check_quantisers(
    backend: str, recipe_name: str, recipe: Recipe, shape: Shape, device: torch.device, dtype: torch.dtype
) -> Result:
    """The operands of a Linear in each direction: codes and scales, and what they stand for."""
    of, found, num_tiles = operands(shape, device, dtype), [], 0
    where = f"{backend}, {recipe_name}"
    if recipe.kind == "nvfp4" and backend != reference.NAME:
        if backend != "cpu":
            return Result("quantisers", where, str(shape), "NOT AVAILABLE", NO_KERNEL)
        where += " (torch operations)"
    for place in places(recipe):
        x = of[place.operand]
        try:
            num, faults = _looked_at(recipe, place, backend, device, x)
        except Exception as error:  # noqa: BLE001 - a kernel that does not compile or run is what is looked for
            found.append(f"{place.operand} {place.direction}: {_first_line(error)}")
            continue
        num_tiles += num
        found += [f"{place.operand} {place.direction}: {count} {fault}" for fault, count in faults.items() if count]
    said = "; ".join(found) or f"{num_tiles} looks at tiles of {len(places(recipe))} operands"
    return Result("quantisers", where, str(shape), "FAIL" if found else "PASS", said)


def _looked_at(
    recipe: Recipe, place: SitePlace, backend: str, device: torch.device, x: Tensor
) -> tuple[int, dict[str, int]]:
    """Looks at tiles of one operand in one direction, and what was found wrong."""
    quantizer = _quantizer(recipe, place, backend, device, x)
    (data, scale_inv), _ = quantizer.codes(x, stats=False, heavy=False)
    values, _ = quantizer(x, stats=False, heavy=False)
    scale = quantizer.state.scale if isinstance(quantizer, DelayedQuantizer) else None
    tile, cast = quantizer.tile_for((int(x.shape[0]), int(x.shape[1]))), quantizer.as_cast(x)
    checks = [
        check_quantiser(cast, reads, quantizer.spec, scale, phase=phase)
        for phase in range(PHASES)
        for reads in (Reads(data, scale_inv, tile), Reads(values, None, tile))
    ]
    nan, off = (sum(int(c.elements[i]) for c in checks) for i in range(2))
    tiles, zeroed, scales = (sum(int(c.tiles[i]) for c in checks) for i in range(3))
    return tiles, {"NaN codes": nan, "elements off the grid": off, "zeroed tiles": zeroed, "wrong scales": scales}


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def check_gemms(
    path: str, recipe_name: str, recipe: Recipe, shape: Shape, device: torch.device, dtype: torch.dtype
) -> Result:
    """The three GEMMs of a Linear, "emulated" or by "scaled_mm", against float64 on sampled rows."""
    where = f"{path}, {recipe_name}"
    refused = _refused(path, recipe, shape, device, dtype)
    if refused is not None:
        return Result("GEMMs", where, str(shape), "NOT AVAILABLE", refused)
    said, passes = [], True
    try:
        made = _made(path, recipe, shape, device, dtype)
    except Exception as raised:  # noqa: BLE001 - of a quantiser, as above
        return Result("GEMMs", where, str(shape), "FAIL", _first_line(raised))
    for gemm in GEMMS:
        a, b = _factors(gemm, made)
        try:
            output = _product(path, gemm, a, b, dtype)
        except RuntimeError as refusal:  # of the library, against what its probe has promised
            passes = False
            said.append(f"{gemm}: {_first_line(refusal)}")
            continue
        found = check_gemm(output, a.t() if gemm == "wgrad" else a, b.t() if gemm == "fprop" else b)
        error, gain, bad = float(found.error), float(found.gain), int(found.num_nonfinite)
        passes &= error <= GEMM_ERROR and abs(gain - 1) <= GEMM_GAIN and not bad
        said.append(f"{gemm}: error {error:.0e}, gain {gain:.3f}" + (f", {bad} not finite" if bad else ""))
    return Result("GEMMs", where, str(shape), "PASS" if passes else "FAIL", "; ".join(said))


def error_by_length(path: str, device: torch.device, lengths: Sequence[int] = LENGTHS) -> dict[int, float]:
    """Error of fprop of one path at some contractions: RMS of (output − float64) / RMS, in float32. Of what is refused,
    nothing: `check_gemms` says why."""
    recipe, found = recipes.blockwise(environ={}), {}
    for length in lengths:
        shape = Shape(64, length, 128)
        if _refused(path, recipe, shape, device, torch.float32) is not None:
            return {}
        try:
            a, b = _factors("fprop", _made(path, recipe, shape, device, torch.float32))
            output = _product(path, "fprop", a, b, torch.float32)
        except Exception:  # noqa: BLE001 - as there
            continue
        found[length] = float(check_gemm(output, a, b.t()).error)
    return found


def conformance(
    shapes: Sequence[Shape] = SHAPES,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    wanted: Sequence[str] | None = None,
) -> Iterator[Result]:
    """All of it, line by line.

    Args:
        shapes: of the Linears.
        device: where the operands lie.
        dtype: of operands and results.
        wanted: names of `named_recipes`; None: all.
    """
    device = torch.device(device)
    chosen = {name: made for name, made in named_recipes().items() if wanted is None or name in wanted}
    reasons = available(device)
    for backend in BACKEND_NAMES:
        reason = reasons[backend]
        if reason is not None:
            yield Result("quantisers", backend, "", "NOT AVAILABLE", reason)
            continue
        for name, recipe in chosen.items():
            for shape in shapes:
                yield check_quantisers(backend, name, recipe, shape, device, dtype)
    for path in PATHS:
        reason = scaled_mm.probe(device) if path == "scaled_mm" else None
        if reason is not None:
            yield Result("GEMMs", path, "", "NOT AVAILABLE", reason)
            continue
        for name, recipe in chosen.items():
            for shape in shapes:
                yield check_gemms(path, name, recipe, shape, device, dtype)


def _quantizer(recipe: Recipe, place: Any, backend: str | None, device: torch.device, x: Tensor) -> SiteQuantizer:
    """The quantiser of a site; one with a history has seen this operand once."""
    made = site_quantizer(recipe, place, backend_of(recipe, backend, device), device)
    if isinstance(made, DelayedQuantizer):
        made.begin(0)
        made.end(made.measure(x, heavy=False))
        made.close_passes(1)
    return made


def _made(
    path: str, recipe: Recipe, shape: Shape, device: torch.device, dtype: torch.dtype
) -> dict[tuple[str, str], Any]:
    """What the GEMMs of a path read, by operand and direction: (codes, scale_inv), or dequantised values."""
    of, made = operands(shape, device, dtype), {}
    for place in places(recipe):
        quantizer = _quantizer(recipe, place, None, device, of[place.operand])
        read = quantizer.codes if path == "scaled_mm" else quantizer
        made[place.operand, place.direction] = read(of[place.operand], stats=False, heavy=False)[0]
    return made


def _refused(path: str, recipe: Recipe, shape: Shape, device: torch.device, dtype: torch.dtype) -> str | None:
    if path == "emulated":
        return None
    reason = scaled_mm.probe(device)
    if reason is None and recipe.kind != "blockwise":
        reason = "no 1×128 and 128×128 scales to multiply"
    if reason is None and recipe.high_precision:
        reason = f"{' and '.join(recipe.high_precision)} in high precision"
    if reason is not None:
        return reason
    of_input, of_weight, of_grad = (spec.format for _, spec in recipe.quantised)
    return scaled_mm.refuses(of_input, of_weight, of_grad, dtype)


def _factors(gemm: str, made: dict[tuple[str, str], Any]) -> tuple[Factor, Factor]:
    """What a GEMM reads, each operand in its own rows × columns."""
    first, second = {
        "fprop": (("input", "rowwise"), ("weight", "rowwise")),
        "dgrad": (("grad_output", "rowwise"), ("weight", "columnwise")),
        "wgrad": (("grad_output", "columnwise"), ("input", "columnwise")),
    }[gemm]

    def factor(key: tuple[str, str]) -> Factor:
        found = made[key] if key in made else made[key[0], "rowwise"]  # one quantisation may serve both directions
        return Factor(*found) if isinstance(found, tuple) else Factor(found)

    return factor(first), factor(second)


def _product(path: str, gemm: str, a: Factor, b: Factor, dtype: torch.dtype) -> Tensor:
    if path == "emulated":
        if gemm == "fprop":
            return emulated_gemm.fprop(a.data, b.data, None, dtype)
        return (emulated_gemm.dgrad if gemm == "dgrad" else emulated_gemm.wgrad)(a.data, b.data, dtype)
    assert a.scale_inv is not None
    assert b.scale_inv is not None
    x, y = Codes(a.data, a.scale_inv), Codes(b.data, b.scale_inv)
    if gemm == "fprop":
        return scaled_mm.fprop(x, y, None, dtype)
    return (scaled_mm.dgrad if gemm == "dgrad" else scaled_mm.wgrad)(x, y, dtype)
