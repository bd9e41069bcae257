"""Full evidence under Transformer Engine, as an opt-in: its custom recipe, with quantisers that show what they cast.

Upstream:   (the caller's recipe)     Downstream: fp8watch.integrations.transformer_engine
Shapes:     an operand [M, K], before the cast     Thread: training, and autograd's

The stock quantisers stay the default. With a custom recipe the cast leaves the fused norms and activations, and Python
sees every operand: statistics of all sites are exact, at the price of those fusions. The codes are made by the quantiser
that the caller's factory gives; here they are only passed on.

Source: transformer_engine.common.recipe.CustomRecipe(qfactory=…), experimental there as of 2.20.
State of this file: as that of fp8watch.integrations.transformer_engine.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from fp8watch.integrations.transformer_engine import TeObserver, load

QuantizerFactory = Callable[[Any], Any]
_SHARED = ("rowwise_usage", "columnwise_usage", "internal", "optimize_for_gemm")


def observing_recipe(qfactory: QuantizerFactory, observer: TeObserver, **options: Any) -> Any:
    """A CustomRecipe that quantises as `qfactory` says and shows each operand to the observer.

    Raises:
        RuntimeError: Transformer Engine cannot be imported, or its version has no custom recipes; with the reason.
    """
    package, version = load()
    if package is None:
        raise RuntimeError(f"a custom recipe cannot be made: {version}")
    recipes = importlib.import_module("transformer_engine.common.recipe")
    if not hasattr(recipes, "CustomRecipe"):
        raise RuntimeError(
            f"transformer_engine {version} has no CustomRecipe; use a later version, or its stock recipes"
        )
    return recipes.CustomRecipe(qfactory=observing_factory(qfactory, observer), **options)


def observing_factory(qfactory: QuantizerFactory, observer: TeObserver) -> QuantizerFactory:
    """The same factory, its quantisers shown what they cast. Requests for stateful quantisers pass as they are."""
    base = _quantizer_class()
    observing = _observing_class(base)

    def factory(role: Any) -> Any:
        quantizer = qfactory(role)
        return observing(quantizer, role, observer) if isinstance(quantizer, base) else quantizer

    return factory


def _quantizer_class() -> type[Any]:
    """Quantizer moved from tensor.quantized_tensor to quantized_tensor between 2.8 and 2.20."""
    for name in ("quantized_tensor", "tensor.quantized_tensor"):
        try:
            found: type[Any] = importlib.import_module(f"transformer_engine.pytorch.{name}").Quantizer
        except (ImportError, AttributeError):
            continue
        return found
    raise RuntimeError("transformer_engine has no Quantizer where it is looked for: not a version that is known")


def _observing_class(base: Any) -> Any:
    class ObservingQuantizer(base):  # type: ignore[misc]
        """Shows an operand to the observer and has it quantised by another quantiser."""

        custom = True  # tells Transformer Engine not to hand it to C++, which knows its own quantisers only

        def __init__(self, inner: Any, role: Any, observer: TeObserver) -> None:
            object.__setattr__(self, "inner", inner)
            super().__init__(rowwise=inner.rowwise_usage, columnwise=inner.columnwise_usage)
            self.role, self.observer = role, observer

        def __setattr__(self, name: str, value: Any) -> None:
            object.__setattr__(self, name, value)
            if name in _SHARED:
                setattr(self.inner, name, value)

        def __getattr__(self, name: str) -> Any:
            if name == "inner":  # not there yet, in a copy
                raise AttributeError(name)
            return getattr(self.inner, name)

        def _show(self, x: torch.Tensor) -> None:
            operand = str(getattr(self.role, "tensor_type", "") or "")
            self.observer._guard.run("te quantizer", self.observer.note_operand, operand, x)

        def quantize_impl(self, tensor: torch.Tensor) -> Any:
            self._show(tensor)
            return self.inner.quantize_impl(tensor)

        def update_quantized(self, src: torch.Tensor, dst: Any, *, noop_flag: torch.Tensor | None = None) -> Any:
            self._show(src)
            return self.inner.update_quantized(src, dst, noop_flag=noop_flag)

        def make_empty(self, *args: Any, **kwargs: Any) -> Any:
            return self.inner.make_empty(*args, **kwargs)

        def calibrate(self, tensor: torch.Tensor) -> None:
            self.inner.calibrate(tensor)

        def copy(self) -> Any:
            return ObservingQuantizer(self.inner.copy(), self.role, self.observer)

        def _get_compatible_recipe(self) -> Any:
            return None

    return ObservingQuantizer
