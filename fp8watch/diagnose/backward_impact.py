"""What FP8 costs in the backward GEMMs of a Linear: the change of the gradient, projected on the update.

Shapes:     x [M, K], grad_output [M, N], update of the parameters -> nats per step
Thread:     the caller's

A step makes an update u(G) of the parameters from a gradient G. Where the gradient is off by E, the update is off by J·E with
J = ∂u/∂G, and the loss after the step, to first order in E, by

    ⟨G₊, J·E⟩ = ⟨E, d⟩, d = J·G₊     nats; above 0: the step descends less

G₊ is the gradient after the step. J is symmetric for optimizers that treat each element for itself (SGD, Adam and their kin);
d is a difference of two updates. wgrad: E is its own error, and d that of the weight. dgrad: its error e in the gradient of x
reaches every parameter upstream, and ⟨E, d⟩ = Σ e · Δx with Δx, the change of x along d: measured by one more forward pass.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp8watch.diagnose.diagnosis_copy import DiagnosisCopy, LinearCall
from fp8watch.diagnose.model_copies import MakeOptimizer, optimizer_of
from fp8watch.diagnose.readers import Reader, trial_of
from fp8watch.diagnose.trial_linear import trial_dgrad, trial_wgrad

STEP = 1e-3
"""Length of the steepest-descent update, as a share of the length of the parameters."""
PROBE = 1e-4
"""The same of the step after which inputs are looked at again: short enough to be linear, far above float32's rounding."""
NUDGE = 0.03
"""Length of what is added to the gradient to see how the update follows it, as a share of the gradient's."""


@dataclass(frozen=True)
class BackwardImpact:
    """Of one Linear, in nats per step; None where the GEMM is not in FP8, not computed, or saw other rows after the step."""

    dgrad: float | None
    wgrad: float | None
    measured_dgrad: float | None = None  # the loss after a step with this GEMM in FP8, less that after one without
    measured_wgrad: float | None = None


class BackwardPass:
    """The errors of both GEMMs of each call, kept until the update is known."""

    def __init__(self, copied: DiagnosisCopy, reader: Reader) -> None:
        self._copied, self._reader = copied, reader
        self._dgrad: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}  # (x, error of its gradient)
        self._wgrad: dict[str, Tensor] = {}

    def see(self, call: LinearCall, grad_MN: Tensor) -> None:
        """Note one call."""

        def read(operand: str, x: Tensor, columnwise: bool) -> Tensor:
            return self._reader.see(call.module, operand, x, columnwise).values

        g, x, w = grad_MN.detach(), call.x_MK, call.weight_NK
        if call.has_dgrad and "dgrad" in self._reader.gemms:
            plain = g.mm(w.to(g.dtype)).float()
            self._dgrad[call.module, call.number] = x, trial_dgrad(g, w, read, torch.float32) - plain
        if self._copied.linears[call.module].weight.requires_grad and "wgrad" in self._reader.gemms:
            error = trial_wgrad(g, x, read, torch.float32) - g.t().mm(x.to(g.dtype)).float()
            before = self._wgrad.get(call.module)
            self._wgrad[call.module] = error if before is None else before + error

    def finish(self, optimizer: torch.optim.Optimizer | MakeOptimizer | None, original: nn.Module) -> BackwardImpacts:
        """Make the update from the gradients that the pass left, and project the errors on it."""
        stepper = Stepper(self._copied, optimizer, original)
        of_dgrad: dict[str, float | None] = {}

        def on_input(call: LinearCall) -> None:
            kept = self._dgrad.get((call.module, call.number))
            if kept is None:
                return
            x, error = kept
            before = of_dgrad.get(call.module, 0.0)
            if x.shape != call.x_MK.shape or before is None:
                of_dgrad[call.module] = None
            else:
                change = (call.x_MK.double() - x.double()) / stepper.probe_share
                of_dgrad[call.module] = before + float((error.double() * change).sum())

        with stepper.at_probe():
            self._copied.visit(on_input=on_input)
        of_wgrad = {
            name: float((error.double() * stepper.follows[id(self._copied.linears[name].weight)].double()).sum())
            for name, error in self._wgrad.items()
        }
        return BackwardImpacts(self._copied, self._reader, stepper, of_dgrad, of_wgrad)


