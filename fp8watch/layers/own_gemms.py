"""GEMMs that a module computes with parameters of its own: experts in one tensor, Conv1D, fused projections, attention.

Shapes:     the arguments of a product -> x [M, K], parameter [N, K], [K, N] or of experts [E, …]
Thread:     training

The forward of such a module runs inside a mode that sees the functions of torch that are called there, and recognises
products of which one factor is a parameter of the module: the parameter itself, a view of it, a cast of either, or the
matrices of experts gathered token by token. The mode is entered inside forward, so that a recomputation enters it again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fp8watch.layers.custom_ops import is_eager, plan_of
from fp8watch.layers.expert_groups import ExpertGroups
from fp8watch.layers.expert_products import bias_of, can_multiply, multiply, unusual
from fp8watch.layers.local_part import local_part
from fp8watch.layers.observe_gemm import Gemm, observe_gemm
from fp8watch.layers.own_turns import OwnGemms
from fp8watch.layers.parameter_trail import ParameterTrail
from fp8watch.layers.probe_ops import look_at_probe
from fp8watch.observer.unseen import num_dispatch_modes, unseen

_INSIDE = "multi_head_attention_forward"
"""A function written in Python whose products are made inside, where a mode does not look."""
_GATHERS = frozenset({"__getitem__", "index_select"})
_CASTS = frozenset({"to", "type", "type_as", "bfloat16", "half", "float", "contiguous"})
_X_FIRST = ("input", "self", "mat1", "tensor", "batch1", "mat_a"), ("weight", "other", "mat2", "batch2", "mat_b")


class _Product(NamedTuple):
    """Where the factors of a function are, and the dimension of the second along which it contracts."""

    at: int
    contracts: int
    is_grouped: bool = False


_PRODUCTS: Mapping[str, _Product] = {
    "linear": _Product(0, -1),
    **dict.fromkeys(("matmul", "__matmul__", "mm", "bmm"), _Product(0, -2)),
    **dict.fromkeys(("addmm", "baddbmm"), _Product(1, -2)),
    **dict.fromkeys(("grouped_mm", "_grouped_mm", "grouped_mm_fallback"), _Product(0, -2, is_grouped=True)),
}


class _Known(NamedTuple):
    """Memory of a parameter, or of a cast of it."""

    start: int
    end: int
    tensor: Tensor  # as large as the parameter, or as one expert of it
    path: str
    expert: int | None
    gathered: Tensor | None = None  # integers [S]: it holds the matrix of an expert for each token


class GemmMode(TorchFunctionMode):
    """What one forward calls."""

    def __init__(self, gemms: OwnGemms, module: nn.Module) -> None:
        super().__init__()
        self._gemms, self._counts = gemms, module.training
        self._measured: set[str] = set()
        self._known: list[_Known] = []
        self._parameters: dict[str, Tensor] = {}
        self._grad = torch.is_grad_enabled()
        for path in (*gemms.sites, *gemms.heads):
            held = _get(module, path)
            parameter = local_part(held)
            if parameter is not held:
                parameter = parameter.detach().requires_grad_(held.requires_grad)
            if isinstance(parameter, Tensor) and is_eager(parameter):
                self._parameters[path] = parameter
                self._add(parameter, path, None)
        self._trail = ParameterTrail(gemms.use, self._parameters)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # a compiled function that the module calls: no part of this is in its graph
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == _INSIDE and isinstance(func, FunctionType):
            with self:
                return _looking_inside(func)(*args, **kwargs)
        product = _PRODUCTS.get(name)
        if product is not None and self._gemms.computes:
            in_fp8 = self._in_fp8(name, product, args, kwargs)
            if in_fp8 is not None:
                return in_fp8
        out = func(*args, **kwargs)
        if product is not None or name in _CASTS:
            self._guarded(self._see, name, product, args, kwargs, out)
        elif name in _GATHERS:
            self._guarded(self._gather, args, out)
        if len(self._gemms.seen) < len(self._parameters):
            self._guarded(self._trail.see, name, args, kwargs, out)
        return out

    def see_linear(self, x: Tensor, weight: Tensor) -> None:
        """A Linear in FP8 takes an input: its product is no call of torch."""
        if len(self._gemms.seen) < len(self._parameters):
            self._guarded(self._trail.see, "linear", (x, weight), {}, None)

    def _guarded(self, look: Callable[..., None], *args: Any) -> None:
        try:
            (look if not num_dispatch_modes() else unseen(look))(*args)
        except Exception as error:  # noqa: BLE001 - training goes on, and the guard counts
            plan = plan_of(self._gemms.any_site)
            if plan is not None:
                plan.guard.swallow("own gemm", error)

    def _in_fp8(self, name: str, product: _Product, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """The product in FP8, where it is one with experts that compute so."""
        first, second = _factors(product, args, kwargs)
        known = self._weight_among(name, product, first, second)
        if known is None or known[0].path not in self._gemms.computes:
            return None
        (parameter, expert), path = known, known[0].path
        plan, right = plan_of(self._gemms.sites[path]), self._find(second) is not None
        if plan is not None and plan.step.warming:
            return None
        x, w = (first, second) if right else (second, first)
        autocast = not product.is_grouped and torch.is_autocast_enabled(x.device.type)
        if not can_multiply(x, w, autocast=autocast):
            return None
        odd = unusual(name, args, kwargs)
        if self._grad and not torch.is_grad_enabled():
            odd = "inside a function whose backward is its own"
        elif not is_eager(x):
            odd = f"{name} with a {type(x).__name__}"
        gemm = None
        if odd is None and parameter.gathered is not None:
            gemm = self._token_by_token(first, second, x, parameter, product)
        elif odd is None and right:
            gemm = self._gemm(product, args, kwargs, x, w, x, parameter, expert)
        elif odd is None:
            gemm = self._turned(w, x, x, parameter, expert)
        if gemm is None or gemm.of is None:
            self._gemms.kept_high.setdefault(path, odd or f"{name} of shapes that are not known")
            return None
        if self._counts:
            self._measured.add(path)
            self._gemms.seen.add(path)
        contracts, bias = product.contracts if right else -1, bias_of(name, args, kwargs)
        return multiply(
            gemm, x, w, self._gemms.sites[path], contracts=contracts, bias=bias, count=self._counts, autocast=autocast
        )

    def _weight_among(self, name: str, product: _Product, first: Any, second: Any) -> tuple[_Known, int | None] | None:
        """Which of the factors is a weight; None: neither of them, or both: a weight that is computed."""
        if not isinstance(first, Tensor) or not isinstance(second, Tensor):
            return None
        of_second = self._find(second)
        if of_second is None:
            return self._find(first) if name != "linear" and not product.is_grouped else None
        return of_second if self._find(first) is None else None

    def _gather(self, args: Sequence[Any], out: Any) -> None:
        """A matrix for each token out of a parameter of experts: `parameter[experts]`."""
        index = args[-1] if len(args) > 1 else None
        whole: Any = args[0] if args else None
        if not isinstance(index, Tensor) or index.dim() != 1 or index.dtype not in (torch.int32, torch.int64):
            return
        found = self._find(whole)
        if (
            found is None
            or whole.dim() != 3
            or not isinstance(out, Tensor)
            or out.shape != (len(index), *whole.shape[1:])
        ):
            return
        start = out.data_ptr()
        end = start + out.numel() * out.element_size()
        self._known.append(_Known(start, end, out, found[0].path, None, index.detach()))

    def _see(
        self, name: str, product: _Product | None, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> None:
        part = local_part(out)
        if not isinstance(part, Tensor) or not is_eager(part):
            return
        if product is None:
            args, out = [local_part(x) for x in args[:1]], part
            found = self._find(args[0]) if args else None
            if found is not None and out.data_ptr() != args[0].data_ptr() and out.shape == args[0].shape:
                known, expert = found
                whole = args[0].shape == known.tensor.shape
                self._add(out, known.path, known.expert if whole and expert is None else expert)
            return
        first, second = _factors(product, args, kwargs)
        if not self._counts or not isinstance(first, Tensor):
            return
        dgrad, of_ranks = first.requires_grad, out if part is not out else None
        first, second = local_part(first), local_part(second)
        found = self._weight_among(name, product, first, second)
        if found is None:
            return
        second_is = self._find(second)
        if found[0].path in self._gemms.heads:
            self._head(found[0].path, first if second_is is not None else second, part)
            return
        if found[0].gathered is not None:
            gemm = self._token_by_token(first, second, part, found[0], product)
        elif second_is is not None:
            gemm = self._gemm(product, args, kwargs, first, second, part, *found)
        else:
            gemm = self._turned(first, second, part, *found)
        path = found[0].path
        if gemm is not None and of_ranks is not None:
            gemm = replace(gemm, dgrad=dgrad, of_ranks=of_ranks) if _one_product(first, second, part, product) else None
        if gemm is None or not is_eager(gemm.x):
            self._gemms.use.read_by.setdefault(path, f"{name} of shapes that are not known")
            return
        self._measured.add(path)
        self._gemms.seen.add(path)
        hidden = self._grad and not torch.is_grad_enabled()
        if hidden and gemm.parameter.requires_grad:
            self._gemms.forward_only.add(path)
        observe_gemm(gemm, self._gemms.sites[path], hidden=hidden)

    def _head(self, path: str, x: Tensor, y: Tensor) -> None:
        """The product of a head that is no Linear: its output, and what came into it."""
        self._gemms.seen.add(path)
        fqn, given, site = self._gemms.heads[path]
        if given is not None:
            look_at_probe(x, int(given))
        if site is not None:
            look_at_probe(y, int(site), (fqn, x))

    def _gemm(
        self, product: _Product, args: Sequence[Any], kwargs: Mapping[str, Any], x: Tensor, w: Tensor, y: Tensor,
        known: _Known, expert: int | None,
    ) -> Gemm | None:  # fmt: skip
        """A product of x and w."""
        of: ExpertGroups | int | None = expert
        if product.is_grouped:
            ends = kwargs.get("offs", args[2] if len(args) > 2 else None)
            if x.dim() != 2 or w.dim() != 3 or not isinstance(ends, Tensor) or ends.shape != w.shape[:1]:
                return None
            of = ExpertGroups(ends)
        elif w.dim() == 3:
            if x.dim() != 3 or x.shape[0] != w.shape[0] or w.shape[0] != self._parameters[known.path].shape[0]:
                return None
            of = ExpertGroups(torch.arange(1, x.shape[0] + 1, device=x.device) * x.shape[1])
        elif w.dim() != 2 or x.dim() < 1:
            return None
        # the dimension whose elements lie together in the parameter, seen through whatever view of it
        transposed = w.stride(product.contracts) > w.stride(-3 - product.contracts)
        return Gemm(
            x.reshape(-1, x.shape[-1]), y, False, self._parameters[known.path], transposed, of,
            known.path not in self._measured, x.requires_grad,
        )  # fmt: skip

    def _token_by_token(
        self, first: Tensor, second: Tensor, y: Tensor, known: _Known, product: _Product
    ) -> Gemm | None:
        """Products of one row and one matrix for each token, sorted by expert here."""
        of_second = known.start <= second.data_ptr() < known.end
        x, w = (first, second) if of_second else (second, first)
        experts, parameter = known.gathered, self._parameters[known.path]
        if experts is None or x.dim() != 3 or 1 not in x.shape[1:] or w.shape[0] != len(experts) or product.at:
            return None
        order = torch.argsort(experts, stable=True)
        numbers = torch.arange(parameter.shape[0], device=experts.device, dtype=experts.dtype)
        ends = torch.searchsorted(experts[order].contiguous(), numbers, right=True)
        contracts = -2 if of_second else -1
        transposed = w.stride(contracts) > w.stride(-3 - contracts)
        return Gemm(
            x.detach().reshape(len(experts), -1)[order], y, False, parameter, transposed, ExpertGroups(ends),
            known.path not in self._measured, x.requires_grad, order,
        )  # fmt: skip

    def _turned(self, w: Tensor, x: Tensor, y: Tensor, known: _Known, expert: int | None) -> Gemm | None:
        """A product of w and x: each column of x is a token."""
        if w.dim() != 2 or x.dim() < 2:
            return None
        rows = x.transpose(-1, -2)
        transposed = w.stride(-1) > w.stride(-2)
        return Gemm(
            rows.reshape(-1, rows.shape[-1]), y, True, self._parameters[known.path], transposed, expert,
            known.path not in self._measured, x.requires_grad,
        )  # fmt: skip

    def _add(self, tensor: Tensor, path: str, expert: int | None) -> None:
        start = tensor.data_ptr()
        self._known.append(_Known(start, start + tensor.numel() * tensor.element_size(), tensor, path, expert))

    def _find(self, tensor: Any) -> tuple[_Known, int | None] | None:
        """The parameter whose memory this is, and the expert that it is of."""
        if not isinstance(tensor, Tensor) or tensor.dim() < 2 or not is_eager(tensor) or not tensor.numel():
            return None
        at = tensor.data_ptr()
        for known in self._known:
            if known.start <= at < known.end and tensor.dtype == known.tensor.dtype:
                if known.tensor.dim() < 3 or tensor.dim() != 2 or tensor.numel() == known.tensor.numel():
                    return known, known.expert
                size = known.tensor[0].numel() * known.tensor.element_size()
                return known, (at - known.start) // size
        return None


def _factors(product: _Product, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    first, second = (
        args[at] if len(args) > at else next((kwargs[n] for n in names if n in kwargs), None)
        for at, names in zip((product.at, product.at + 1), _X_FIRST, strict=True)
    )
    return first, second


def _one_product(x: Tensor, w: Tensor, y: Tensor, product: _Product) -> bool:
    """Whether a rank's parts are what its product read, as far as shapes tell: ranks may have sent each other more first."""
    if w.dim() != 2 or x.dim() < 1:
        return False
    contracted, kept = w.shape[product.contracts], w.shape[-3 - product.contracts]
    return x.shape[-1] == contracted and y.shape == (*x.shape[:-1], kept)


def _get(module: nn.Module, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


def _looking_inside(function: FunctionType) -> Callable[..., Any]:
    """The same function, which never asks whether somebody looks at it from outside."""
    names = {**function.__globals__, "has_torch_function": lambda *_: False}
    inner = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    inner.__kwdefaults__ = function.__kwdefaults__
    return inner
