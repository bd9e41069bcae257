"""Forward hooks: what the model and its probed modules return, handed to the custom ops.

Thread:     training
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fp8watch.layers.custom_ops import root_returned, tell_loss
from fp8watch.layers.probe_ops import look_at_probe, look_at_probe_in_graph
from fp8watch.observer.batch_facts import BatchFacts
from fp8watch.observer.observation_plan import ObservationPlan
from fp8watch.observer.stopwatch import FIXED
from fp8watch.observer.unseen import num_dispatch_modes, unseen
from fp8watch_agent.guard import Guard


class Watched(Protocol):
    """What a hook needs of the watch that it belongs to."""

    guard: Guard


class ForwardEnd:
    """Forward hook of the root module. A copy or a pickle of the model gets a hook of the standard library that does
    nothing, so that files load without fp8watch."""

    def __init__(self, site: Tensor) -> None:
        self._site, self._number = site, int(site)

    def __call__(self, module: nn.Module, _args: Any, output: Any) -> None:
        if module.training:
            number = None if torch.compiler.is_compiling() else self._number
            root_returned(output, self._site, number, torch.is_grad_enabled())

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")


class LossHook:
    """Forward hook of the root module, with keyword arguments: what it was given, and its loss, or else that it returned. A copy or a pickle of
    the model gets a hook of the standard library that does nothing, so that files load without fp8watch and copies report
    to nobody. It keeps the watch alive with the model, for callers that drop what attach returned."""

    def __init__(self, watch: Watched, site: Tensor, plan: ObservationPlan, batches: BatchFacts) -> None:
        self._watch, self._site, self._number = watch, site, int(site)
        self._plan, self._batches = plan, batches

    def __call__(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        if module.training:
            compiling = torch.compiler.is_compiling()
            try:
                look = self._look if compiling or not num_dispatch_modes() else unseen(self._look)
                look(kwargs, output, None if compiling else self._number)
            except Exception as error:  # noqa: BLE001 - training goes on, and the guard counts
                self._watch.guard.swallow("loss", error)
            if not compiling and torch.is_grad_enabled():
                self._see_inputs(args, kwargs)

    def _see_inputs(self, args: Any, kwargs: Mapping[str, Any]) -> None:
        if not self._plan.step.observed:
            return
        stopwatch = self._plan.stopwatch
        began = None if stopwatch is None else stopwatch.mark()
        self._watch.guard.run("batch", unseen(self._batches.see_inputs), args, kwargs)
        if stopwatch is not None:
            stopwatch.add(FIXED, began, stopwatch.mark())

    def _look(self, kwargs: Mapping[str, Any], output: Any, number: int | None) -> None:
        grad = torch.is_grad_enabled()
        loss = output if type(output) is Tensor else getattr(output, "loss", None)
        if loss is None and isinstance(output, Mapping):
            loss = output.get("loss")
        if loss is None:
            loss = output[0] if isinstance(output, tuple) and output else output
        if isinstance(loss, Tensor) and loss.ndim == 0 and loss.is_floating_point():
            # given the tokens of the whole step, a model divides by them: what it returns are shares, to be added
            tell_loss(loss, self._site, number, kwargs.get("num_items_in_batch") is not None, grad)
            return
        root_returned(output, self._site, number, grad)

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")


class ForwardBegins:
    """Forward pre-hook of the root module. A copy or a pickle of the model gets a hook of the standard library that does nothing."""

    def __init__(self, batches: BatchFacts) -> None:
        self._batches = batches

    def __call__(self, module: nn.Module, args: Any) -> None:
        if module.training and not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self._batches.forward_begins()

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")


class GivenHook:
    """Forward hook of a Linear in high precision: what it was given. A copy or a pickle of the model gets a hook of the standard
    library that does nothing, as of a probe."""

    def __init__(self, site: Tensor) -> None:
        self._site, self._number = site, int(site)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not module.training:
            return
        if torch.compiler.is_compiling():
            look_at_probe_in_graph(args, self._site)
        else:
            look_at_probe(args, self._number)

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")


class ProbeHook:
    """Forward hook of a probed module; of a Linear with its name. A copy or a pickle of the model gets a hook of the standard library that does
    nothing, so that files load without fp8watch and copies write into no slab."""

    def __init__(self, site: Tensor, linear: str | None = None) -> None:
        self._site, self._number, self._linear = site, int(site), linear

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not module.training:
            return
        if torch.compiler.is_compiling():
            look_at_probe_in_graph(output, self._site)
        else:
            look_at_probe(output, self._number, None if self._linear is None else (self._linear, args))

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")