@dataclass
class BackwardImpacts:
    """Of all Linears."""

    _copied: DiagnosisCopy
    _reader: Reader
    _stepper: Stepper
    _dgrad: dict[str, float | None]
    _wgrad: dict[str, float]

    @property
    def descent(self) -> float:
        """Nats that the update lowers the loss by, to first order."""
        return self._stepper.descent

    def of(self, module: str, *, measure: bool) -> BackwardImpact:
        """Of one Linear; measured where asked for."""
        dgrad, wgrad = self._dgrad.get(module), self._wgrad.get(module)
        found: dict[str, float | None] = {"dgrad": dgrad, "wgrad": wgrad}
        measured = {
            gemm: self._measured(module, gemm) if measure and value is not None else None
            for gemm, value in found.items()
        }
        return BackwardImpact(dgrad, wgrad, measured["dgrad"], measured["wgrad"])

    def _measured(self, module: str, gemm: str) -> float:
        self._copied.loss_under({module: trial_of(self._reader, module, (gemm,))}, backward=True)
        return self._stepper.loss_after_step() - self._stepper.loss_after


class Stepper:
    """Updates of the copy's parameters, each from the same place."""

    def __init__(
        self, copied: DiagnosisCopy, optimizer: torch.optim.Optimizer | MakeOptimizer | None, original: nn.Module
    ) -> None:
        """Make the update from the gradients that are there."""
        self._copied = copied
        self._parameters = [p for p in copied.model.parameters() if p.grad is not None]
        self._before = [p.detach().clone() for p in self._parameters]
        self._optimizer = optimizer_of(optimizer, original, copied.model)
        self._state: Any = None if self._optimizer is None else copy.deepcopy(self._optimizer.state_dict())
        grads = self._grads()
        long = _length(self._before)
        self._rate = STEP * long / max(_length(grads), 1e-30)
        update = self._update(grads)
        self.descent = -sum(float((g.double() * u.double()).sum()) for g, u in zip(grads, update, strict=True))
        self._step_from(grads)
        self.loss_after = copied.visit(lambda *_: None)
        after = self._grads()
        self._back()
        share = NUDGE * _length(grads) / max(_length(after), 1e-30)
        nudged = self._update([g + share * a for g, a in zip(grads, after, strict=True)])
        follows = [(n - u) / share for n, u in zip(nudged, update, strict=True)]
        self.follows = {id(p): d for p, d in zip(self._parameters, follows, strict=True)}
        self.probe_share = PROBE * long / max(_length(follows), 1e-30)

    def _grads(self) -> list[Tensor]:
        return [torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for p in self._parameters]

    def _update(self, grads: list[Tensor]) -> list[Tensor]:
        """What the optimizer adds to the parameters, given gradients."""
        if self._optimizer is None:
            return [-self._rate * g for g in grads]
        self._step_from(grads)
        update = [p.detach() - b for p, b in zip(self._parameters, self._before, strict=True)]
        self._back()
        return update

    def _step_from(self, grads: list[Tensor]) -> None:
        for p, g in zip(self._parameters, grads, strict=True):
            p.grad = g.clone()
        self._step()

    def at_probe(self) -> _AtProbe:
        """A context in which the copy's parameters are a short way along the update."""
        return _AtProbe(self)

    def loss_after_step(self) -> float:
        """The loss after an update from the gradients that are there; the parameters are put back."""
        self._step()
        loss = self._loss_here()
        self._back()
        return loss

    @torch.no_grad()
    def _step(self) -> None:
        if self._optimizer is not None:
            self._optimizer.load_state_dict(copy.deepcopy(self._state))
            with torch.enable_grad():
                self._optimizer.step()
            return
        for p in self._parameters:
            if p.grad is not None:
                p.sub_(p.grad, alpha=self._rate)

    def _loss_here(self) -> float:
        return self._copied.loss_under({})

    @torch.no_grad()
    def _back(self) -> None:
        for p, before in zip(self._parameters, self._before, strict=True):
            p.copy_(before)

    @torch.no_grad()
    def _move(self, share: float) -> None:
        for p, before in zip(self._parameters, self._before, strict=True):
            p.copy_(before + share * self.follows[id(p)])


class _AtProbe:
    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper

    def __enter__(self) -> None:
        self._stepper._move(self._stepper.probe_share)

    def __exit__(self, *_: object) -> None:
        self._stepper._back()


def _length(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))
