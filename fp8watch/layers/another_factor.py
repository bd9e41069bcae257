"""A GEMM that is exact for another weight than the one it was given, near this one: its copy is older.

Shapes:     output [M, N], operands [M, K] and [K, N] -> at most one guess
Thread:     training, and autograd's; nothing here reads a value back to the host

Where there are more rows than the inner size, output − a·b = a·E has one E by least squares. It is solved on some of the rows and
sampled columns, and believed for how much it says of rows that it has not seen: noise, rows that nobody wrote and
accumulators say nothing of others. What it finds is told as an older weight only if E is small beside it, element by element or spread
over all of it, and no multiple of it: a scale read wrongly gives those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fp8watch.quantize.why.case import Guess
from fp8watch_agent.fault_names import COPY_STALE, SHARE

Some = Callable[[Tensor], Tensor]
NUM_COLUMNS = 64
MOST_FLOP = {"cpu": 1 << 31}
MOST_FLOP_ELSEWHERE = 1 << 38
_ROWS = 2.0  # of the inner size, to solve with; a third as many to judge
_FAR = 0.5  # of the size of the weight
_NEAR, _NEARLY_ALL = 0.3, 0.999  # of an element, or of the RMS of all: further off hardly any lies
_SPREAD = 0.1  # (Σe²)²/(n·Σe⁴): 1/3 of normal numbers, less than this of a third of the elements
_PROPORTIONAL = 0.5  # cosine of E and the weight
_RIDGE = 1e-10


@torch.no_grad()
def another_factor(
    output: Tensor, rows_of: Some, columns_of: Some, inner: int, bias: Tensor | None, update: Tensor | None = None
) -> Iterator[Guess]:
    """Whether the output is that of an older weight.

    Args:
        output: [M, N] as the GEMM gave it.
        rows_of: row numbers [R] -> values of the operand [R, K], any floating dtype.
        columns_of: column numbers [C] -> values of the weight as the GEMM should read it [K, C].
        inner: K.
        bias: [N] or None.
        update: how far one update moves the weight, mean over mean of magnitudes, []; None: not known.
    """
    (m, n), k, device = output.shape, inner, output.device
    solving = int(_ROWS * k)
    judging = solving // 3 + 16
    flop = solving * k * k
    if m < solving + judging or flop > MOST_FLOP.get(device.type, MOST_FLOP_ELSEWHERE) or not k:
        return
    with torch.autocast(device.type, enabled=False):
        num = solving + judging
        rows = torch.arange(num, device=device) * m // num
        columns = torch.arange(min(NUM_COLUMNS, n), device=device) * n // min(NUM_COLUMNS, n)
        got = output.index_select(0, rows).index_select(1, columns)
        part = None if bias is None else bias.index_select(0, columns)
        yield _solved(got, rows_of(rows).double(), columns_of(columns).double(), part, update, solving)


def _solved(
    output: Tensor, a_rk: Tensor, b_kc: Tensor, bias: Tensor | None, update: Tensor | None, solving: int
) -> Guess:
    device, num = output.device, len(output)
    judging, got = num - solving, output.double()
    added = 0.0 if bias is None else bias.double()
    expected = a_rk @ b_kc + added
    wrong = got - expected
    size = torch.linalg.vector_norm(torch.maximum(got.abs(), expected.abs()), dim=1, keepdim=True)  # as it is rounded
    weigh = (1 / size).where((size > 0) & size.isfinite(), 0.0)
    a_rk, wrong, rounds = a_rk * weigh, wrong.nan_to_num(0.0) * weigh, got.nan_to_num(0.0) * weigh
    seen = (torch.arange(num, device=device) * judging // num).diff(prepend=torch.tensor([-1], device=device)) == 0
    known = a_rk * seen[:, None]
    gram = known.t() @ known
    diagonal = gram.diagonal()
    diagonal.add_(_RIDGE * diagonal.mean())
    factor, info = torch.linalg.cholesky_ex(gram, check_errors=False)
    e_kc = torch.cholesky_solve(known.t() @ wrong, factor)
    left = (wrong - a_rk @ e_kc) * ~seen[:, None]
    of_rounding = (torch.finfo(output.dtype).eps / 2) ** 2 / 3 * (rounds * ~seen[:, None]).square().sum()
    of_rounding = of_rounding * (1 + a_rk.shape[1] / (solving - a_rk.shape[1]))
    energy = (wrong * ~seen[:, None]).square().sum()
    share = 1 - (left.square().sum() - of_rounding).clamp_min(0) / energy
    e2, b2 = e_kc.square().sum(), b_kc.square().sum()
    distance = e_kc.abs().mean() / b_kc.abs().mean()  # rounding moves few codes by a whole step: unbiased in the mean
    spread = e2.square() / (e_kc.numel() * e_kc.pow(4).sum())
    proportional = (e_kc * b_kc).sum().abs() / (e2 * b2).sqrt()
    limit = torch.maximum(b_kc.abs(), b_kc.square().mean().sqrt()) * _NEAR
    near = (e_kc.abs() <= limit).double().mean() >= _NEARLY_ALL  # of few codes that updates moved, too
    holds = (info == 0) & (distance <= _FAR) & (near | (spread >= _SPREAD)) & (proportional < _PROPORTIONAL)
    holds &= of_rounding < energy / 4
    share = share.where(holds & share.isfinite(), 0.0)
    numbers: dict[str, Tensor | float] = {SHARE: share.float(), "distance": distance.float()}
    if update is not None:
        numbers["updates"] = (distance / update).float()
    return Guess(COPY_STALE, numbers)
