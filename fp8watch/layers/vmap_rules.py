"""What `torch.func.vmap` does with the ops: per-sample gradients, ensembles, Jacobians.

Shapes:     [..., B at a dim of its own, ...] -> what the op gives     Thread: training, and autograd's

Without a rule torch warns, asks its user to report that, and runs an op sample by sample. What only looks takes the batch
as more rows, as it would have come without vmap. What computes runs sample by sample: each has tiles of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8watch.observer.site_rows import WEIGHT

_REMEDY = "leave this Linear out with filter_fn, or use recipe='observe'"

Rule = Callable[..., tuple[Any, Any]]


def batch_in_rows(op: Any) -> Rule:
    """The rule of an op (x, site, operand, ...) that looks at rows × columns: samples are rows, weights of an ensemble are
    looked at one after the other, since each has tiles of its own."""

    def rule(
        info: Any, in_dims: tuple[Any, ...], x: Tensor, site: Tensor, operand: int, *rest: Any
    ) -> tuple[Tensor, None]:
        if in_dims[0] is None:  # the site alone is batched, which stands for the same Linear in each
            return op(x, _one_of(site, in_dims[1]), operand, *rest), None
        of_sample, site = x.movedim(in_dims[0], 0), _one_of(site, in_dims[1])
        if operand == WEIGHT:
            for weight in of_sample.unbind():
                op(weight, site, operand, *rest)
        else:
            op(of_sample.flatten(0, 1), site, operand, *rest)
        return x.new_empty((0,)), None

    return rule


def mean_of_batch(op: Any) -> Rule:
    """The rule of an op (value, site, ...) that notes one number a step, or that there is one: the mean of the samples.
    Of none there is none."""

    def rule(info: Any, in_dims: tuple[Any, ...], value: Tensor, site: Tensor, *rest: Any) -> tuple[Tensor, None]:
        if not info.batch_size:
            return value.new_empty((0,)), None
        if in_dims[0] is not None and value.is_floating_point():
            value = value.movedim(in_dims[0], 0).mean(dim=0)
        elif in_dims[0] is not None:
            value = value.select(in_dims[0], 0)
        return op(value, _one_of(site, in_dims[1]), *rest), None

    return rule


def one_by_one(op: Any) -> Rule:
    """The rule of an op that computes: once for each sample, results along a first dimension. Of no sample they are as many."""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        if not info.batch_size:
            return _of_none(op, in_dims, args)
        of_each = [
            op(*(_sample(a, dim, i) for a, dim in zip(args, in_dims, strict=True))) for i in range(info.batch_size)
        ]
        if isinstance(of_each[0], Tensor):
            return torch.stack(of_each), 0
        results = tuple(torch.stack(same) for same in zip(*of_each, strict=True))
        return results, (0,) * len(results)

    return rule


def _of_none(op: Any, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> tuple[Any, Any]:
    """Results of the op for each of no samples, of which only the shapes are known: those of any."""
    shapes = op(*(_shape_of_sample(a, dim) for a, dim in zip(args, in_dims, strict=True)))
    device = next(a.device for a, dim in zip(args, in_dims, strict=True) if isinstance(a, Tensor) and dim is not None)
    if isinstance(shapes, Tensor):
        return torch.empty((0, *shapes.shape), dtype=shapes.dtype, device=device), 0
    return tuple(torch.empty((0, *s.shape), dtype=s.dtype, device=device) for s in shapes), (0,) * len(shapes)


def _shape_of_sample(argument: Any, dim: Any) -> Any:
    if isinstance(argument, (list, tuple)):
        dims = dim or (None,) * len(argument)
        return type(argument)(_shape_of_sample(a, d) for a, d in zip(argument, dims, strict=True))
    if not isinstance(argument, Tensor):
        return argument
    shape = [size for i, size in enumerate(argument.shape) if dim is None or i != dim % argument.dim()]
    return argument.new_empty(shape, device="meta")


def _sample(argument: Any, dim: Any, i: int) -> Any:
    if isinstance(argument, (list, tuple)):
        return type(argument)(_sample(a, d, i) for a, d in zip(argument, dim or (None,) * len(argument), strict=True))
    return argument if dim is None else argument.select(dim, i)


def _one_of(site: Tensor, dim: int | None) -> Tensor:
    return site if dim is None else site.select(dim, 0)


def refuse_vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    """The rule of a Linear that computes in FP8.

    Raises:
        RuntimeError: always. Scales belong to tiles of many rows; of one sample alone they would be other ones than those
            that the training computes with.
    """
    raise RuntimeError(
        f"torch.func.vmap over a Linear that computes in FP8, of {info.batch_size} samples: a tile's scale is of all rows of a "
        f"batch, so samples cannot be computed one by one; {_REMEDY}"
    )


def refused_forward_mode(error: NotImplementedError) -> Exception:
    """What to raise for an error of an autograd.Function without a forward mode; the error itself where it is another."""
    if "forward mode" not in str(error):
        return error
    return RuntimeError(
        "forward-mode differentiation (torch.func.jvp, jacfwd, hessian) of a Linear that computes in FP8: a rounded operand has "
        f"no derivative of use, and backward has its gradients quantised as well; {_REMEDY}"
    )
