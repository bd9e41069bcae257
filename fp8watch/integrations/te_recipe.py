"""Opt-in custom recipe for Transformer Engine whose quantisers show every operand before the cast.

Shapes:     an operand [M, K], before the cast     Thread: training, and autograd's

The stock quantisers stay the default. A custom recipe moves the cast out of the fused norms and activations, so that
Python sees every operand: statistics of all sites are exact, at the price of those fusions. The codes come from the
quantiser of the caller's factory; here they are only passed on.

Source: transformer_engine.common.recipe.CustomRecipe(qfactory=…), experimental there as of 2.20.
State of this file: as that of fp8watch.integrations.transformer_engine. In 2.9 norms stay fused, and their outputs unseen.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from fp8watch.integrations.te_package import load
from fp8watch.integrations.transformer_engine import TeObserver

QuantizerFactory = Callable[[Any], Any]

_REPLACED = ("quantize_impl", "update_quantized", "copy", "__reduce_ex__", "custom", "make_empty")
"""Attributes of an observed quantiser that shadow those of its class."""


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
    """The same factory with observed quantisers. Requests for stateful quantisers pass unchanged."""
    base = _quantizer_class()

    def factory(role: Any) -> Any:
        quantizer = qfactory(role)
        return _observed(quantizer, operand_of(role), observer) if isinstance(quantizer, base) else quantizer

    return factory


def operand_of(role: Any) -> str:
    """The operand that a factory makes a quantiser for: "linear_input" before 2.16, an object from then on, which may
    be None.
    """
    return str(getattr(role, "tensor_type", role) or "").removeprefix("linear_")


def _quantizer_class() -> type[Any]:
    """Quantizer moved from tensor.quantized_tensor to quantized_tensor between 2.8 and 2.20."""
    for name in ("quantized_tensor", "tensor.quantized_tensor"):
        try:
            found: type[Any] = importlib.import_module(f"transformer_engine.pytorch.{name}").Quantizer
        except (ImportError, AttributeError):
            continue
        return found
    raise RuntimeError("transformer_engine has no Quantizer where it is looked for: not a version that is known")


def _observed(quantizer: Any, operand: str, observer: TeObserver) -> Any:
    """The quantiser itself with two methods replaced: Transformer Engine and its extension check for exact classes, so
    no subclass or wrapper is possible. A copy or a pickle is of the original class, and is not observed.
    """
    for name in ("quantize_impl", "update_quantized"):
        if hasattr(quantizer, name):
            setattr(quantizer, name, _shown(getattr(quantizer, name), operand, observer))
    quantizer.copy = lambda: type(quantizer).copy(_plain(quantizer))
    quantizer.__reduce_ex__ = lambda protocol: _plain(quantizer).__reduce_ex__(protocol)
    if not getattr(type(quantizer), "custom", False):
        quantizer.custom = True  # norms, activations and bias gradients leave the cast to Python, where it is observed
        quantizer.make_empty = lambda *args, **kwargs: _plain(quantizer).make_empty(*args, **kwargs)
    return quantizer


def _shown(method: Callable[..., Any], operand: str, observer: TeObserver) -> Callable[..., Any]:
    def show(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        observer._guard.run("te quantizer", observer.note_operand, operand, tensor)
        return method(tensor, *args, **kwargs)

    return show


def _plain(quantizer: Any) -> Any:
    """A quantiser of the same state, without the replaced methods."""
    bare = object.__new__(type(quantizer))
    bare.__dict__.update({name: value for name, value in quantizer.__dict__.items() if name not in _REPLACED})
    return bare
