"""A copy of a model in high precision whose Linears hand over what their GEMMs read, or compute under a trial.

Shapes:     model, batch, loss_fn -> loss; of each Linear and call x [M, K], weight [N, K], grad_output [M, N]
Thread:     the caller's

Every pass runs on the copy, with the same weights, buffers, batch and random numbers as the others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp8watch.diagnose.model_copies import check, unwrapped
from fp8watch.diagnose.subject import LossFn, checked_loss, default_loss
from fp8watch.diagnose.trial_linear import Trial, trial_linear
from fp8watch.diagnose.untouched import RandomState
from fp8watch.layers.fp8_linear import SITE_KEY, WatchedLinear
from fp8watch.numerics.operand_checks import OPERAND_DTYPES
from fp8watch.selection.module_filter import FilterFn, select_linears


@dataclass(frozen=True)
class LinearCall:
    """One call of a Linear in one pass."""

    module: str
    number: int  # of the module's calls in this pass, from 0
    x_MK: Tensor
    weight_NK: Tensor
    bias_N: Tensor | None
    dtype: torch.dtype  # of the output
    has_dgrad: bool  # whether a gradient of x is computed


OnInput = Callable[[LinearCall], None]
OnGradient = Callable[[LinearCall, Tensor], None]
"""(call, grad_output [M, N])."""


class DiagnosisCopy:
    """The copy.

    Attributes:
        model: the copy.
        linears: name -> Linear of the copy, in the order of the model's modules.
        called: names of Linears in the order of their first call, after a pass.
    """

    def __init__(
        self, model: nn.Module, loss_fn: LossFn | None, batch: Any, filter_fn: FilterFn | None, kept: Sequence[str] = ()
    ) -> None:
        """Copy the model. `kept`: shell patterns of Linears that the recipe leaves in high precision.

        Raises:
            TypeError: not a module.
            ValueError: it cannot be copied onto one rank, or has no Linear that would compute in FP8.
        """
        check(model)
        inner = unwrapped(model)
        taken = {name for name, m in inner.named_modules() if isinstance(m, WatchedLinear) and SITE_KEY in m.__dict__}
        self.original = inner
        self.model = deep_copy(inner)
        chosen: FilterFn | None = (lambda _m, name: name in taken) if taken and filter_fn is None else filter_fn
        found, _ = select_linears(self.model, chosen, kept=kept)
        if not found:
            raise ValueError(
                "no Linear of this model would compute in FP8; give filter_fn, or see what attach leaves out"
            )
        self.linears = dict(found)
        self.called: dict[str, int] = {}
        self._loss_fn = default_loss if loss_fn is None else loss_fn
        self._batch = copy.deepcopy(batch)
        self._random = RandomState()
        self.keep_buffers()

    def keep_buffers(self) -> None:
        """Start the passes that follow from the buffers as they are now."""
        self._buffers = {name: b.detach().clone() for name, b in self.model.named_buffers()}

    @property
    def device(self) -> torch.device:
        """Of the Linears."""
        return next(iter(self.linears.values())).weight.device

    def loss_of(self, batch: Any = None) -> Tensor:
        """One forward pass: the loss, with its graph. `batch`: another than the copy's own."""
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self._buffers[name])
        self._random.restore()
        self.called.clear()
        loss = checked_loss(self._loss_fn(self.model, copy.deepcopy(self._batch if batch is None else batch)))
        if not self.called:
            raise ValueError("loss_fn called no Linear of the model that it was given: it must use its first argument")
        return loss

    def visit(self, on_gradient: OnGradient | None = None, on_input: OnInput | None = None, batch: Any = None) -> float:
        """One forward pass and, for `on_gradient`, one backward pass; gradients of parameters are left in `.grad`.

        Args:
            on_gradient: called for each call of a Linear when the gradient of its output is there; recomputed forwards
                of activation checkpointing are not seen twice.
            on_input: called for each call in the forward pass.
            batch: another than the copy's own.

        Returns:
            The loss.

        Raises:
            ValueError: the loss has no gradient.
        """

        def hook(name: str) -> Callable[..., None]:
            def seen(module: nn.Linear, args: Any, kwargs: Mapping[str, Any], y: Any) -> None:
                call = self._call(name, module, args, kwargs, y)
                if call is None:
                    return
                if on_input is not None:
                    on_input(call)
                if on_gradient is not None and y.requires_grad:

                    def gradient(grad: Tensor) -> None:
                        with torch.no_grad():
                            on_gradient(call, grad.reshape(-1, grad.shape[-1]))

                    y.register_hook(gradient)

            return seen

        handles = [m.register_forward_hook(hook(name), with_kwargs=True) for name, m in self.linears.items()]
        try:
            self.model.zero_grad(set_to_none=True)
            with torch.set_grad_enabled(on_gradient is not None):
                loss = self.loss_of(batch)
            if on_gradient is not None:
                if not loss.requires_grad:
                    raise ValueError(
                        "the loss has no gradient: call with parameters that require one, outside of no_grad"
                    )
                loss.backward()  # type: ignore[no-untyped-call]
        finally:
            for handle in handles:
                handle.remove()
        return float(loss.detach())

    def loss_under(self, trials: Mapping[str, Trial], *, backward: bool = False) -> float:
        """The loss where some Linears compute under a trial; with `backward` gradients are left in `.grad`."""

        def hook(name: str, trial: Trial) -> Callable[..., Tensor | None]:
            def replaced(module: nn.Linear, args: Any, kwargs: Mapping[str, Any], y: Any) -> Tensor | None:
                call = self._call(name, module, args, kwargs, y)
                if call is None:
                    return None
                x = args[0] if args else kwargs["input"]
                x = x.to(y.dtype) if torch.is_autocast_enabled(x.device.type) else x
                return trial_linear(x, module.weight, module.bias, trial, y.dtype)

            return replaced

        handles = [
            self.linears[name].register_forward_hook(hook(name, trial), with_kwargs=True)
            for name, trial in trials.items()
        ]
        for name, module in self.linears.items():
            if name not in trials:
                handles.append(module.register_forward_hook(self._counted(name)))
        try:
            self.model.zero_grad(set_to_none=True)
            with torch.set_grad_enabled(backward):
                loss = self.loss_of()
                if backward:
                    loss.backward()  # type: ignore[no-untyped-call]
        finally:
            for handle in handles:
                handle.remove()
        return float(loss.detach())

    def _counted(self, name: str) -> Callable[..., None]:
        def counted(*_: Any) -> None:
            self.called[name] = self.called.get(name, 0) + 1

        return counted

    def _call(self, name: str, module: nn.Linear, args: Any, kwargs: Mapping[str, Any], y: Any) -> LinearCall | None:
        x = args[0] if args else kwargs.get("input")
        if not isinstance(x, Tensor) or not isinstance(y, Tensor) or not x.numel() or x.dtype not in OPERAND_DTYPES:
            return None
        number = self.called.get(name, 0)
        self.called[name] = number + 1
        has_dgrad = x.requires_grad
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(y.dtype)
        bias = None if module.bias is None else module.bias.detach()
        rows = x.detach().reshape(-1, x.shape[-1])
        return LinearCall(name, number, rows, module.weight.detach(), bias, y.dtype, has_dgrad)


def deep_copy(model: nn.Module) -> nn.Module:
    """A deep copy. Tensors with a graph that modules keep, such as an auxiliary loss of the last step, are copied without it."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in module.__dict__.values():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                memo[id(value)] = value.detach().clone()
    return copy.deepcopy(model, memo)
