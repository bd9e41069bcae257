"""A few numbers that say what this process gave of a gradient that several share, and what its optimizer got.

Shapes:     a sample of one gradient -> [NUM] float32, of what was given and of what arrived
Thread:     training, before an optimizer steps; nothing waits for a device

What backward gives here is one summand; the others are in other processes. But products with fixed random signs (a linear sketch:
Alon, Matias, Szegedy, "The space complexity of approximating the frequency moments", 1996) of summands add up to those of the sum. So
each process says its own, of the same elements in the same step, and who has all of them holds the sum against what arrived,
up to a number: no process waits for another.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn

from fp8watch_agent.update_names import GRADIENT_GIVEN, GRADIENT_GOT, GRADIENT_OF, SKETCH_NUMBERS, SKETCHES

SEED = 0x6BAD
"""Of the signs, which all processes must have alike."""
STEPS_APART = 4
"""From one turn to the next, in all processes alike: no clock decides here."""

COMPRESS = ("powerSGD_hook", "batched_powerSGD_hook")
"""Of `torch.distributed.algorithms.ddp_comm_hooks`: of low rank after a warm-up of steps that are summed (1,000 by default)."""
COMPRESS_STATE = "PowerSGDState"
"""What they work with, whatever wraps them."""


@functools.lru_cache(maxsize=8)
def _signs(num: int, device: torch.device) -> Tensor:
    """Float32 ±1 [num, SKETCH_NUMBERS], by `torch.randint` of a generator on the CPU."""
    generator = torch.Generator(device="cpu").manual_seed(SEED)
    bits = torch.randint(0, 2, (num, SKETCH_NUMBERS), generator=generator, device="cpu", dtype=torch.float32)
    return (2.0 * bits - 1.0).to(device, non_blocking=True)


def sketches(name: str, given: Tensor, got: Tensor | None, shared_by: int) -> dict[str, Any]:
    """Numbers of a step. NaN where nothing can be said: something is not finite, or values were clipped one by one.

    Args:
        name: of the parameter.
        given: float32 sample of what backward added up here.
        got: of what its optimizer is about to step with, the same elements; None where another process has these.
        shared_by: so many processes.
    """
    numbers: dict[str, Any] = {GRADIENT_OF + name: float(shared_by)}
    if got is None:
        return numbers | _named(GRADIENT_GIVEN, _products(given))
    size = got.abs()
    limit = size.amax()
    clipped = ((size == limit).sum() > 1) & (limit > 0)  # whatever is clipped by its value has one magnitude
    told = _products(got).where(~clipped, math.nan)
    return numbers | _named(GRADIENT_GIVEN, _products(given)) | _named(GRADIENT_GOT, told)


def _products(x: Tensor) -> Tensor:
    """[SKETCH_NUMBERS], not by a GEMM: training may have told those to compute in fewer bits, or to be deterministic."""
    return (x.flatten()[:, None] * _signs(x.numel(), x.device)).sum(0)


def _named(what: str, products: Tensor) -> dict[str, Any]:
    return {f"{what}{k}": product for k, product in enumerate(products.unbind())}


def only_finite(numbers: dict[str, float]) -> None:
    """Leave of the numbers of a step those of a sketch that says something."""
    mine = [n for n in numbers if n.startswith(SKETCHES)]
    if not all(math.isfinite(numbers[n]) for n in mine):
        for name in mine:
            del numbers[name]


def compressed_by(model: nn.Module) -> str:
    """Name of the communication hook after which what arrives is no sum of what was given, from the step on in which it begins to
    compress; empty where there is none. DDP keeps what was registered with it; what wraps a model after attach is not seen."""
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            hooks: Any = getattr(module, "_comm_hooks", None) or []
            for hook, state in hooks:
                if (name := str(getattr(hook, "__name__", ""))) in COMPRESS:
                    return name
                if any(kind.__name__ == COMPRESS_STATE for kind in type(state).__mro__):
                    return "PowerSGD"
    return ""
