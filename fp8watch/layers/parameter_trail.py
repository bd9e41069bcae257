"""What becomes of parameters of which no product is recognised: a factor of one that is not known, or an array that is no weight.

Shapes:     a call of torch and what came out of it, in a forward of their module -> paths of parameters
Thread:     training

Learned arrays (latents, memories, codebooks) have the shape of a weight, and enter a model as its activations do. So what is
computed from such a parameter is followed through the first forwards: it is an array where a Linear takes it as its input, where it
becomes some rows among those of an activation, or is added to or multiplied element by element with one, and where neither it nor
what came of that is ever a factor of a product. What was made of parameters and constants alone is still a weight: one that is masked,
scaled or a sum. A function that is given a parameter and something else, and that is not known, may be a product. A parameter whose
trail ends, in such a function, in one that is not seen or outside the forward, is not told to be an array.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

FORWARDS = 2
"""Of a module, in which its parameters are followed."""
_CASTS = ("to", "type", "type_as", "bfloat16", "half", "float", "contiguous")
_NO_READERS = frozenset({"__get__", "__getitem__", "index_select", "data_ptr", "embedding", *_CASTS})
_TAKES: Mapping[str, int] = {
    "linear": 1,
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), 2),
    **dict.fromkeys(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), 2),
}
"""Products that tell activations from weights: so many arguments are activations, the rest are weights."""
_PRODUCTS = frozenset(
    (
        "matmul", "rmatmul", "mm", "bmm", "mv", "addmm", "addmv", "baddbmm", "addbmm", "dot", "vdot",
        "inner", "outer", "ger", "kron", "einsum", "tensordot", "chain_matmul", "multi_dot", "bilinear", "cdist",
        "grouped_mm", "_grouped_mm", "grouped_mm_fallback",
    )
)  # fmt: skip
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
_JOINS = frozenset(
    (
        "cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "column_stack", "where", "pad_sequence",
        "scaled_dot_product_attention", "setitem", "copy", "index_put", "index_copy", "index_add", "scatter",
        "scatter_add", "masked_scatter", "slice_scatter", "select_scatter",
    )
)  # fmt: skip
"""Where an array lies beside activations, or is what attention reads."""
_ELEMENT_BY_ELEMENT = frozenset(
    (
        "add", "radd", "iadd", "sub", "rsub", "isub", "subtract", "mul", "rmul", "imul", "multiply", "div", "rdiv", "divide",
        "true_divide", "truediv", "rtruediv", "itruediv", "floor_divide", "floordiv", "rfloordiv", "remainder", "fmod",
        "pow", "rpow", "lerp", "addcmul", "addcdiv", "maximum", "minimum", "max", "min", "fmax", "fmin", "clamp", "clip",
        "layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm", "broadcast_tensors", "mse_loss", "l1_loss",
        "smooth_l1_loss", "huber_loss", "cosine_similarity", "pairwise_distance",
    )
)  # fmt: skip
_LOOK_UPS = frozenset({"embedding", "embedding_bag", "grid_sample"})
_ASKS = frozenset(
    (
        *_CASTS, "view_as", "expand_as", "reshape_as", "getitem", "index_select", "gather", "take", "take_along_dim",
        "repeat_interleave", "eq", "ne", "lt", "le", "gt", "ge", "equal", "allclose", "isclose", "is_same_size",
    )
)  # fmt: skip
"""What reads of the other tensors only where, how or whether."""
_SUMS = frozenset(
    ("sum", "mean", "norm", "vector_norm", "amax", "amin", "max", "min", "std", "var", "median", "prod", "logsumexp")
)
"""What these make of a weight alone, its scale or a penalty, is multiplied with or added to activations, too."""
_IN_PLACE = frozenset({"setitem", "iadd", "isub", "imul", "itruediv", "ipow", "imatmul"})
_BETWEEN = (
    "fp8watch.layers.own_gemms", "torch.overrides", "torch.functional", "torch.nn.functional", "torch._tensor", "torch._ops",
    "torch._library",
)  # fmt: skip
"""Modules whose frames lie between a call and who called."""
_OBSERVER = tuple(f"fp8watch.{room}." for room in ("kernels", "layers", "numerics", "observer", "quantize", "session"))

Paths = frozenset[str]
NONE: Paths = frozenset()


class _Made(NamedTuple):
    """What a tensor is made of."""

    of: Paths = NONE
    whole: Paths = NONE  # of those: more than sums of them


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
        self._made: dict[int, tuple[weakref.ref[Tensor], _Made]] = {}
        self._follows = use.followed < FORWARDS and torch.is_grad_enabled()
        if self._follows:
            use.followed += 1
            for path, parameter in parameters.items():
                self._keep(parameter, _Made(frozenset({path}), frozenset({path})))

    def see(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """One call of a function of torch."""
        given = list(_tensors((*args, *kwargs.values())))
        if not self._follows and self._unread.isdisjoint(map(id, given)):
            return
        if _by_the_observer(name):
            return
        if name not in _NO_READERS:
            for path, parameter in self._parameters.items():
                if any(t is parameter for t in given):
                    self._use.read_by.setdefault(path, name)
                    self._unread.discard(id(parameter))
        if self._follows:
            self._follow(*_plain(name), args, kwargs, given, out)

    def _follow(
        self, name: str, in_place: bool, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[Tensor], out: Any
    ) -> None:  # fmt: skip
        made = [self._made_of(t) for t in given]
        paths = NONE.union(*(m.of for m in made))
        if not paths:
            return
        target = given[0] if in_place else None  # what is written into is no activation for what is written
        beside = any(_is_activation(t) and not m.of for t, m in zip(given, made, strict=True) if t is not target)
        if name in _TAKES:  # of a Linear, or with a weight that was computed
            rest = (*args[_TAKES[name] :], *(value for key, value in kwargs.items() if key != "input"))
            weights = NONE.union(*(self._made_of(t).of for t in _tensors(rest)))
            self._use.as_factor |= weights
            self._use.as_array |= paths - weights
        elif name in _PRODUCTS or name in _CONVOLUTIONS:
            self._use.as_factor |= paths
        elif name in _LOOK_UPS:
            self._use.as_array |= paths
        elif name in _JOINS or name in _ELEMENT_BY_ELEMENT or name in _ASKS or not _several(given):
            whole = NONE.union(*(m.whole for m in made))
            if beside and name not in _ASKS:
                self._use.as_array |= whole
            if name.startswith("new_") or name.endswith("_like"):
                return
            if name in _SUMS and not _several(given):
                whole = NONE
            written = [] if target is None else [target, *([] if target._base is None else [target._base])]
            for t in (*_tensors((out,)), *written):
                if beside and name in _JOINS:
                    self._made.pop(id(t), None)
                else:
                    self._keep(t, _Made(paths, whole))
        else:  # it may be a product
            self._use.as_factor |= paths
            self._use.read_by.update(dict.fromkeys(paths, name))

    def _made_of(self, tensor: Tensor) -> _Made:
        known = self._made.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else _Made()

    def _keep(self, tensor: Tensor, made: _Made) -> None:
        if _is_number(tensor):
            of, whole = self._made_of(tensor)
            whole |= made.whole if tensor.numel() > 1 else NONE
            self._made[id(tensor)] = weakref.ref(tensor), _Made(of | made.of, whole)


num_modes: Callable[[], int] = getattr(torch._C, "_len_torch_function_stack", lambda: 0)
"""That look at functions of torch now; a torch without this way to ask has none, and arrays stay what `F.linear` says."""
_modes: Callable[[], list[Any]] = getattr(torch.overrides, "_get_current_function_mode_stack", list)


def linear_in_fp8(x: Tensor, weight: Tensor) -> None:
    """Tell the modes that look at the forwards around it of a Linear whose product is no call of torch."""
    for mode in _modes():
        if hasattr(type(mode), "see_linear"):
            mode.see_linear(x, weight)


@lru_cache(maxsize=1024)
def _plain(name: str) -> tuple[str, bool]:
    """A function without what its name says of overloads and ways to call it, and whether it writes into its first argument."""
    name = name.partition(".")[0].removeprefix("linalg_")
    if name.startswith("__") and name.endswith("__"):
        return name[2:-2], name[2:-2] in _IN_PLACE
    in_place = name.endswith("_") and not name.endswith("__")
    return name.removesuffix("_") if in_place else name, in_place


def _by_the_observer(name: str) -> bool:
    """Whether fp8watch called it, for what it looks at or computes itself; a Linear that is watched calls for the model."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (at := frame.f_globals.get("__name__") or "").startswith(_BETWEEN):
        frame = frame.f_back
    return frame is not None and at.startswith(_OBSERVER) and name not in ("linear", "scaled_dot_product_attention")


def _is_activation(tensor: Tensor) -> bool:
    """What is computed with gradients from something else than the parameters that are followed: no mask, and no other parameter."""
    return tensor.requires_grad and not isinstance(tensor, nn.Parameter) and tensor.grad_fn is not None


def _is_number(tensor: Tensor) -> bool:
    """Whether it may be a factor: weights are quantised to bytes, too."""
    return tensor.is_floating_point() or tensor.dtype in (torch.int8, torch.uint8)


def _several(given: Sequence[Tensor]) -> bool:
    """Whether more than one tensor is given that may be a factor: then a function may be a product."""
    return len({id(t) for t in given if _is_number(t) and t.numel() > 1}) > 1


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from (v for v in value if isinstance(v, Tensor))
