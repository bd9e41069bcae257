"""In which precision everything besides the GEMMs is kept: parameters, norms, master weights, moments, gradients, communication.

Shapes:     a model and its optimizers after a step -> facts of the session, text by row
Thread:     training, once; dtypes alone are read, no value

Of attention the dtype is told in which its function is handed queries and keys, or softmax its logits. What cannot be seen has no row: a reduction in a communication hook of the user's, moments of an optimizer that keeps
them elsewhere. GEMMs, and what attention and norms return, are in the tables of sites.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fp8watch.layers.attention_calls import logits_unseen
from fp8watch.layers.fp8_linear import COMPUTES_KEY, GEMMS_KEY, LAYOUT_KEY, OBSERVE_KEY, WatchedLinear
from fp8watch.observer.observation_plan import ObservationPlan
from fp8watch.observer.probes import is_norm
from fp8watch.session.standing_state import StandingState
from fp8watch.session.step_optimizer import StepOwner
from fp8watch.session.step_scalars import LOSS_MISSING_STEPS

AT_STEP = 2
"""Steps after which it is told: optimizers make their state in the first."""
PREFIX = "precision."
MASTERS = ("master_param", "master_weight", "fp32_param")
"""State of an optimizer that is no moment but the weight itself."""
MAX_KEYS = 6


LATE = (AT_STEP, LOSS_MISSING_STEPS)
"""Closed steps after which something more is told."""


def late_facts(
    model: nn.Module, owner: StepOwner, plan: ObservationPlan | None, standing: StandingState, num_closed: int
) -> dict[str, str]:
    """Facts of the session that only some steps tell; {} at all other steps."""
    if num_closed == AT_STEP and plan is not None:
        return precision_facts(model, owner.known, plan.step.attention_dtypes.values())
    if num_closed != LOSS_MISSING_STEPS:
        return {}
    unseen = {"logits_unseen": logits_unseen(plan)}
    if standing.unseen:  # windows may begin later: what is said is said of these steps
        unseen["gradients_unseen"] = f"{standing.unseen} (in the first {num_closed} steps)"
    return {name: said for name, said in unseen.items() if said}


def precision_facts(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], attention: Iterable[str] = ()
) -> dict[str, str]:
    """Rows of the precision map as facts, by `PREFIX` and name.

    Args:
        attention: of each attention module whose turn it was, in which dtype it was handed queries or logits.
    """
    handed = Counter(attention)
    found = {
        "parameters": _shares((p.dtype, p.numel()) for p in model.parameters()),
        "norms": _shares((p.dtype, p.numel()) for p in _of_norms(model)),
        "attention": ", ".join(f"{name} in {n} module{'s' if n > 1 else ''}" for name, n in handed.most_common()),
        "gradients": _shares((g.dtype, g.numel()) for g in _gradients(model)),
        **_of_optimizers(list(model.parameters()), optimizers),
        "communication": "; ".join(dict.fromkeys(_communication(model))),
        "cached for backward": _cached(model),
    }
    return {PREFIX + name: text for name, text in found.items() if text}


def _shares(found: Iterable[tuple[torch.dtype, int]]) -> str:
    """Dtypes by their share of the elements, the largest first."""
    counts: Counter[str] = Counter()
    for dtype, num in found:
        counts[_name(dtype)] += num
    total = sum(counts.values())
    if not total:
        return ""
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{name} {100 * num / total:.3g} %" for name, num in counts.most_common())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _of_norms(model: nn.Module) -> Iterator[nn.Parameter]:
    for module in model.modules():
        if is_norm(module):
            yield from module.parameters(recurse=False)


def _gradients(model: nn.Module) -> Iterator[Tensor]:
    """As they are added up: Megatron keeps them beside the parameter."""
    for p in model.parameters():
        grad = getattr(p, "main_grad", None)
        grad = p.grad if grad is None else grad
        if isinstance(grad, Tensor):
            yield grad


def _of_optimizers(parameters: list[nn.Parameter], optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, str]:
    moments: dict[str, Counter[torch.dtype]] = {}
    masters: Counter[torch.dtype] = Counter()
    for optimizer in optimizers:
        for p, state in optimizer.state.items():
            for key, value in state.items() if isinstance(state, dict) else ():
                if not isinstance(value, Tensor) or not value.is_floating_point() or value.shape != p.shape:
                    continue
                into = masters if key in MASTERS else moments.setdefault(str(key)[:40], Counter())
                into[value.dtype] += value.numel()
    out = {"optimizer moments": "; ".join(f"{k} {_shares(c.items())}" for k, c in list(moments.items())[:MAX_KEYS])}
    trained = {p.dtype for p in parameters if p.requires_grad}
    if masters:
        out["master weights"] = _shares(masters.items())
    elif moments and trained == {torch.float32}:
        out["master weights"] = "the parameters themselves, float32"
    elif moments and trained:
        named = ", ".join(sorted(_name(d) for d in trained))
        out["master weights"] = f"none seen in the optimizer; the parameters are {named}"
    return out


def _communication(model: nn.Module) -> Iterator[str]:
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            hooks: Any = getattr(module, "_comm_hooks", None) or []
            policy: Any = getattr(module, "mixed_precision", None)
            reduce = getattr(policy, "reduce_dtype", None)
            how = f"in {_name(reduce)}" if reduce is not None else "in the gradients' dtype"
            names = ", ".join(str(getattr(h[0], "__name__", type(h[0]).__name__)) for h in hooks)
            yield f"DDP all-reduce {f'by {names}' if names else how}"
        get_state = getattr(module, "_get_fsdp_state", None)
        state: Any = get_state() if get_state is not None else None
        policy = getattr(state, "_mp_policy", None)
        if policy is not None:
            param, reduce = (getattr(policy, f"{of}_dtype", None) for of in ("param", "reduce"))
            gathered = f"in {_name(param)}" if param is not None else "in the parameters' dtype"
            reduced = f"in {_name(reduce)}" if reduce is not None else "in the gathered dtype"
            yield f"FSDP all-gather {gathered}, reduce-scatter {reduced}"


def _cached(model: nn.Module) -> str:
    """Of Linears and experts on our path, which keep codes of what backward reads in FP8."""
    linears = [m for m in model.modules() if isinstance(m, WatchedLinear) and OBSERVE_KEY in m.__dict__]
    codes = sum(not m.__dict__[OBSERVE_KEY] and m.__dict__[LAYOUT_KEY].gemms[2] for m in linears)
    experts = sum(len(m.__dict__[GEMMS_KEY].computes) for m in model.modules() if COMPUTES_KEY in m.__dict__)
    whose = [f"{codes} Linear{'s' if codes > 1 else ''}"] if codes else []
    whose += [f"{experts} parameter{'s' if experts > 1 else ''} of experts"] if experts else []
    return f"inputs of {' and '.join(whose)} as FP8 codes with their scales" if whose else ""
