"""A product with experts, as libraries write them, brought to rows sorted by expert, and its result back to their shape.

Shapes:     the factors of a product -> rows [S, K] and weights [E, N, K] or [N, K] -> y as the product's     Thread: training

    as it is written                                     x            w                 y
    grouped, with offsets                                [S, K]       [E, K, N]         [S, N]
    one expert                                           [..., K]     [N, K], [K, N]    [..., N]
    all experts with as many rows each                   [E, T, K]    [E, K, N]         [E, T, N]
    a matrix for each token                              [S, 1, K]    gathered          [S, 1, N]
    ... the matrix first                                 [S, K, 1]    gathered          [S, N, 1]
    one expert, the matrix first                         [..., K, T]  [N, K]            [..., N, T]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8watch.layers.expert_linear import expert_linear
from fp8watch.layers.observe_gemm import Gemm
from fp8watch.numerics.operand_checks import OPERAND_DTYPES

_PLAIN = {"alpha": 1, "beta": 1, "out": None, "out_dtype": None}
"""Arguments with which a product is one in FP8, if they are given at all."""


def unusual(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """What a call asks for that a product in FP8 does not do, or None."""
    odd = [key for key, usual in _PLAIN.items() if kwargs.get(key, usual) != usual]
    if name in ("mm", "bmm", "matmul", "__matmul__") and len(args) > 2:
        odd.append("a third argument")
    if "grouped" in name and kwargs.get("bias") is not None:
        odd.append("bias")
    return f"{name} with {' and '.join(odd)}" if odd else None


def bias_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """What is added to a product."""
    if name in ("addmm", "baddbmm"):
        found = args[0] if args else kwargs.get("input")
    elif name == "linear":
        found = args[2] if len(args) > 2 else kwargs.get("bias")
    else:
        found = None
    return found if isinstance(found, Tensor) else None


def can_multiply(x: Tensor, w: Tensor, *, autocast: bool) -> bool:
    """Whether operands are those that torch would multiply, too: it says in its own words what is wrong with others."""
    return x.dtype in OPERAND_DTYPES and (autocast or x.dtype == w.dtype) and x.device == w.device


def multiply(
    gemm: Gemm, x: Tensor, w: Tensor, site: Tensor, *, contracts: int, bias: Tensor | None, count: bool, autocast: bool
) -> Tensor:  # fmt: skip
    """A product in FP8, in the shape that the call would give.

    Args:
        gemm: the call as it was recognised; its `x` and `y` are not read.
        x: the factor that is no weight, with autograd's history.
        w: the other; not read where it was gathered token by token.
        site: of the parameter.
        contracts: dimension of `w` along which it contracts.
        bias: added in float32, before the cast.
        count: whether the call enters the statistics.
        autocast: it casts what it multiplies.
    """
    if autocast:
        x = x.to(torch.get_autocast_dtype(x.device.type))
    dtype = x.dtype
    if gemm.order is not None:
        rows, w, contracts = x.reshape(len(gemm.order), -1)[gemm.order], gemm.parameter, -2 if gemm.transposed else -1
    else:
        turned = x.transpose(-1, -2) if gemm.columns else x
        rows = turned.reshape(-1, turned.shape[-1])
    rows = rows if bias is None else rows.float()
    weights = w if contracts == -1 else w.transpose(-1, -2)
    y = expert_linear(rows, weights, gemm, site, count=count)
    if gemm.order is not None:
        y = y[torch.argsort(gemm.order)]
        y = y.unsqueeze(1 if x.shape[1] == 1 else -1)
    elif gemm.columns:
        y = y.reshape(*x.shape[:-2], x.shape[-1], -1).transpose(-1, -2)
    elif x.dim() != 2:
        y = y.reshape(*x.shape[:-1], -1)
    return y if bias is None else (y + bias.float()).to(dtype)
