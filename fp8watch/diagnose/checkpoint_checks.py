"""What can be wrong with the tensors of a checkpoint: values, FP8 scales, distributions, optimizer moments.

Shapes:     codes [M, N] with scale_inv [Mt, Nt]; moments m and v of one shape -> findings
Thread:     the caller's
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FAIL, WARN = "FAIL", "WARN"
FP8 = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""dtype of codes -> their largest finite value."""
CHUNK = 1 << 24  # elements that are looked at together
SCALE_SUFFIXES = ("_scale_inv", "_scale", ".scale_inv", ".scale")
SIDES = (1, 16, 32, 128)
"""Sides of a tile that recipes have; the whole of a dimension is one as well."""
UNUSED_OCTAVES = 3
"""From so many unused octaves on the scale of a tile is not that of its codes: powers of two leave one."""
FAR_OCTAVES = 10
"""Largest value of a tile or tensor over that of the others: no weight that was trained is so far off."""
ONE_ELEMENT = 0.5
MIN_ELEMENTS = 1024
NO_UPDATE = 1e-3
"""|m| / eps, in learning rates, up to which v = 0 beside m ≠ 0 is harmless: g² is below what the dtype holds."""
ADAM_EPS = 1e-8


@dataclass(frozen=True)
class CheckpointFinding:
    """One thing that is wrong."""

    status: str
    """FAIL: do not resume from it. WARN: look at it."""
    tensor: str
    check: str
    said: str


@dataclass(frozen=True)
class Values:
    """What one pass over a tensor tells."""

    num: int
    num_nan: int
    num_inf: int
    first_nonfinite: int
    """Of the flattened tensor; −1: none."""
    num_zero: int
    amax: float
    energy: float

    @property
    def rms(self) -> float:
        """Of the finite elements."""
        return math.sqrt(self.energy / self.num) if self.num else 0.0


def values_of(x: Tensor) -> Values:
    """Look at all elements, in float32 pieces.

    Args:
        x: any floating-point dtype and shape.
    """
    flat = x.reshape(-1)
    num_nan = num_inf = num_zero = 0
    first, amax, energy = -1, 0.0, 0.0
    for start in range(0, flat.numel(), CHUNK):
        part = flat[start : start + CHUNK]
        part = part if part.dtype == torch.float64 else part.float()
        finite = torch.isfinite(part)
        if not bool(finite.all()):
            num_nan += int(torch.isnan(part).sum())
            num_inf += int(torch.isinf(part).sum())
            first = start + int((~finite).nonzero()[0]) if first < 0 else first
            part = part[finite]
        num_zero += int((part == 0).sum())
        if part.numel():
            amax = max(amax, float(part.abs().max()))
            energy += float(part.double().square().sum())
    return Values(flat.numel(), num_nan, num_inf, first, num_zero, amax, energy)


def where(index: int, shape: Sequence[int]) -> str:
    """Place of an element of the flattened tensor, such as [3, 17]."""
    at = []
    for size in reversed(shape):
        index, rest = divmod(index, max(1, size))
        at.append(rest)
    return f"[{', '.join(map(str, reversed(at)))}]"


def nonfinite(name: str, v: Values, shape: Sequence[int]) -> Iterator[CheckpointFinding]:
    """NaN and Inf."""
    if v.num_nan or v.num_inf:
        kinds = [f"{n} {kind}" for n, kind in ((v.num_nan, "NaN"), (v.num_inf, "Inf")) if n]
        yield CheckpointFinding(
            FAIL, name, "finite", f"{' and '.join(kinds)}, the first at {where(v.first_nonfinite, shape)}"
        )


def distribution(name: str, v: Values, shape: Sequence[int]) -> Iterator[CheckpointFinding]:
    """A weight of which one element is most, or nothing."""
    if v.num < MIN_ELEMENTS:
        return
    if v.energy > 0 and v.amax**2 > ONE_ELEMENT * v.energy:
        share = min(1.0, v.amax**2 / v.energy)
        yield CheckpointFinding(
            FAIL, name, "distribution", f"one element, ±{v.amax:.3g}, holds {share:.0%} of its sum of squares"
        )
    elif v.num_zero == v.num:
        yield CheckpointFinding(WARN, name, "distribution", "all elements are 0: empty memory, or not trained yet")


def scale_name(name: str, names: Mapping[str, object]) -> str | None:
    """The tensor with the scales of these codes; None: there is none."""
    return next((name + suffix for suffix in SCALE_SUFFIXES if name + suffix in names), None)


