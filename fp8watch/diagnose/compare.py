"""`compare_bf16`: a few steps in FP8 and in high precision side by side, to tell whether FP8 causes a failure.

Shapes:     model, batches -> per step two losses; per layer one error and one cosine
Thread:     the caller's

Both copies use the same weights, batches and random numbers, step by step. Nothing of the caller's changes: not the
model, its gradients, its optimizer, its scales, its statistics, nor the state of a random generator.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fp8watch.diagnose.model_copies import MakeOptimizer, ModelCopy, check, make_copies, recipe_of, unwrapped
from fp8watch.diagnose.untouched import RandomState, untouched
from fp8watch.diagnose.verdict import LAYER_ERROR, LayerPair, StepPair, Verdict, judge
from fp8watch.selection.module_filter import FilterFn

LossFn = Callable[[nn.Module, Any], Tensor]


def compare_bf16(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFn,
    optimizer: torch.optim.Optimizer | MakeOptimizer | None = None,
    steps: int = 10,
    *,
    recipe: object = None,
    filter_fn: FilterFn | None = None,
    backend: str | None = None,
    autocast: torch.dtype | None = None,
) -> Verdict:
    """Train a copy in FP8 and a copy in high precision for a few steps, and say which of them explains a failure.

    Needs memory for two copies of the model, its gradients and its optimizer's state. On several ranks each compares
    alone, on its own batches: no collective is issued.

    Args:
        model: attached or not. An attached one is compared on its own recipe, sites and scales.
        batches: at most `steps` are taken; the failing one should be among them. Copies are made before each use.
        loss_fn: (model, batch) -> loss, a 0-d Tensor; it must use the model that it is given.
        optimizer: the one that trains the model, which is copied with its state; or a function parameters -> optimizer;
            or None: weights stay, and each batch is compared at the same weights.
        steps: at most. After about 40 steps any two runs separate.
        recipe: as for `attach`, for a model that is not attached, or to compare another recipe.
        filter_fn: as for `attach`.
        backend: as for `attach`.
        autocast: torch.bfloat16 runs the high-precision copy under autocast; None: in the model's own dtypes, as it
            would run without FP8.

    Returns:
        The Verdict. `print(verdict)` says it in a sentence, and what to try where FP8 explains it; `verdict.send(incident_id)` attaches it to an incident.

    Raises:
        TypeError, ValueError: an argument that cannot work, with value, rule and remedy.
    """
    check(model)
    inner = unwrapped(model)
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= 1000:
        raise ValueError(f"steps={steps!r}: must be a whole number from 1 to 1000")
    chosen = recipe_of(inner, recipe)
    with untouched(inner):
        given = [copy.deepcopy(batch) for batch in itertools.islice(iter(batches), steps)]
        if not given:
            raise ValueError("batches is empty: give at least one batch, the failing one among them")
        fp8, high = make_copies(inner, optimizer, chosen, filter_fn, backend)
        try:
            pairs, layers = _run(fp8, high, given, loss_fn, autocast)
        finally:
            fp8.close()
    name = _precision(high.model, autocast)
    gather = any(flag == "fp8_param_gather" for flag, _ in chosen.flags)
    return judge(tuple(pairs), tuple(layers), chosen.name, name, kind=chosen.kind, param_gather=gather)


def _precision(model: nn.Module, autocast: torch.dtype | None) -> str:
    dtype = autocast or next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return {torch.bfloat16: "BF16", torch.float16: "FP16", torch.float32: "FP32"}.get(dtype, str(dtype))


def _run(
    fp8: ModelCopy, high: ModelCopy, batches: list[Any], loss_fn: LossFn, autocast: torch.dtype | None
) -> tuple[list[StepPair], list[LayerPair]]:
    pairs: list[StepPair] = []
    order: list[str] = []
    errors: dict[str, list[float]] = {name: [] for name in fp8.linears}
    cosines: dict[str, list[float]] = {name: [] for name in fp8.linears}
    for step, batch in enumerate(batches):
        begin = RandomState()
        a = _step(fp8, copy.deepcopy(batch), loss_fn, None, step)
        begin.restore()
        b = _step(high, batch, loss_fn, autocast, step)
        pairs.append(StepPair(step, a, b))
        order += [name for name in fp8.outputs if name not in order]
        for name in fp8.linears:
            errors[name].append(_error(fp8.outputs.get(name), high.outputs.get(name)))
            cosine = _cosine(fp8.linears[name].weight.grad, high.linears[name].weight.grad)
            if cosine is not None:
                cosines[name].append(cosine)
        for copied in (fp8, high):
            if copied.optimizer is not None:
                copied.optimizer.step()
        if not math.isfinite(a) and not math.isfinite(b):
            break  # both are non-finite from here on
    return pairs, [_layer(name, errors[name], cosines[name]) for name in order]


def _layer(name: str, errors: list[float], cosines: list[float]) -> LayerPair:
    far = next((t for t, e in enumerate(errors) if e > LAYER_ERROR), None)
    return LayerPair(name, errors[0], far, cosines[0] if cosines else None, min(cosines, default=None))


def _step(copied: ModelCopy, batch: Any, loss_fn: LossFn, autocast: torch.dtype | None, step: int) -> float:
    copied.outputs.clear()
    copied.model.zero_grad(set_to_none=True)
    device = next(copied.model.parameters()).device.type
    with torch.autocast(device, dtype=autocast) if autocast is not None else contextlib.nullcontext():
        loss = loss_fn(copied.model, batch)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f"loss_fn returned {shape}: must be a Tensor of one element")
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
    if step == 0 and not copied.outputs:
        raise ValueError("loss_fn called no Linear of the model that it was given: it must use its first argument")
    return float(loss.detach())


def _error(fp8: Tensor | None, high: Tensor | None) -> float:
    """RMS of the difference over RMS in high precision; 0 when the layer was not called, or neither is finite."""
    if fp8 is None or high is None or fp8.shape != high.shape:
        return 0.0
    a, b = fp8.double(), high.double()
    if not bool(torch.isfinite(b).all()):
        return 0.0
    if not bool(torch.isfinite(a).all()):
        return math.inf
    size = float(b.square().mean())
    off = float((a - b).square().mean())
    return 0.0 if off == 0 else math.inf if size == 0 else math.sqrt(off / size)


def _cosine(a: Tensor | None, b: Tensor | None) -> float | None:
    if a is None or b is None:
        return None
    x, y = a.double().flatten(), b.double().flatten()
    size = float(x.norm() * y.norm())
    value = float(x @ y) / size if size > 0 else math.nan
    return value if math.isfinite(value) else None
