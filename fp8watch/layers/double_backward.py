"""Gradients that cannot be differentiated again, and say so.

Shapes:     any, unchanged     Thread: autograd's

A rounded operand has no derivative of use. Without a word, a gradient penalty would lose the part of its gradient that
goes through the quantised operands, and nobody would see it. What is refused is reached from all that the gradient was made of: the
gradient of the output, and, by an output of the forward that nothing else reads, input and weight. `torch.autograd.grad` of some of
them alone would come by no other way, and be given zeros or the rest. It is saved by the node that it is an output of; where hooks pack
what is saved, and keep what they are given, that node would hold itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_REFUSAL = (
    "the gradient of a Linear that computes in FP8 is differentiated again (create_graph=True, nested torch.func.grad): "
    "quantised operands have no second derivative; leave this Linear out with filter_fn, or use recipe='observe'"
)


class _Once(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(grad: Tensor, *made_of: Tensor) -> Tensor:
        alias: Tensor = torch.ops.aten._unsafe_view.default(grad, grad.shape)
        return alias

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(_REFUSAL)


def once_only(grad: Tensor | None, *made_of: Tensor) -> Tensor | None:
    """The gradient itself; where a graph of the backward is made, one that refuses to be differentiated.

    Args:
        grad: of an input or a weight.
        made_of: the gradient of the output, and an output of the forward that is differentiable, is read by nothing, and was saved: by
            it, input and weight are reached. Under a compiler no graph of a backward is made, and it may be marked as the others are.

    Raises:
        RuntimeError: transforms of torch.func are nested, whose outer one would differentiate it.
    """
    if grad is None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return grad
    if len(torch._C._functorch.get_interpreter_stack() or ()) > 1:
        raise RuntimeError(_REFUSAL)
    refused: Tensor = _Once.apply(grad, *made_of)  # type: ignore[no-untyped-call]
    return refused


packed_by: Callable[[bool], Any] = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)
"""The hooks that pack what is saved now; False: those of tracing are none. A torch without this way to ask has none."""


def apply_packed(apply: Callable[..., Any], *args: Any) -> Any:
    """Of an autograd.Function, where hooks pack what it saves: of an output they are given the values alone, and torch, which knows
    whose output it is, gives the graph back where it is unpacked."""
    pack, unpack = packed_by(False)

    def values_of(saved: Tensor) -> Any:
        is_output = saved.grad_fn is not None and not any(saved is given for given in args)
        return pack(saved.detach() if is_output else saved)

    with torch.autograd.graph.saved_tensors_hooks(values_of, unpack):
        return apply(*args)
