"""Full evidence under Transformer Engine: its debug mode shows each operand before the cast, of every module.

Shapes:     an operand [M, K], before the cast     Thread: training, and autograd's

In debug mode norms and activations leave the cast to Python, and a *feature* registered with nvdlfw-inspect is given each
operand. `te_debug()` registers one before the first module is built. A module is in debug mode in its turn alone, once in
`every` steps, in the first step, and in the steps after a jump; in the calls between it computes by its usual kernels, and
its codes are read as ever.

Whether a call is in debug mode is settled before it, by the two attributes with which Transformer Engine's modules keep
where an iteration began and when a feature is due next. `debug_api.step()` need not be called for this.

Source: transformer_engine/debug and nvdlfw_inspect, versions 2.9.0 to 2.20.2 and 0.2.2.
"""

from __future__ import annotations

import importlib
import json
import logging
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from fp8watch.integrations.te_package import load

EVERY = 16
"""Steps in which a module is in debug mode once, unless `te_debug` says otherwise."""

_FEATURE = "Fp8Watch"  # the name of the class below: that is how a configuration names it
_NAMESPACE = "transformer_engine"
_OPERANDS = {"activation": "input", "gradient": "grad_output"}  # weights are seen as parameters
_PART = re.compile(r"\.(?:fc(?P<fc>[12])|gemm_(?P<gemm>\d+))$")


class Observer(Protocol):
    """What the feature speaks to."""

    def wants_operands(self) -> bool:
        """Whether the call that runs now is to show its operands."""

    def show_operand(self, operand: str, x: torch.Tensor, layer: str) -> None:
        """Take an operand before its cast. Must not raise."""


@dataclass
class _Mode:
    """What one `te_debug()` has set up."""

    api: Any
    every: int
    whole: bool  # all layers and nobody else's features: iterations are ours
    fp8: Any  # Transformer Engine's global state, asked whether FP8 is on
    wraps_fp8: bool  # whether weights may be stored in FP8
    folder: Any
    observers: list[Observer] = field(default_factory=list)


_mode: _Mode | None = None


def te_debug(
    config_file: str | Path | Mapping[str, Any] | None = None,
    *,
    every: int = EVERY,
    feature_dirs: Sequence[str] = (),
    log_dir: str | None = None,
    **options: Any,
) -> None:
    """Have Transformer Engine show every operand before its cast: exact statistics of all sites of the modules that are built
    after this call. Call it before the first of them, in place of `nvdlfw_inspect.api.initialize`.

    In its turn a module runs in debug mode: norms and activations are not fused with the cast, and the output of a norm is
    cast from the type that it is handed on in, so that a sampled step may differ from others in the last bit. Between its
    turns a module computes as it would without. What debug mode costs is not part of `watch.overhead`. In its turn a module
    cannot be captured in a CUDA graph or compiled; CPU offloading is refused by Transformer Engine as long as this is on.

    Args:
        config_file: of other features that are wanted too, a path or its content: operands are then shown of the layers that
            it names, and `debug_api.step()` is yours. None: all layers, no other features.
        every: each module is in debug mode once in so many steps, not all in the same.
        feature_dirs: further folders with features; Transformer Engine's own are among them always.
        log_dir: where nvdlfw-inspect writes; None: warnings only, into a folder that goes when the process ends.
        options: passed on to `nvdlfw_inspect.api.initialize`.

    Raises:
        ValueError: an argument that cannot work, with value, rule and remedy.
        RuntimeError: a package is missing, it is initialised already, or a module was built before; with the remedy.
    """
    global _mode
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every={every!r}: must be a whole number of steps of at least 1; leave it out for {EVERY}")
    package, version = load()
    if package is None:
        raise RuntimeError(f"te_debug needs Transformer Engine: {version}")
    try:
        api: Any = importlib.import_module("nvdlfw_inspect.api")
        state = importlib.import_module("transformer_engine.debug.pytorch.debug_state").TEDebugState
    except ImportError as error:
        raise RuntimeError(f"te_debug needs nvdlfw-inspect: pip install nvdlfw-inspect ({error})") from error
    if api.DEBUG_MANAGER is not None:
        raise RuntimeError(
            "nvdlfw-inspect is initialised already: call fp8watch.te_debug(config_file, …) in its place; it takes the same arguments"
        )
    if state.debug_enabled is False:
        raise RuntimeError(
            "a module of Transformer Engine exists already: call fp8watch.te_debug() before the first is built"
        )
    folder = tempfile.TemporaryDirectory(prefix="fp8watch-te-debug-")
    config = Path(folder.name, "config.json")  # JSON is YAML
    config.write_text(json.dumps(_configuration(config_file)))
    features = str(Path(importlib.import_module("transformer_engine.debug").__path__[0], "features"))
    if log_dir is None and "statistics_logger" not in options and "tb_writer" not in options:
        options["statistics_logger"] = _silent_logger()
    importlib.import_module("nvdlfw_inspect.registry").Registry.register_feature(namespace=_NAMESPACE)(Fp8Watch)
    try:
        api.initialize(
            config_file=str(config), feature_dirs=[features, *feature_dirs], log_dir=log_dir or folder.name, **options
        )
    except BaseException:
        api.end_debug()
        raise
    if log_dir is None:
        logger = getattr(importlib.import_module("nvdlfw_inspect.logging").get_logger(), "logger", None)
        if isinstance(logger, logging.Logger):
            logger.setLevel(logging.WARNING)
    quantization = importlib.import_module("transformer_engine.debug.pytorch.debug_quantization").DebugQuantizer
    _mode = _Mode(
        api, every, config_file is None, _fp8_state(), hasattr(quantization, "wrap_quantized_tensor"), folder
    )  # fmt: skip