def tile_of(shape: Sequence[int], scales: Sequence[int]) -> tuple[int, int] | None:
    """Tile [rows, columns] of codes [M, N] whose scales have that shape; None: no recipe makes such scales."""
    m, n = shape
    if math.prod(scales) == 1:
        return m, n
    if len(scales) == 1:
        scales = (scales[0], 1)
    if len(scales) != 2:
        return None
    rows = [side for side in (128, 32, 16, 1, m) if -(-m // side) == scales[0]]
    columns = [side for side in (128, 32, 16, 1, n) if -(-n // side) == scales[1]]
    for bm in rows:
        for bn in columns:
            if (bm, bn) in {
                (128, 128),
                (1, 128),
                (128, 1),
                (1, 32),
                (1, 16),
                (32, 32),
                (16, 16),
                (1, n),
                (m, 1),
                (m, n),
            }:
                return bm, bn
    return None


def scales(name: str, codes: Tensor, scale: Tensor, scale_at: str) -> Iterator[CheckpointFinding]:
    """Scales of FP8 codes: in shape, positive, and those of these codes.

    Args:
        name: of the codes.
        codes: FP8 [..., M, N].
        scale: scale_inv, one a tile: [..., Mt, Nt], [M] or one element.
        scale_at: its name.
    """
    s = scale.float()
    experts = codes.shape[:-2]
    tile = None
    if codes.dim() >= 2 and (not experts or s.numel() == 1 or s.shape[: len(experts)] == experts):
        tile = tile_of(codes.shape[-2:], s.shape[len(experts) :] if s.numel() > 1 else (1,))
    if tile is None:
        want = "×".join(str(-(-side // 128)) for side in codes.shape[-2:])
        got = "×".join(map(str, scale.shape))
        yield CheckpointFinding(
            FAIL, scale_at, "scale in shape", f"{got}, for codes {_by(codes.shape)}: {want} for 128×128 blocks"
        )
        return
    bad = ~(torch.isfinite(s) & (s > 0))
    if bool(bad.any()):
        num = int(bad.sum())
        if bool((s == 0).all()):
            yield CheckpointFinding(FAIL, scale_at, "scale positive", "all scales are 0: empty memory")
        else:
            first = where(int(bad.reshape(-1).nonzero()[0]), s.shape)
            yield CheckpointFinding(
                FAIL, scale_at, "scale positive", f"{num} of {s.numel()} are 0, negative, NaN or Inf, first {first}"
            )
        return
    amax = _tile_amax(codes, tile)
    yield from _fit(
        name, scale_at, amax, s.reshape(-1).expand(amax.numel()) if s.numel() == 1 else s.reshape(-1), codes
    )


def _by(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))


def _tile_amax(codes: Tensor, tile: tuple[int, int]) -> Tensor:
    """Largest finite code of each tile, row by row. [tiles] float32"""
    bm, bn = tile
    n = codes.shape[-1]
    out = []
    for matrix in codes.reshape(-1, *codes.shape[-2:]):
        step = max(1, CHUNK // (n * bm)) * bm
        for start in range(0, matrix.shape[0], step):
            part = matrix[start : start + step].float().abs().nan_to_num(0.0, 0.0, 0.0)
            pad = (0, -n % bn, 0, -part.shape[0] % bm)
            part = torch.nn.functional.pad(part, pad)
            out.append(part.reshape(part.shape[0] // bm, bm, -1, bn).amax(dim=(1, 3)).reshape(-1))
    return torch.cat(out)


def _fit(name: str, scale_at: str, amax: Tensor, s: Tensor, codes: Tensor) -> Iterator[CheckpointFinding]:
    filled = amax > 0
    if not bool(filled.any()):
        yield CheckpointFinding(FAIL, name, "codes", "all codes are 0: empty memory")
        return
    largest = FP8[codes.dtype]
    if amax.numel() > 1:
        unused = torch.log2(largest / amax[filled])
        share = float((unused > UNUSED_OCTAVES).float().mean())
        if share > 0.5:
            said = f"{share:.0%} of the tiles leave more than {UNUSED_OCTAVES} octaves unused (median {float(unused.median()):.1f})"
            yield CheckpointFinding(WARN, scale_at, "scale of these codes", said)
    reach = torch.log2(amax[filled]) + torch.log2(s[filled])
    off = reach - reach.median()
    worst = int(off.argmax())
    if float(off[worst]) > FAR_OCTAVES:
        tile = int(filled.nonzero()[worst])
        said = f"the values of tile {tile} reach {float(off[worst]):.1f} octaves above the median tile"
        yield CheckpointFinding(FAIL, scale_at, "scale of these codes", said)
    if float((s.max() / s.min()).log2()) > 64:
        said = f"scales reach from {float(s.min()):.3g} to {float(s.max()):.3g}: memory that was not written"
        yield CheckpointFinding(FAIL, scale_at, "scale of these codes", said)


def moments(name: str, m: Tensor, v: Tensor, eps: float = ADAM_EPS) -> Iterator[CheckpointFinding]:
    """Adam's two moments of one parameter.

    Args:
        name: of m.
        m: exp_avg.
        v: exp_avg_sq, of the same shape.
        eps: of the optimizer.
    """
    if m.shape != v.shape:
        yield CheckpointFinding(FAIL, name, "moments", f"m is {_by(m.shape)}, v is {_by(v.shape)}")
        return
    num_lost = 0
    flat_m, flat_v = m.reshape(-1), v.reshape(-1)
    for start in range(0, flat_m.numel(), CHUNK):
        a, b = flat_m[start : start + CHUNK].float(), flat_v[start : start + CHUNK].float()
        num_lost += int(((b == 0) & (a.abs() > NO_UPDATE * eps)).sum())
    if num_lost:
        why = f"v = 0 where m ≠ 0 in {num_lost} of {flat_m.numel()} elements: the next update divides by eps alone"
        yield CheckpointFinding(FAIL, name, "moments", why)
    yield from second_moment(name, v)


def second_moment(name: str, v: Tensor) -> Iterator[CheckpointFinding]:
    """A second moment by itself.

    Args:
        name: that a finding has.
        v: exp_avg_sq.
    """
    flat = v.reshape(-1)
    num = sum(int((flat[i : i + CHUNK].float() < 0).sum()) for i in range(0, flat.numel(), CHUNK))
    if num:
        yield CheckpointFinding(FAIL, name, "moments", f"v is negative in {num} of {flat.numel()} elements")
    if v.dtype in (torch.float16, *FP8):
        yield CheckpointFinding(
            WARN, name, "moment dtype", f"v in {str(v.dtype).removeprefix('torch.')} flushes small squares to 0"
        )
