"""Products with weights that the model computes in its forward: GEMM FLOPs that no parameter's shape tells.

Shapes:     what a forward returned -> products of tokens [M, K] with a weight [K, N] that is made of parameters
Thread:     training, once

Adapters such as LoKr, LoHa and FourierFT make a weight as large as the one that they adapt, and multiply with it. What can be
differentiated has been written down: autograd's graph is walked from what the forward returned. Sizes alone are read, for to
unpack what a product has saved may run a forward again that is checkpointed. Not seen are products with what is frozen or
a buffer, batched ones, and what is inside a compiled graph or a reentrant checkpoint.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

MAX_NODES = 100_000
"""Of a graph that is walked; of a larger one nothing is said."""
MAX_HELD = 1_000
"""Objects in what a forward returned that are looked at."""
MAX_MADE_OF = 16
"""Parameters that one weight is made of; what is made of more is taken for an activation."""
_FIRST_FACTOR = {"MmBackward0": ("_saved_self_sym_sizes", 0), "AddmmBackward0": ("_saved_mat1_sym_sizes", 1)}
"""Node of a product -> where the sizes of its first factor are, and which of its inputs that is."""
_AS_IT_IS = (
    "TBackward", "ToCopy", "View", "UnsafeView", "Transpose", "Permute", "Clone", "ReshapeAlias", "Expand", "Unsqueeze", "Squeeze",
    "Select", "Slice", "Split", "Unbind", "AsStrided", "Alias", "Narrow",
)  # fmt: skip
"""How the names of nodes begin behind which a parameter is the same numbers: a view, a part or a cast of it."""
_LOOKED_UP, _CONVOLVED = "Embedding", "Convolution"
"""How the names of nodes begin that make activations: whatever they are given, and where their input is no parameter."""


@dataclass(frozen=True)
class ComputedWeight:
    """A weight that products read and that is made of parameters."""

    made_of: frozenset[int]  # ids of the parameters
    shape: tuple[int, int]  # [N, K]


@dataclass(frozen=True)
class _Made:
    """What only parameters go into."""

    of: frozenset[int]
    as_it_is: bool  # one of them, not computed


def computed_weights(returned: Any, parameters: Container[int], rows: Container[int]) -> set[ComputedWeight]:
    """Weights that were computed in a forward and multiplied with what it was given.

    Args:
        returned: by the forward: a tensor, or what holds some.
        parameters: ids of those of the model; what others go into is not told.
        rows: numbers of rows M that activations of the model have.
    """
    found = set()
    known: dict[Any, _Made | None] = {}
    for node in _in_order(_roots(returned)):
        inputs = [before for before, _ in node.next_functions]
        name = node.name()
        known[node] = _made(node, name, inputs, known, parameters)
        if name in _FIRST_FACTOR:
            sizes, at = _FIRST_FACTOR[name]
            num_rows, k = (int(n) for n in getattr(node, sizes))
            first, second = inputs[at], inputs[at + 1]
            if num_rows not in rows or (first is not None and known[first] is not None):
                continue  # of parameters with each other
            known[node] = None
            weight = known[second] if second is not None else None
            if weight is not None and not weight.as_it_is:
                n = int(node._saved_mat2_sym_sizes[1])
                found.add(ComputedWeight(weight.of, (n, k)))
    return found


def flops_besides(weights: Iterable[ComputedWeight], counted: Mapping[int, float]) -> dict[ComputedWeight, float]:
    """GEMM FLOPs a token of each, less those that were counted of the parameters that it is made of."""
    left = dict(counted)
    besides = {}
    for weight in sorted(weights, key=lambda w: (-w.shape[0] * w.shape[1], sorted(w.made_of))):
        flops = 2.0 * weight.shape[0] * weight.shape[1]
        flops -= sum(left.pop(i, 0.0) for i in weight.made_of)
        if flops > 0:
            besides[weight] = flops
    return besides


def _roots(returned: Any) -> list[Any]:
    """Nodes of the tensors in what was returned: itself, in lists, in mappings, in what has attributes; it may hold itself."""
    found, left, seen = [], [returned], set[int]()
    while left and len(seen) < MAX_HELD:
        held = left.pop()
        if id(held) in seen:
            continue
        seen.add(id(held))
        if isinstance(held, Tensor):
            found += [held.grad_fn] if held.grad_fn is not None else []
        elif isinstance(held, Mapping):
            left += held.values()
        elif isinstance(held, list | tuple):
            left += held
        elif hasattr(held, "__dict__"):
            left += vars(held).values()
    return found


def _in_order(roots: list[Any]) -> Iterator[Any]:
    """Nodes of the graph, each behind those that its inputs come from; none of a graph that is too large."""
    order: list[Any] = []
    seen: set[Any] = set()
    stack = [(root, False) for root in roots]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            if len(seen) > MAX_NODES:
                return iter(())
            stack.append((node, True))
            stack += [(before, False) for before, _ in node.next_functions if before is not None and before not in seen]
    return iter(order)


def _module_of(node: Any) -> str:
    """Where the function of a node is written, of one in Python."""
    return str(getattr(type(node), "_forward_cls", node).__module__) if isinstance(node, BackwardCFunction) else ""


def _made(
    node: Any, name: str, inputs: list[Any], known: Mapping[Any, _Made | None], parameters: Container[int]
) -> _Made | None:
    """What a node gives, if only parameters go into it."""
    variable = getattr(node, "variable", None)
    if variable is not None:  # where a gradient is accumulated
        return _Made(frozenset({id(variable)}), True) if id(variable) in parameters else None
    is_ours = "fp8watch" in f"{name} {_module_of(node)}"  # a Linear that is observed
    if is_ours or name.startswith(_LOOKED_UP) or (name.startswith(_CONVOLVED) and inputs[0] is None):
        return None
    parts = [known[before] for before in inputs if before is not None]
    of: frozenset[int] = frozenset()
    for part in parts:
        if part is None:
            return None
        of |= part.of
    if not of or len(of) > MAX_MADE_OF:
        return None
    return _Made(of, len(parts) == 1 and parts[0] is not None and parts[0].as_it_is and name.startswith(_AS_IT_IS))