class Fp8Watch:
    """The feature: asks for the operands of the calls whose turn it is, and hands them to the observer."""

    def parse_config_and_api(self, config: Mapping[str, Any], **_: Any) -> tuple[bool, dict[str, Any]]:
        """Whether a call concerns this feature: all do, and say for themselves what they want."""
        return True, dict(config)

    def inspect_tensor_enabled(
        self, config: Mapping[str, Any], layer_name: str, tensor_name: str, iteration: int
    ) -> tuple[bool, None]:
        """Whether a tensor is to be shown in this call, and when next: that is settled call by call."""
        observers = _mode.observers if _mode is not None and tensor_name in _OPERANDS else ()
        return any(observer.wants_operands() for observer in observers), None

    def inspect_tensor(
        self, config: Mapping[str, Any], layer_name: str, tensor_name: str, tensor: torch.Tensor | None, **_: Any
    ) -> None:
        """Take a tensor before its cast. `tensor` is None for one that is stored in FP8."""
        if _mode is not None and tensor is not None and tensor_name in _OPERANDS:
            for observer in _mode.observers:
                observer.show_operand(_OPERANDS[tensor_name], tensor, layer_name)


for _method in (Fp8Watch.inspect_tensor_enabled, Fp8Watch.inspect_tensor):
    setattr(_method, "is_api", True)  # noqa: B010 - what nvdlfw_inspect.registry.api_method does; functions have no such name


def active() -> bool:
    """Whether `te_debug` is in force."""
    return _mode is not None and _mode.api.DEBUG_MANAGER is not None


def shows_all() -> bool:
    """Whether operands of all layers are shown."""
    return active() and _mode is not None and _mode.whole


def join(observer: Observer) -> bool:
    """Show operands to this observer from now on; returns whether there are any to show."""
    if _mode is None or not active():
        return False
    _mode.observers.append(observer)
    return True


def leave(observer: Observer) -> None:
    """Show it nothing any more."""
    if _mode is not None and observer in _mode.observers:
        _mode.observers.remove(observer)


def is_due(step: int, place: int) -> bool:
    """Whether the module with this place among its like has its turn in this step."""
    return _mode is not None and (step + place) % _mode.every == 0


def set_turn(module: Any, due: bool) -> bool:
    """Put a module into debug mode for the call that begins, or keep it out; returns whether it was put."""
    if _mode is None:
        return False
    due = due and _can(module, _mode)
    if due or _mode.whole:
        module.debug_last_iteration = None  # so that it asks
        module.next_iter_when_debug_should_be_run = 0 if due else None
    return due


def end_step(step: int) -> None:
    """Begin another iteration: modules that nobody watches leave debug mode when they see one. Two numbers do, and
    nvdlfw-inspect keeps something for each.
    """
    if _mode is not None and _mode.whole:
        _mode.api.initialize_training_step(step % 2)


def gemm_of(kind: str, layer: str) -> int:
    """Which GEMM of a module a layer's name stands for: "mlp.fc2" is the second of a LayerNormMLP."""
    found = _PART.search(layer)
    if found is None or kind not in ("LayerNormMLP", "GroupedLinear"):
        return 0
    return int(found["fc"]) - 1 if found["fc"] else int(found["gemm"])


def delays_wgrad(module: Any) -> bool:
    """Whether a module computes its weight gradients when `backward_dw` is called, behind its backward."""
    store = getattr(module, "wgrad_store", None)
    return store is not None and bool(store.delay_wgrad_compute())


def _can(module: Any, mode: _Mode) -> bool:
    """Whether Transformer Engine takes this call in debug mode; where it would raise, it is left out of it."""
    if delays_wgrad(module):
        return False
    if getattr(module, "single_grouped_weight", False) or getattr(module, "single_grouped_bias", False):
        return False
    if getattr(module, "primary_weights_in_fp8", False) and not mode.wraps_fp8:
        return False
    if mode.fp8 is not None and not mode.fp8.is_fp8_enabled():
        return False
    return not torch.cuda.is_current_stream_capturing()


def _configuration(given: str | Path | Mapping[str, Any] | None) -> dict[str, Any]:
    """All layers with this feature; or what was given, with this feature in each of its parts."""
    feature = {_FEATURE: {"enabled": True}}
    if given is None:
        return {"fp8watch": {"enabled": True, "layers": {"layer_name_regex_pattern": ".*"}, _NAMESPACE: feature}}
    if not isinstance(given, Mapping):
        given = importlib.import_module("yaml").safe_load(Path(given).read_text())
    if not isinstance(given, Mapping):
        raise ValueError(f"config_file={given!r}: must hold named parts, each with layers and features")
    return {name: {**part, _NAMESPACE: {**part.get(_NAMESPACE, {}), **feature}} for name, part in given.items()}


def _silent_logger() -> Any:
    """A logger of statistics that keeps none: without one, nvdlfw-inspect makes a file."""
    base = importlib.import_module("nvdlfw_inspect.logging").BaseLogger
    log_scalar: Callable[..., None] = lambda *_, **__: None  # noqa: E731
    return type("Silent", (base,), {"log_scalar": log_scalar})()


def _fp8_state() -> Any:
    """FP8GlobalStateManager, which has moved between versions; None where it is not found."""
    for name in ("quantization", "fp8"):
        try:
            return importlib.import_module(f"transformer_engine.pytorch.{name}").FP8GlobalStateManager
        except (ImportError, AttributeError):
            continue
    return None
