"""The class of a module that multiplies with parameters of its own, swapped so that its products are looked at.

Shapes:     whatever the module's own forward takes and returns     Thread: training

Swapped as the class of a Linear is: parameters, names, hooks, state_dict, copies and pickles stay as they are. Under
torch.compile and torch.jit.trace the module's own forward runs, and nothing is looked at. Experts that compute in FP8 are
left out of compiled graphs instead, so that they compute so wherever they are called.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fp8watch.layers.fp8_linear import COMPUTES_KEY, GEMMS_KEY, KEYS, SITE_KEY
from fp8watch.layers.moved_linear import DEVICE_KEY, is_moved, without_site
from fp8watch.layers.own_gemms import GemmMode
from fp8watch.layers.own_turns import HeadSite, OwnGemms
from fp8watch.layers.wrapped_forward import lead_to_class, replaces_forward

_classes: dict[type[nn.Module], type[nn.Module]] = {}


def refuses(module: nn.Module) -> str | None:
    """Why the class of a module cannot be swapped, or None."""
    cls = type(module)
    if replaces_forward(module):
        return "forward of its own on the module"
    if cls.forward is nn.Module.forward:
        return "no forward"
    if cls.__reduce_ex__ is not object.__reduce_ex__ or cls.__reduce__ is not object.__reduce__:
        return "copies itself in its own way"
    return None


def watched_class(base: type[nn.Module]) -> type[nn.Module]:
    """The subclass of a module's class whose forward is looked at, made once.

    Raises:
        TypeError: of a class that does not let itself be subclassed.
    """
    got = _classes.get(base)
    if got is not None:
        return got
    original = base.forward

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return (_outside_of_graphs if self.__dict__.get(COMPUTES_KEY) else _plain)(original, self, args, kwargs)
        computes, gemms = self.__dict__.get(COMPUTES_KEY), self.__dict__.get(GEMMS_KEY)
        if computes and is_moved(self):
            out = original(self, *args, **kwargs)
            if self.training:
                gemms.note_rest(out)
            return out
        if computes:
            return _compute(original, self, args, kwargs)
        if gemms is None or not self.training or torch._C._get_tracing_state() is not None:
            return original(self, *args, **kwargs)
        gemms.called = True
        if gemms.sites and gemms.rests():
            out = original(self, *args, **kwargs)
            gemms.note_rest(out)
            return out
        if not gemms.due():
            return original(self, *args, **kwargs)
        with GemmMode(gemms, self):
            return original(self, *args, **kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        """Copies and pickles are of the plain class: a file loads without fp8watch, a copy writes into no slab."""
        own = getattr(self, "__getstate__", None)
        state = self.__dict__ if own is None else own()
        if isinstance(state, dict):
            state = {k: v for k, v in state.items() if k not in KEYS}
        return copyreg._reconstructor, (base, object, None), state  # type: ignore[attr-defined]

    def replicate(self: Any) -> Any:
        return without_site(self, base._replicate_for_data_parallel(self), KEYS)  # type: ignore[no-untyped-call]

    namespace = {
        "_fp8watch_base": base, "__module__": base.__module__, "__qualname__": base.__qualname__,
        "__doc__": base.__doc__, "forward": forward, "__reduce_ex__": reduce, "_replicate_for_data_parallel": replicate,
    }  # fmt: skip
    make: Any = type(base)
    made: type[nn.Module] = make(base.__name__, (base,), namespace)
    _classes[base] = made
    return made


def _compute(original: Callable[..., Any], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A forward whose products with experts compute in FP8.

    Raises:
        RuntimeError: it is traced, or transformed by torch.func: what is written down would not be in FP8.
    """
    gemms = module.__dict__[GEMMS_KEY]
    tracing = torch._C._get_tracing_state() is not None
    if tracing or torch._C._functorch.peek_interpreter_stack() is not None:
        how = "torch.jit.trace" if tracing else "a transform of torch.func"
        raise RuntimeError(f"experts of {type(module).__name__} compute in FP8, which {how} cannot follow; {_REMEDY}")
    gemms.called |= module.training
    with GemmMode(gemms, module):
        return original(module, *args, **kwargs)


_REMEDY = "leave them in high precision by filter_fn, or use recipe='observe'"
_BREAK = f"fp8watch: experts compute in FP8 outside of compiled graphs; where a graph may not break, {_REMEDY}"
_outside_of_graphs: Callable[..., Any] = _compute
"""`_compute`, which the compiler does not look into; made with the first experts, because that imports the compiler."""


def _plain(original: Callable[..., Any], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return original(module, *args, **kwargs)


def look_at(
    module: nn.Module,
    sites: Mapping[str, Tensor],
    heads: Mapping[str, HeadSite] | None = None,
    computes: frozenset[str] = frozenset(),
) -> OwnGemms:
    """Look at the products of a module with its own parameters, in place.

    Args:
        module: it.
        sites: path of a parameter -> its site.
        heads: path of an embedding's weight -> the head that it is.
        computes: paths of parameters of experts whose products compute in FP8.

    Raises:
        TypeError: its class does not let itself be swapped.
    """
    gemms = OwnGemms(sites, heads or {}, computes)
    if (
        "_fp8watch_base" not in type(module).__dict__
    ):  # it is there after a detach under FSDP2, which put its class on top
        module.__class__ = watched_class(type(module))
    lead_to_class(module)
    module.__dict__[SITE_KEY] = gemms.any_site
    module.__dict__[GEMMS_KEY] = gemms
    module.__dict__[DEVICE_KEY] = next(module.parameters()).device
    if computes:
        global _outside_of_graphs
        if _outside_of_graphs is _compute:
            _outside_of_graphs = torch.compiler.disable(_compute, reason=_BREAK)  # type: ignore[no-untyped-call]
        module.__dict__[COMPUTES_KEY] = True
    return gemms
