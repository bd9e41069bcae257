"""Detects models that already compute in FP8 through other libraries; these are not converted unless asked.

Thread:     training, once

The Linears that such a model keeps in high precision (adapters, projectors, heads) were left there by its owner.
Detected by names and dtypes; nothing of Transformer Engine or torchao is imported.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from fp8watch.integrations.te_modules import kind_of, unseen
from fp8watch.layers.computed_weight import held_weight
from fp8watch.selection.module_filter import LeftOut
from fp8watch.selection.own_forward import FP8_NAME, computes_in_fp8, own_class

_WRAPPERS = ("torchao.", "transformer_engine.")


def foreign_fp8(model: nn.Module) -> str | None:
    """FP8 modules of other libraries in a model, as "transformer_engine.pytorch.Linear, 12 of them"; None: none.

    Counts Linears of Transformer Engine, modules of torchao and others with FP8 in their class name, parameters wrapped
    by a library of quantised tensors, and parameters and buffers of a float8 dtype.
    """
    found: Counter[str] = Counter()
    operations = {fqn for fqn, _ in unseen(model.named_modules())}
    for fqn, module in model.named_modules():
        cls = own_class(module)
        if cls.__module__.split(".")[0] == "fp8watch":
            continue
        kind = kind_of(module)
        if kind is not None:
            found[f"transformer_engine.pytorch.{kind}"] += 1
        elif fqn in operations:
            found[f"transformer_engine.pytorch.ops.{cls.__name__}"] += 1
        elif computes_in_fp8(module) or (
            FP8_NAME.search(cls.__name__) and "linear" in cls.__name__.lower() and not _holds_linears(module)
        ):
            found[f"{cls.__module__.split('.')[0]} {cls.__name__}"] += 1
        elif not any(fqn.startswith(f"{name}.") for name in operations):
            # by what they are kept in: Megatron's data parallelism calls a list of its own `buffers`
            held = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
            found.update(name for name in {_tensor(t) for t in held} if name is not None)
    if not found:
        return None
    (first, count), *others = found.most_common()
    more = f", {sum(n for _, n in others)} of other kinds" if others else ""
    return f"{first}, {count} of them{more}" if count > 1 or others else first


def _holds_linears(module: nn.Module) -> bool:
    """Whether it is a model of Linears rather than a wrapper of a single one."""
    return sum(isinstance(m, nn.Linear) for m in module.modules() if m is not module) > 1


def left_as_it_is(found: str, num_linears: int, num_foreign: int = 0, by: str = "") -> str:
    """What attach prints of such a model.

    Args:
        found: as `foreign_fp8` gives it.
        num_linears: Linears in high precision that are observed.
        num_foreign: modules with a forward of their own that are observed.
        by: how those are observed: their own recipe, or another one and why.
    """
    rest = f", {num_foreign} of them observed{by}" if num_foreign else ""
    if num_linears:
        s, them = ("s", "them") if num_linears != 1 else ("", "it")
        they = "they are" if num_linears != 1 else "it is"
        rest += f", {num_linears} Linear{s} observed as {they}; recipe='blockwise' to convert {them}"
    return f"model computes in FP8 already ({found}): nothing is converted{rest}"


def leave_wrapped(linears: list[tuple[str, nn.Linear]], left_out: list[LeftOut]) -> None:
    """Move Linears whose weight another library wraps to `left_out`: their GEMM is not torch's."""
    for fqn, module in list(linears):
        wrapper = _tensor(held_weight(module))
        if wrapper is not None:
            linears.remove((fqn, module))
            left_out.append(LeftOut(fqn, f"weight is {wrapper}"))


def _tensor(tensor: torch.Tensor) -> str | None:
    """Why a parameter or buffer counts as FP8: the library that wraps it, or its dtype."""
    data = tensor.data
    for part in (tensor, data, getattr(data, "_local_tensor", None)):
        if part is not None and type(part).__module__.startswith(_WRAPPERS):
            return f"{type(part).__module__.split('.')[0]} {type(part).__name__}"
    dtype = str(data.dtype).removeprefix("torch.")
    return dtype if dtype.startswith("float8") else None
