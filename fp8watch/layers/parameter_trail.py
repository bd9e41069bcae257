"""What becomes of parameters of which no product is recognised: a factor of one that is not known, or an array that is no weight.

Shapes:     a call of torch and what came out of it, in a forward of their module -> paths of parameters
Thread:     training

Learned arrays (latents, memories, codebooks) have the shape of a weight, and enter a model as its activations do. So what is
computed from such a parameter is followed through the first forwards: it is an array where a Linear takes it as its input, where it
becomes some rows among those of an activation, or is added to or multiplied element by element with one, and where neither it nor
what came of that is ever a factor of a product. What was made of parameters and constants alone is still a weight: one that is masked,
scaled or a sum. A parameter whose trail ends, in a function that is not seen or outside the forward, is not told to be an array.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

FORWARDS = 2
"""Of a module, in which its parameters are followed."""
_CASTS = ("to", "type", "type_as", "bfloat16", "half", "float", "contiguous")
_NO_READERS = frozenset({"__get__", "__getitem__", "index_select", "data_ptr", "embedding", *_CASTS})
_LINEAR = "linear"
_PRODUCTS = frozenset(
    (
        "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "addmm", "addmv", "baddbmm", "addbmm", "dot", "vdot",
        "inner", "outer", "ger", "kron", "einsum", "tensordot", "chain_matmul", "multi_dot", "bilinear", "cdist",
        "grouped_mm", "_grouped_mm", "grouped_mm_fallback",
    )
)  # fmt: skip
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
_JOINS = frozenset(
    {"cat", "concat", "concatenate", "stack", "hstack", "vstack", "where", "scaled_dot_product_attention"}
)
"""Where an array lies beside activations, or is what attention reads."""
_LOOK_UPS = frozenset({"embedding", "embedding_bag"})

Paths = frozenset[str]
NONE: Paths = frozenset()


@dataclass(eq=False)
class ParameterUse:
    """What is known of the parameters of one module."""

    read_by: dict[str, str] = field(default_factory=dict)  # without a product -> the first function that read them
    as_array: set[str] = field(default_factory=set)
    as_factor: set[str] = field(default_factory=set)
    followed: int = 0  # forwards

    def is_array(self, path: str) -> bool:
        """Whether a parameter entered the model as activations do, and never multiplied anything."""
        return path in self.as_array and path not in self.as_factor


class ParameterTrail:
    """Follows parameters through one forward.

    Args:
        use: of the module; what is found is kept there.
        parameters: by their paths.
    """

    def __init__(self, use: ParameterUse, parameters: Mapping[str, Tensor]) -> None:
        self._use, self._parameters = use, parameters
        self._unread = {id(p) for path, p in parameters.items() if path not in use.read_by}
        self._made: dict[int, tuple[weakref.ref[Tensor], Paths]] = {}
        self._follows = use.followed < FORWARDS and torch.is_grad_enabled()
        if self._follows:
            use.followed += 1
            for path, parameter in parameters.items():
                self._keep(parameter, frozenset({path}))

    def see(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """One call of a function of torch."""
        if not self._follows and self._unread.isdisjoint(map(id, _tensors((*args, *kwargs.values())))):
            return
        given = list(_tensors((*args, *kwargs.values())))
        if name not in _NO_READERS:
            for path, parameter in self._parameters.items():
                if any(t is parameter for t in given):
                    self._use.read_by.setdefault(path, name)
                    self._unread.discard(id(parameter))
        if self._follows:
            self._follow(name, given, out)

    def _follow(self, name: str, given: Sequence[Tensor], out: Any) -> None:
        made = [self._made_of(t) for t in given]
        paths = NONE.union(*made)
        if not paths:
            return
        if name == _LINEAR:  # of a Linear, or with a weight that was computed
            weights = NONE.union(*made[1:])
            self._use.as_factor |= weights
            self._use.as_array |= paths - weights
        elif name in _PRODUCTS or name in _CONVOLUTIONS:
            self._use.as_factor |= paths
        elif name in _LOOK_UPS:
            self._use.as_array |= paths
        else:
            beside = any(_is_activation(t) and not of for t, of in zip(given, made, strict=True))
            if beside:
                self._use.as_array |= paths
            if not (beside and name in _JOINS):
                for t in _tensors((out,)):
                    self._keep(t, paths)

    def _made_of(self, tensor: Tensor) -> Paths:
        known = self._made.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else NONE

    def _keep(self, tensor: Tensor, paths: Paths) -> None:
        if tensor.is_floating_point():
            self._made[id(tensor)] = weakref.ref(tensor), paths | self._made_of(tensor)


def _is_activation(tensor: Tensor) -> bool:
    """What is computed with gradients from something else than the parameters that are followed: no mask, and no other parameter."""
    return tensor.requires_grad and not isinstance(tensor, nn.Parameter) and tensor.grad_fn is not None


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from (v for v in value if isinstance(v, Tensor))
