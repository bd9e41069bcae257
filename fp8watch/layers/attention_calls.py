"""Where the logits of attention are seen: the functions that a probed attention module calls.

Thread:     training

While an attention module whose turn it is runs its forward, the functions through which attention computes are replaced
by ones that look at their arguments after they have run: scaled_dot_product_attention, softmax, flash_attn_func, and
what transformers' registry of attention functions returns. They are put back when the forward ends, however it ends.
Other threads call through, unseen. A mode on the stack would see more, and would make torch.compile compile anew what
runs inside; for the same reason a module with a compiled part is left alone. What is never seen stays in
`StepState.logits_unseen`.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from fp8watch.layers.custom_ops import is_eager, site_tensor
from fp8watch.layers.probe_ops import logits_wanted
from fp8watch.observer.attention_logits import Looked, Rule, look_at_logits, look_at_memory
from fp8watch.observer.observation_plan import ObservationPlan
from fp8watch.observer.stopwatch import SAMPLING
from fp8watch_agent.roles import layers_of

Function = Callable[..., Any]
Place = tuple[Any, str, Callable[[Function], Function]]
"""A module of Python or an object, the name of a function there, and what makes the one that replaces it."""


@dataclass(slots=True)
class _Running:
    """The forward of one attention module that is looked at."""

    seam: AttentionSeam
    plan: ObservationPlan
    seen: bool = False


class _Stack(threading.local):
    """Attention modules that run in this thread, the innermost last."""

    def __init__(self) -> None:
        self.running: list[_Running] = []


_stack = _Stack()
_lock = threading.Lock()
_replaced: list[tuple[Any, str, Function, Function | None]] = []  # where, replaced by what, and what was there itself
_num_open = 0


@dataclass(eq=False)
class AttentionSeam:
    """Both hooks of one attention module.

    Args:
        site: of its probe.
        fqn: its name.
        aliases: where its code holds the functions themselves.
    """

    site: Tensor
    fqn: str
    aliases: Sequence[Place] = ()
    turn: int = 0

    def __post_init__(self) -> None:
        self.number = int(self.site)

    def enter(self, module: nn.Module) -> None:
        """The module's forward begins."""
        if not module.training or torch.compiler.is_compiling():
            return
        if _stack.running and not self.fqn.startswith(f"{_stack.running[-1].seam.fqn}."):
            _close(0)  # forwards that an interrupt cut off: no hook told of their end
        plan = logits_wanted(self.number)
        if plan is not None:
            plan.guard.run("logits", self._open, plan, module)

    def _open(self, plan: ObservationPlan, module: nn.Module) -> None:
        global _num_open
        if any(m._compiled_call_impl is not None or "_orig_mod" in m._modules for m in module.modules()):
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        with _lock:
            _num_open += 1
            _stack.running.append(_Running(self, plan))
            for place in (*_PLACES, *_registries(), *self.aliases):
                _replace(*place)

    def leave(self) -> None:
        """The module's forward has ended, or raised."""
        if torch.compiler.is_compiling():
            return
        for depth, running in enumerate(_stack.running):
            if running.seam is self:
                running.plan.guard.run("logits", _close, depth)
                return


def _close(depth: int) -> None:
    """Look no more at what runs in this thread at this depth and below; the last one out puts the functions back."""
    global _num_open
    with _lock:
        _num_open -= len(_stack.running) - depth
        del _stack.running[depth:]
        if not _num_open:
            _put_back()


class EnterHook:
    """Forward pre-hook of an attention module. A copy or a pickle of the model gets a hook of the standard library that
    does nothing, so that files load without fp8watch and copies report to nobody."""

    def __init__(self, seam: AttentionSeam) -> None:
        self._seam = seam

    def __call__(self, module: nn.Module, _args: Any) -> None:
        self._seam.enter(module)

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(True), "__exit__")


