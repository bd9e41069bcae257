"""When a step ends: optimizers, GradScaler, exceptions, SIGTERM and exit, noticed without being told.

Thread:     training

torch calls a global hook after the step of each of its optimizers. It fires for optimizers that hold nothing of
ours, for those inside others as well (see nested_steps) and once a parameter for optimizers in backward, so a step only
ends when the outermost optimizer owns the step (see step_optimizer) and a watched module ran a backward since the last end.
"""

from __future__ import annotations

import atexit
import functools
import math
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fp8watch.layers import custom_ops
from fp8watch.observer.observation_plan import ObservationPlan
from fp8watch.observer.step_sample import NOTHING
from fp8watch.observer.unseen import unseen
from fp8watch.session.checkpoint_hooks import wrap_saving
from fp8watch.session.gradient_norm import wrap_clipping
from fp8watch.session.label_smoothing import wrap_label_smoother
from fp8watch.session.loss_targets import wrap_cross_entropy
from fp8watch.session.nested_steps import ALONE, NestedSteps, Nesting
from fp8watch.session.shape_inference import wrap_shape_inference
from fp8watch_agent.guard import Guard

if TYPE_CHECKING:
    from fp8watch_agent.recorder import Recorder


class StepListener(Protocol):
    """Who is told of what may end a step: a watch."""

    guard: Guard

    def _owns(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer ends the steps of this watch."""

    def _before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""

    def _ran(self) -> bool:
        """Whether something of the model has run since the last step ended, so that there is one to end."""

    def _on_optimizer(self, optimizer: torch.optim.Optimizer, nesting: Nesting = ALONE) -> None:
        """An optimizer has stepped."""

    def _on_scaler_step(self, optimizer: torch.optim.Optimizer) -> None:
        """A GradScaler steps an optimizer that no watch owns."""

    def _on_scale(self, optimizer: torch.optim.Optimizer, scale: torch.Tensor | None) -> None:
        """The gradients of that optimizer are as much larger; a disabled scaler has no scale."""

    def _on_scaler(self, scale: torch.Tensor | None, optimizers: set[int]) -> None:
        """A GradScaler has updated its scale."""

    def _on_clip(self, parameters: list[torch.Tensor], norm: torch.Tensor, max_norm: float = math.inf) -> None:
        """Gradients have been clipped."""

    def _on_targets(self, targets: torch.Tensor, ignored: int) -> None:
        """A loss was computed against these class indices."""

    def _on_loss(self, loss: torch.Tensor, adds_up: bool) -> None:
        """A loss was computed behind the model: a mean, or a share of the step's that adds up."""

    def _on_save(self, saved: Any) -> Callable[[], None] | None:
        """Something is about to be saved; what is returned is called behind that."""

    def _on_death(self) -> None:
        """The process ends, or training raised."""


_watches: weakref.WeakValueDictionary[int, StepListener] = weakref.WeakValueDictionary()  # by id
_undo: list[Callable[[], None]] = []
_lock = threading.Lock()
_nested = NestedSteps()


def _all_watches() -> list[StepListener]:
    """Those that are alive. Not by iterating: that takes five calls in Python, three times a step."""
    return [watch for ref in _watches.valuerefs() if (watch := ref()) is not None]


def is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer ends the steps of some watch."""
    return any(watch._owns(optimizer) for watch in _all_watches())


def _each(action: Callable[[StepListener], Any]) -> None:
    for watch in _all_watches():
        watch.guard.run("step_end", action, watch)


def _not_traced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """For hooks that a compiled `optimizer.step` calls: torch's compiler would trace into them, and compile what they look at anew in
    each step. The compiler is loaded in their first call; an optimizer has loaded it when it was made."""
    disable = getattr(torch, "_disable_dynamo", None)
    return hook if disable is None else functools.wraps(hook)(disable(hook))


def _after_optimizer(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if (nesting := _nested.ends(optimizer)) is not None:
        _each(lambda w: None if is_capturing() else w._on_optimizer(optimizer, nesting))


def _before_optimizer(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Where `step` is given a closure, the backward is in there: what it steps with is known behind that."""
    if not _nested.begins(optimizer):
        return None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    waits: list[bool] = []
    if callable(closure) and not isinstance(closure, nn.Module):
        _each(lambda w: waits.append(w._owns(optimizer) and _is_called_first(optimizer, w._ran())))
    if closure is None or not any(waits):
        _look(optimizer)
        return None
    heard = _then_look(closure, optimizer)
    if len(args) > 1:
        return (args[0], heard, *args[2:]), kwargs
    return args, {**kwargs, "closure": heard}


def _look(optimizer: torch.optim.Optimizer) -> None:
    _each(lambda w: None if is_capturing() else w._before_optimizer(optimizer))


def _is_called_first(optimizer: torch.optim.Optimizer, has_run: bool) -> bool:
    """Whether an optimizer calls its closure before it does anything, as torch's do; others may have moved weights by then (SAM)."""
    return type(optimizer).__module__.startswith("torch.optim.") or not has_run


def _then_look(closure: Callable[..., Any], optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The closure, and a look behind its first call."""
    looked = False

    @functools.wraps(closure)
    def heard(*args: Any, **kwargs: Any) -> Any:
        nonlocal looked
        loss = closure(*args, **kwargs)
        if not looked:
            looked = True
            with torch.no_grad():
                _look(optimizer)
        return loss

    return heard


def _saving(saved: Any) -> Callable[[], None]:
    """Ask each watch whether that is a checkpoint of its model; they are told when it has been written."""
    written: list[tuple[StepListener, Callable[[], None]]] = []

    def ask(watch: StepListener) -> None:
        if (then := watch._on_save(saved)) is not None:
            written.append((watch, then))

    _each(ask)

    def tell() -> None:
        for watch, then in written:
            watch.guard.run("checkpoint", then)

    return tell


def _wrap_scaler() -> Callable[[], None]:
    """GradScaler skips by not calling the optimizer; its update() is where that can be seen, its step() says whose it is."""
    cls: Any = torch.amp.GradScaler
    original_step, original_update = cls.step, cls.update

    @functools.wraps(original_step)
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        owned: list[bool] = []
        _each(lambda w: owned.append(w._owns(optimizer)))
        if not any(owned):  # what steps another watched model is nobody's optimizer of copies
            _each(lambda w: w._on_scaler_step(optimizer))
        _each(lambda w: w._on_scale(optimizer, getattr(self, "_scale", None)))
        return original_step(self, optimizer, *args, **kwargs)

    @functools.wraps(original_update)
    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        # a disabled scaler has neither of the two
        scale, optimizers = getattr(self, "_scale", None), set(getattr(self, "_per_optimizer_states", ()))
        result = original_update(self, *args, **kwargs)
        _each(lambda w: w._on_scaler(scale, optimizers))
        return result

    cls.step, cls.update = step, update

    def undo() -> None:
        if cls.step is step:
            cls.step = original_step
        if cls.update is update:
            cls.update = original_update

    return undo


def _after_clipping(parameters: list[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    _each(lambda w: None if is_capturing() else w._on_clip(parameters, norm, max_norm))


def _after_loss(targets: torch.Tensor, ignored: int) -> None:
    if not custom_ops.counts():
        return
    for watch in _all_watches():  # while a CUDA graph is captured it reads none on that device
        watch.guard.run("step_end", unseen(watch._on_targets), targets, ignored)


def _after_smoothing(loss: torch.Tensor, adds_up: bool) -> None:
    _each(lambda w: None if is_capturing() or not custom_ops.counts() else unseen(w._on_loss)(loss, adds_up))


def _wrap_excepthook() -> Callable[[], None]:
    original = sys.excepthook

    def excepthook(*args: Any) -> None:
        if not hasattr(sys, "ps1") and not sys.flags.interactive:  # at a prompt, a typing error is not the end
            _each(lambda w: w._on_death())
        original(*args)

    sys.excepthook = excepthook

    def undo() -> None:
        if sys.excepthook is excepthook:
            sys.excepthook = original

    return undo


def _wrap_sigterm() -> Callable[[], None]:
    """Only where the default action stands: a handler of the host's own knows better when to die."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return lambda: None

    def on_sigterm(signum: int, _frame: Any) -> None:
        _each(lambda w: w._on_death())
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signum)

    signal.signal(signal.SIGTERM, on_sigterm)

    def undo() -> None:
        on_main = threading.current_thread() is threading.main_thread()
        if on_main and signal.getsignal(signal.SIGTERM) is on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    return undo


def _at_exit() -> None:
    _each(lambda w: w._on_death())


def start(watch: StepListener) -> None:
    """Begin to tell a watch where its steps end."""
    with _lock:
        if not _undo:
            before = register_optimizer_step_pre_hook(_not_traced(_before_optimizer))
            handle = register_optimizer_step_post_hook(_not_traced(_after_optimizer))
            atexit.register(_at_exit)
            _undo.extend(
                [
                    before.remove, handle.remove, _wrap_scaler(), wrap_clipping(_after_clipping),
                    wrap_cross_entropy(_after_loss), wrap_label_smoother(_after_smoothing), wrap_saving(_saving),
                    wrap_shape_inference(), _wrap_excepthook(), _wrap_sigterm(),
                ]
            )  # fmt: skip
            _undo.append(lambda: atexit.unregister(_at_exit))
        _watches[id(watch)] = watch


def watch_of(model: nn.Module) -> StepListener | None:
    """The watch of this very model that is alive."""
    return next((w for w in _all_watches() if getattr(w, "_model", None) is model), None)


def stop(watch: StepListener) -> None:
    """Take everything back when the last watch goes."""
    with _lock:
        _watches.pop(id(watch), None)
        if not _watches:
            while _undo:
                watch.guard.run("step_end.undo", _undo.pop())


def abandoned(plan: ObservationPlan, recorder: Recorder) -> None:
    """A watch went with its model, without detach. The collector of garbage must not wait for the network."""
    plan.slab = None
    plan.begin_step(NOTHING)
    if not list(plan.modules):  # those that are held elsewhere compute on, unobserved
        custom_ops.remove_plan(plan)
    threading.Thread(target=recorder.close, name="fp8watch-close", daemon=True).start()


def is_capturing() -> bool:
    """Whether a CUDA graph is captured on this stream: then nothing runs, and no step ends. Each replay accumulates;
    `watch.step()` after it ends the step."""
    # where nothing has used a device yet, nothing is captured: to ask whether there is one takes several times as long
    used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return used and torch.cuda.is_current_stream_capturing()
