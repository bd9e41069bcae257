"""torchao's casts to FP8 as they happen: codes and scales of an operand, for the module whose turn it is.

Shapes:     operand [..., K] -> codes [rows, columns], scale_inv [rows / tile, columns / tile]
Thread:     training, and autograd's

`Float8Linear` casts every operand by one function of its module, which is replaced by one that calls it and looks at what
it returned. Outside of a turn that is one look at a thread-local. In compiled code there are no turns.

Source: torchao.float8, versions 0.9 to 0.18: `hp_tensor_to_float8_dynamic(hp_tensor, float8_dtype, …, gemm_input_role=…)`
gives a tensor with `_data` and `_scale`; the weight comes transposed, [K, N].
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from fp8watch.layers.foreign_turn import Turn, running
from fp8watch.observer.site_rows import GRAD_OUTPUT, INPUT, WEIGHT

MODULE, FUNCTION = "torchao.float8.float8_linear", "hp_tensor_to_float8_dynamic"
_ROLES = {"input": INPUT, "weight": WEIGHT, "grad_output": GRAD_OUTPUT}


def watch_casts() -> None:
    """Look at what torchao casts, from now on and once in a process; where it has no such function nothing is seen."""
    module = sys.modules.get(MODULE)
    original = getattr(module, FUNCTION, None)
    if module is not None and original is not None and not hasattr(original, "_fp8watch_original"):
        setattr(module, FUNCTION, _watched(original))


def unwatch_casts() -> None:
    """Put torchao's own function back."""
    module = sys.modules.get(MODULE)
    original = getattr(getattr(module, FUNCTION, None), "_fp8watch_original", None)
    if module is not None and original is not None:
        setattr(module, FUNCTION, original)


def _watched(original: Callable[..., Any]) -> Callable[..., Any]:
    def cast(hp_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        made = original(hp_tensor, *args, **kwargs)
        turn = running()
        if turn is not None:
            turn.plan.guard.run("torchao cast", _show, turn, hp_tensor, made, kwargs.get("gemm_input_role"))
        return made

    cast._fp8watch_original = original  # type: ignore[attr-defined]
    return cast


def _show(turn: Turn, x: torch.Tensor, made: Any, role: Any) -> None:
    operand = _ROLES.get(str(getattr(role, "value", "")))
    data, scale = getattr(made, "_data", None), getattr(made, "_scale", None)
    if operand is None or data is None or scale is None:
        return
    x, data = x.detach().reshape(-1, x.shape[-1]), data.detach().reshape(-1, data.shape[-1])
    scale_inv = 1.0 / scale.detach().float().reshape(*((-1, scale.shape[-1]) if scale.dim() > 1 else (1, 1)))
    if operand == WEIGHT:
        x, data, scale_inv = x.t(), data.t(), scale_inv.t()
    rows, columns = scale_inv.shape
    tile = (
        1 if rows == x.shape[0] and rows > 1 else x.shape[0],
        1 if columns == x.shape[1] and columns > 1 else x.shape[1],
    )
    turn.saw_cast(operand, x, data, scale_inv, tile)
