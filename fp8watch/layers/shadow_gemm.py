"""Shadow GEMM: what a GEMM made of what it reads, held against float64 on a few sampled rows.

Shapes:     output [M, N], operands [M, K] and [K, N] -> three fields of one slab row
Thread:     training, and autograd's; for the module whose turn it is, and those whose shadow is switched on

Operands that quantise well say nothing of the product: an accumulator of 14 bits without promotion every 128 terms
costs 0.35 % of the output's RMS at K = 4096, bytes of one format read as another scale a whole gradient by a power of
two, and rows that nobody wrote hold what was there before. All show when some of the output is computed again. The
shadow is cast like the output, so that what the output's own dtype loses is not held against the kernel. What float32
rounds where products cancel is not held against it either: an error is a share of the output's RMS, or of 2^-10 of what
the output would be without signs.

Cast alone the shadow would not do: where a kernel is off by a fraction of the output's last bit, some elements round to the
other neighbour and are off by the whole of it (on an H200 products of codes in bfloat16, which lose 5e-4, were told to lose
up to 2.5e-3). So an error is what the output is off the shadow beyond what the cast shadow is off it: the energies' difference
is the kernel's, since a cast adds as much to both.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from fp8watch.layers.ask_why import why_product
from fp8watch.layers.operand_check import capturing
from fp8watch.layers.random_projection import check_product
from fp8watch.numerics.formats import Fp8Format
from fp8watch.observer.observation_plan import ObservationPlan
from fp8watch.observer.site_rows import GRAD_OUTPUT, INPUT
from fp8watch.observer.stopwatch import SAMPLING
from fp8watch.quantize.output_checks import GemmCheck
from fp8watch.quantize.rounding_bound import part_of_rows

NUM_ROWS = 64
TURN_ROWS, TURN_COLUMNS = 16, 64
"""Of the output of a GEMM whose turn it is: 1024 elements tell its RMS within 3 %."""

_LENGTHS = (128, 32)  # of tiles
_CANCELLED = 2.0**-20  # of the energy without signs


class Factor(NamedTuple):
    """One operand of a GEMM as the kernel reads it: values [rows, columns], or codes with a scale_inv a tile."""

    data: Tensor
    scale_inv: Tensor | None = None

    def t(self) -> Factor:
        """The transpose: a view."""
        return Factor(self.data.t(), None if self.scale_inv is None else self.scale_inv.t())

    def some(self, axis: int, at: Tensor | None) -> Tensor:
        """Some rows (axis 0) or columns (axis 1) as values, float64; None: all. The other axis is the contraction."""
        if axis == 1 and self.data.stride(0) < self.data.stride(1):
            return self.t().some(0, at).t()  # column by column in memory: what is taken lies together there
        data, scale_inv = self.data, self.scale_inv
        if data.dtype.itemsize == 1:
            codes = data.view(torch.uint8)
            values = (codes if at is None else codes.index_select(axis, at)).contiguous().view(data.dtype).double()
        else:
            values = (data if at is None else data.index_select(axis, at)).double()
        if scale_inv is None:
            return values
        index = torch.arange(data.shape[axis], device=data.device) if at is None else at
        scales = scale_inv.index_select(axis, _scale_index(index, data.shape[axis], scale_inv.shape[axis])).double()
        length, num = data.shape[1 - axis], scale_inv.shape[1 - axis]
        if num in (1, length):  # one scale along all of it, or one for each
            return values * scales
        tile = next(t for t in _LENGTHS if -(-length // t) == num)
        return values * scales.repeat_interleave(tile, 1 - axis).narrow(1 - axis, 0, length)


def _scale_index(index: Tensor, size: int, num: int) -> Tensor:
    """Of rows (or columns) the scale that they have: one for all, one each, or one a tile."""
    if num == 1:
        return torch.zeros_like(index)
    tile = next((t for t in (1, *_LENGTHS) if -(-size // t) == num), 1)
    return index.div(tile, rounding_mode="floor")


class Allowed(NamedTuple):
    """What the output of a GEMM may lose against the product of what is held here."""

    error: float = 0.0  # a share of its RMS
    formats: tuple[Fp8Format, Fp8Format] | None = None  # the operands are cast in there, with one scale a tensor
    times: float = 2.5  # so much of what that cast alone loses: other roundings, of smaller tiles lose less


def _cast(values: Tensor, of: Tensor, fmt: Fp8Format) -> Tensor:
    """Some rows or columns of an operand cast with one scale for all of it, float64."""
    amax = of.abs().amax().double()
    scale = (fmt.max_finite / amax).where((amax > 0) & amax.isfinite(), 1.0)
    codes = (values * scale).clamp(-fmt.max_finite, fmt.max_finite).float().to(fmt.dtype)
    return codes.double() / scale


def sampled_rows(num_rows: int, phase: int, num: int = NUM_ROWS) -> list[int]:
    """At most `num` rows spread evenly over the output; `phase` shifts them, so that calls see different ones.

    No random numbers: the generators belong to training.
    """
    n = min(num, num_rows)
    return sorted({(i * num_rows // n + phase) % num_rows for i in range(n)})


@torch.no_grad()
def check_gemm(
    output: Tensor,
    a: Tensor | Factor,
    b: Tensor | Factor,
    bias: Tensor | None = None,
    phase: int = 0,
    *,
    num_rows: int = NUM_ROWS,
    num_columns: int | None = None,
    allow: Allowed | None = None,
) -> GemmCheck:
    """Compare sampled rows of `output` with a·b + bias computed in float64.

    Args:
        output: [M, N] as the GEMM gave it, any floating dtype.
        a: [M, K] what the GEMM reads, values or codes; only sampled rows are read.
        b: [K, N] what the GEMM reads; only sampled columns are read.
        bias: [N] or None.
        phase: which rows, see `sampled_rows`.
        num_rows: how many rows at most. The first and the last of the output are among them where there are two or more.
        num_columns: how many columns at most; None: all.
        allow: what may be lost; within it there is no error, and the gain is 1.

    Returns:
        Error, gain and the count of non-finite outputs. Elements where the shadow itself is not finite enter none of
        them: there the operands are at fault, or the range of the output's dtype, not the GEMM.

    Raises:
        ValueError: shapes that cannot be those of a·b.
    """
    left, right = (f if isinstance(f, Factor) else Factor(f) for f in (a, b))
    (m, n), (am, k) = output.shape, left.data.shape
    if am != m or tuple(right.data.shape) != (k, n):
        raise ValueError(
            f"output {m}×{n}, operands {am}×{k} and {'×'.join(map(str, right.data.shape))}: must be [M, N], [M, K], [K, N]"
        )
    rows = _index(m, phase, num_rows, output.device)
    columns = None if num_columns is None or num_columns >= n else _index(n, phase, num_columns, output.device)
    x, y = left.some(0, rows), right.some(1, columns)
    shadow, without_signs = x @ y, x.abs() @ y.abs()
    if bias is not None:
        added = (bias if columns is None else bias.index_select(0, columns)).double()
        shadow, without_signs = shadow + added, without_signs + added.abs()
    exact, shadow = shadow, shadow.to(output.dtype).double()
    got = output.index_select(0, rows)
    got = (got if columns is None else got.index_select(1, columns)).double()
    finite_shadow, finite_output = shadow.isfinite(), got.isfinite()
    both = finite_output & finite_shadow
    got, shadow, exact, without_signs = (t.where(both, 0.0) for t in (got, shadow, exact, without_signs))
    energy = torch.maximum(shadow.square().sum(), without_signs.square().sum() * _CANCELLED)
    wrong = got - shadow
    lost = ((got - exact).square() - (shadow - exact).square()).sum().clamp_min(0.0)
    error = (lost / energy).sqrt()
    gain = 1 + (wrong * shadow).sum() / energy
    if allow is not None:
        fine = lost <= energy * allow.error**2
        if allow.formats is not None and left.data.numel():
            casts = [
                _cast(part, f.data, fmt) for part, f, fmt in zip((x, y), (left, right), allow.formats, strict=True)
            ]
            noise = (casts[0] @ casts[1] - x @ y).where(both, 0.0)
            fine |= lost <= noise.square().sum() * allow.times**2
        error, gain = error.masked_fill(fine, 0.0), gain.masked_fill(fine, 1.0)
    empty = energy == 0  # nothing to compare: no error, gain 1, unless the output has something where the shadow is 0
    error = error.masked_fill(empty, 0.0).masked_fill(empty & (got != 0).any(), torch.inf)
    return GemmCheck(error.float(), gain.masked_fill(empty, 1.0).float(), (~finite_output & finite_shadow).sum())


def _index(size: int, phase: int, num: int, device: torch.device) -> Tensor:
    found = sampled_rows(size, phase, num)
    if 2 < num < size:  # the ends, where padding and what nobody wrote lie
        found = sorted({0, size - 1, *found[1:-1]})
    return torch.tensor(found, dtype=torch.int64, device="cpu").to(device, non_blocking=True)


def _note_empty(plan: ObservationPlan, row: int, operand: Tensor) -> None:
    """An expert without tokens, which may never have had any: its weight gradient is looked at all the same."""
    plan.sites.shapes.setdefault(row, (int(operand.shape[0]), int(operand.shape[1])))
    if plan.slab is not None:
        plan.slab.note_empty(row)


def hold_rows_of_output(
    plan: ObservationPlan, row: int, output: Tensor, operand: int, columnwise: bool, factors: Sequence[Tensor | None]
) -> None:
    """Compare rows of one GEMM's output with a projection of its operands, in some calls of a step that takes full
    statistics of the operand that it reads (see `StepState.holds`); operands that are codes are left to the module's turn.

    Args: as of `hold_against_shadow`.
    """
    slab, stopwatch = plan.slab, plan.stopwatch
    given = [*factors, *[None] * (5 - len(factors))]
    first, second, bias, first_scale, second_scale = given
    if slab is None or first is None or second is None or not first_scale is second_scale is None or not output.numel():
        return
    if not plan.observing or row in plan.sites.unobserved or capturing(output):
        return
    if first.dtype.itemsize == 1 or second.dtype.itemsize == 1:
        return
    if not plan.step.holds(row, "wgrad" if columnwise else "GEMM"):
        return
    began = stopwatch.mark() if stopwatch is not None else None
    a, b = first.detach().to(torch.float32), second.detach().to(torch.float32)
    if operand == INPUT:
        b = b.t()
    elif operand == GRAD_OUTPUT and columnwise:
        a = a.t()
    found: GemmCheck | None
    if first.numel():
        found = check_product(output, a, b, bias, part_of_rows(output.shape[0], plan.step.num_begun))
    else:
        _note_empty(plan, row, first)
        found = check_gemm(output, a, b, num_rows=TURN_ROWS, num_columns=TURN_COLUMNS)
    if found is not None:
        slab.accumulate_gemm(row, found)
    if stopwatch is not None:
        stopwatch.add(SAMPLING, began, stopwatch.mark())
    elif not columnwise:
        _why(plan, row, output, Factor(a), Factor(b), bias, found)


def hold_against_shadow(
    plan: ObservationPlan, row: int, output: Tensor, operand: int, columnwise: bool, factors: Sequence[Tensor | None]
) -> None:
    """Compare one GEMM with its shadow and merge what was found into the row of the operand that it reads.

    Args:
        plan: whose slab it goes to.
        row: of the operand.
        output: [M, N] of the GEMM.
        operand, columnwise: INPUT: fprop; GRAD_OUTPUT rowwise: dgrad, columnwise: wgrad.
        factors: that operand and the other one (the weight, or of wgrad the input), each in its own rows × columns; the
            bias [N]; of codes the scale_inv of both. What is not there is None, or left out at the end.
    """
    given = [*factors, *[None] * (5 - len(factors))]
    first, second, bias, first_scale, second_scale = given
    slab, canary = plan.slab, plan.canary
    if first is None or second is None or not output.numel():  # without tokens wgrad has an output all the same: 0
        return
    if slab is None or not plan.observing or row in plan.sites.unobserved or capturing(output):
        return
    a, b = Factor(first, first_scale), Factor(second, second_scale)
    turn = canary.is_turn(row) and plan.stopwatch is None and canary.takes(row, "wgrad" if columnwise else "GEMM")
    if not turn and not (canary.is_forced(row) and plan.step.sample.full[row]):
        return
    began = perf_counter()
    if not first.numel():
        _note_empty(plan, row, first)
    if operand == INPUT:
        b = b.t()
    elif operand == GRAD_OUTPUT and columnwise:
        a = a.t()
    if canary.is_forced(row):
        found = check_gemm(output, a, b, bias, phase=plan.step.calls)
        slab.accumulate_gemm(row, found)
    else:
        found = check_gemm(output, a, b, bias, phase=canary.phase, num_rows=TURN_ROWS, num_columns=TURN_COLUMNS)
        slab.accumulate_gemm(row, found)
        canary.spent_s += perf_counter() - began
    if not columnwise:
        _why(plan, row, output, a, b, bias, found)


def _why(
    plan: ObservationPlan, row: int, output: Tensor, a: Factor, b: Factor, bias: Tensor | None, found: GemmCheck | None
) -> None:
    inner = int(a.data.shape[1])
    why_product(plan, row, output, lambda at: a.some(0, at), lambda at: b.some(1, at), inner, bias, found)
