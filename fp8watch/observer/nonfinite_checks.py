"""Where the first bad value came from: what a GEMM made of its operands, and what a parameter's gradient became.

Shapes:     output [M, N] -> 0-d count; gradients -> [parameters] flags     Thread: training, and autograd's

Operands are counted before their cast. Where all operands of a GEMM are finite and its output is not, the GEMM is the
origin; where an operand was bad already, the value came from upstream. The order of execution is in every record.

One read of each output, and one pass over the gradients, no copy. On the CPU in each sampled step; on a GPU each
`OUTPUTS_EVERY` steps, and in all steps shortly after something was non-finite, because reading outputs there costs 1–3 %.
Finite operands may overflow float16: there only NaN counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from fp8watch.kernels.cpu import largest_magnitude
from fp8watch_agent.nonfinite_names import NONFINITE_GRADIENT

OUTPUTS_EVERY = 16
ALERT_STEPS = 16
MAX_NAMED = 4


def nonfinite_outputs(y: Tensor, *, overflow: bool = False) -> Tensor | None:
    """How many elements of an output are not finite; None where it is known that none is.

    On the CPU the count is exact; elsewhere it is 1 where there is any, because counting would read the output twice.

    Args:
        y: any shape, floating.
        overflow: an Inf of float16 counts too: it was there, and is not what finite operands gave.

    Returns:
        0-d int64 on y's device.
    """
    if y.numel() == 0 or not y.is_floating_point():
        return None
    overflows = y.dtype == torch.float16 and not overflow
    if y.is_cpu:
        if math.isfinite(largest_magnitude(y)):
            return None
        count = (y != y if overflows else ~y.isfinite()).sum()
        return count if count else None
    if overflows:
        return (y != y).sum()
    low, high = torch.aminmax(y)
    return (~(low.isfinite() & high.isfinite())).to(torch.int64)


def gradient_faults(gradients: Sequence[Tensor]) -> Tensor:
    """Of each gradient whether something in it is not finite, as 0 or 1: [n] float32. Does not wait for the device."""
    if gradients[0].is_cuda:
        ends = torch.stack([n.float() for n in torch._foreach_norm(list(gradients), math.inf)]).view(-1, 1)
    elif gradients[0].is_cpu:
        bad = [not math.isfinite(largest_magnitude(g)) for g in gradients]
        return torch.tensor(bad, dtype=torch.float32, device="cpu")
    else:
        pairs = [torch.aminmax(g) for g in gradients]
        ends = torch.stack([end.float() for pair in pairs for end in pair]).view(-1, 2)
    return (~ends.isfinite()).any(1).float()


def gradients_of(
    parameters: Iterable[tuple[str, nn.Parameter]], device: torch.device
) -> tuple[list[str], list[Tensor]]:
    """Names and gradients, as this rank holds them: of a sharded parameter its shard, of a sparse one its values. Those on
    other devices are not looked at: what is put together there is read on the stream of this one."""
    names, found = [], []
    for name, parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        gradient = getattr(gradient, "_local_tensor", gradient)
        if gradient.is_sparse:
            gradient = gradient._values()
        if gradient.device != device or not gradient.is_floating_point() or not gradient.numel():
            continue
        names.append(name)
        found.append(gradient.detach())
    return names, found


def named_gradients(names: Sequence[str], faults: Sequence[float]) -> dict[str, float]:
    """Scalars of the step that say which gradients are not finite; nothing where all are."""
    bad = [name for name, fault in zip(names, faults, strict=True) if fault]
    if not bad:
        return {}
    out = {"num_nonfinite_gradients": float(len(bad))}
    out.update({NONFINITE_GRADIENT + name: 1.0 for name in bad[:MAX_NAMED]})
    return out