class LeaveHook:
    """Forward hook of an attention module, called when it raises as well."""

    def __init__(self, seam: AttentionSeam) -> None:
        self._seam = seam

    def __call__(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self._seam.leave()

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")


def look_at_attention(plan: ObservationPlan, modules: Iterable[tuple[str, nn.Module, int]]) -> list[RemovableHandle]:
    """Look at the logits of attention modules in the steps in which their probes have their turn.

    Args:
        plan: of the watch.
        modules: name, module, row of its probe.
    """
    handles: list[RemovableHandle] = []
    names: set[str] = set()
    for fqn, module, row in modules:
        seam = AttentionSeam(site_tensor(plan, row), fqn, _aliases(type(module)))
        handles.append(module.register_forward_pre_hook(EnterHook(seam)))
        handles.append(module.register_forward_hook(LeaveHook(seam), always_call=True))
        names.add(fqn)
    plan.step.logits_unseen = names or None
    return handles


def logits_unseen(plan: ObservationPlan | None) -> str:
    """Attention modules whose logits were never seen, layers merged, and the remedy; empty where there are none."""
    names = layers_of(sorted(plan.step.logits_unseen or ())) if plan is not None else []
    if not names:
        return ""
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return (
        f"attention logits are not seen in {', '.join(names[:6])}{more} (compiled, or a kernel that is not known): "
        "watch.log(max_attention_logit=...)"
    )


def logits_summary(plan: ObservationPlan | None) -> str:
    """Whether the logits of attention are seen, in words."""
    if plan is None or plan.step.logits_unseen is None:
        return "not looked at: the model has no module called attention, or probes= leaves 'attention_logits' out"
    return logits_unseen(plan) or "seen"


# ---- what is looked at -------------------------------------------------------------------------------------------


def _after(original: Function, look: Callable[..., Looked | None]) -> Function:
    """A function that does what `original` does, and then looks at its arguments."""

    @wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        result = original(*args, **kwargs)
        if _stack.running:
            running = _stack.running[-1]
            running.plan.guard.run("logits", _look, running, look, args, kwargs)
        return result

    return function


def _look(running: _Running, look: Callable[..., Looked | None], args: Any, kwargs: Any) -> None:
    """Keep what one call shows in the scalars of the step."""
    plan, seam = running.plan, running.seam
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
    if not is_eager(*tensors) or torch._C._is_tracing():
        return
    began = plan.stopwatch.mark() if plan.stopwatch is not None else None
    try:
        looked = look(running, *args, **kwargs)
    except ValueError:  # of other shapes: it stays unseen
        looked = None
    if looked is not None:
        running.seen = True
        seam.turn += 1
        plan.step.note_logits(seam.fqn, looked.largest)
        if looked.sees_ahead is not None:
            plan.step.sees_ahead[seam.fqn] = looked.sees_ahead
        plan.step.attention_dtypes[seam.fqn] = _dtype(tensors[0])
    if plan.stopwatch is not None:
        plan.stopwatch.add(SAMPLING, began, plan.stopwatch.mark())


def _dtype(given: Tensor) -> str:
    """Of what attention is handed: queries, or the logits of its softmax."""
    name = str(given.dtype).removeprefix("torch.")
    device = given.device.type
    if not torch.is_autocast_enabled(device):
        return name
    return f"{name} under autocast to {str(torch.get_autocast_dtype(device)).removeprefix('torch.')}"


def _sdpa(
    running: _Running, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, **__: Any,
) -> Looked:  # fmt: skip
    return look_at_logits(query, key, Rule(scale, attn_mask, is_causal), running.seam.turn)


def _softmax(running: _Running, input: Tensor, dim: int | None = None, *_: Any, **__: Any) -> Looked | None:
    if input.dim() < 3 or not input.numel() or dim not in (-1, input.dim() - 1):  # of anything but rows of logits
        return None
    return look_at_memory(input, running.seam.turn)


def _flash(
    running: _Running, q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Any = (-1, -1), softcap: float = 0.0, *_: Any, **__: Any,
) -> Looked:  # fmt: skip
    """flash_attn_func, with queries [B, L, H, D]; a window of it only hides logits."""
    rule = Rule(softmax_scale, None, causal and q.shape[1] == k.shape[1], softcap)
    return look_at_logits(q.transpose(1, 2), k.transpose(1, 2), rule, running.seam.turn)


def _interface(
    running: _Running, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None,
    *_: Any, scaling: float | None = None, is_causal: bool | None = None, softcap: float | None = None, **__: Any,
) -> Looked | None:  # fmt: skip
    """An attention function of transformers, with queries [B, H, L, D]; asked only where nothing inside it was seen."""
    if running.seen:
        return None
    mask = attention_mask if isinstance(attention_mask, Tensor) and attention_mask.dim() == 4 else None
    causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    same = query.shape[-2] == key.shape[-2]
    return look_at_logits(query, key, Rule(scaling, mask, causal and mask is None and same, softcap), running.seam.turn)


def _registry(get_interface: Function) -> Function:
    """transformers' lookup of an attention function, which returns one that is looked at."""

    @wraps(get_interface)
    def function(*args: Any, **kwargs: Any) -> Any:
        found = get_interface(*args, **kwargs)
        if torch.compiler.is_compiling() or not _stack.running:
            return found
        _stack.running[-1].seen = False  # by this call of the module
        return _after(found, _interface)

    return function


# ---- where they are called from ------------------------------------------------------------------------------------

_PLACES: tuple[Place, ...] = (
    (functional, "scaled_dot_product_attention", partial(_after, look=_sdpa)),
    (functional, "softmax", partial(_after, look=_softmax)),
    (torch, "softmax", partial(_after, look=_softmax)),
)


def _registries() -> list[Place]:
    """transformers' registry of attention functions, once there is one."""
    found = getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", None)
    return [(found, "get_interface", _registry)] if hasattr(found, "get_interface") else []


def _aliases(cls: type) -> tuple[Place, ...]:
    """Names under which the files of a class hold one of the functions: `from torch.nn.functional import softmax`."""
    files = {c.__module__: sys.modules.get(c.__module__) for c in cls.__mro__}
    known = {id(getattr(holder, name)): make for holder, name, make in _PLACES}
    places: list[Place] = []
    for module, file in files.items():
        if file is None or module.partition(".")[0] in ("torch", "builtins"):
            continue
        for name, value in list(vars(file).items()):
            make = partial(_after, look=_flash) if name == "flash_attn_func" else known.get(id(value))
            if make is not None and callable(value):
                places.append((file, name, make))
    return tuple(places)


def _replace(holder: Any, name: str, make: Callable[[Function], Function]) -> None:
    if not any(h is holder and n == name for h, n, *_ in _replaced):
        made, own = make(getattr(holder, name)), vars(holder).get(name)
        setattr(holder, name, made)
        _replaced.append((holder, name, made, own))


def _put_back() -> None:
    """Put back what was replaced, but for what somebody else has replaced since."""
    while _replaced:
        holder, name, made, own = _replaced.pop()
        if vars(holder).get(name) is not made:
            continue
        if own is None:
            delattr(holder, name)
        else:
            setattr(holder, name, own)
