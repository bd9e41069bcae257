"""Transformer Engine, or its Python packages over a stand-in, its recipes, and small models of its layers."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

RECIPES = {"block": "Float8BlockScaling", "delayed": "DelayedScaling", "current": "Float8CurrentScaling"}
BLACKWELL = {"mxfp8": "MXFP8BlockScaling", "nvfp4": "NVFP4BlockScaling"}


class Place:
    """Transformer Engine, and where it computes."""

    def __init__(self, stand_in: bool) -> None:
        self.stand_in, self.device = stand_in, "cpu" if stand_in else "cuda"
        self.cuda = not stand_in
        if stand_in:
            from loading import load

            self.te = load()
            torch.cuda.Stream.synchronize = lambda *_: None  # type: ignore[method-assign]
        else:
            self.te = importlib.import_module("transformer_engine.pytorch")
            self.te.version = importlib.import_module("transformer_engine").__version__
            torch.cuda.init()
        self.recipes = importlib.import_module("transformer_engine.common.recipe")
        self.autocast = getattr(self.te, "fp8_autocast", None) or self.te.autocast

    def recipe(self, name: str) -> Any:
        """A recipe object by our short name."""
        return getattr(self.recipes, {**RECIPES, **BLACKWELL}[name])()

    def cls(self, module: str, name: str) -> Any:
        """A class of a module of its tensors."""
        return getattr(importlib.import_module(f"transformer_engine.pytorch.tensor.{module}"), name)

    def dtype(self, name: str) -> Any:
        """A format of Transformer Engine, by our name."""
        kind = getattr(self.te, "DType", None) or sys.modules["transformer_engine_torch"].DType
        return {"E4M3": kind.kFloat8E4M3, "E5M2": kind.kFloat8E5M2}[name]


def not_here(at: Place, recipe: str) -> str | None:
    """Why this device cannot compute in a recipe, in Transformer Engine's own words."""
    checks = {"mxfp8": "check_mxfp8_support", "nvfp4": "check_nvfp4_support"}
    for module in ("quantization", "fp8"):
        found = getattr(importlib.import_module(f"transformer_engine.pytorch.{module}"), checks[recipe], None)
        if found is not None:
            can, reason = found()
            return None if can else f"{recipe} needs Blackwell: {reason}"
    return f"{recipe}: Transformer Engine does not say whether it can"


SPLITS = (256, 128, 512, 128)


def build(at: Place, layer: str, dim: int, depth: int, seed: int = 0, **options: Any) -> Any:
    """A model of one kind of layer, whose input and output are [tokens, dim] (or [s, b, dim])."""
    torch.manual_seed(seed)
    options = {"params_dtype": torch.bfloat16, **options}
    te = at.te
    if layer == "Linear":
        parts = [te.Linear(dim, dim, **options) for _ in range(2 * depth)]
    elif layer == "LayerNormLinear":
        parts = [te.LayerNormLinear(dim, dim, **options) for _ in range(2 * depth)]
    elif layer == "LayerNormMLP":
        parts = [te.LayerNormMLP(dim, 4 * dim, **options) for _ in range(depth)]
    elif layer == "GroupedLinear":
        parts = [te.GroupedLinear(len(SPLITS), dim, dim, **options) for _ in range(depth)]
    else:
        quiet = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "fuse_qkv_params": True}
        parts = [te.TransformerLayer(dim, 4 * dim, max(1, dim // 64), **quiet, **options) for _ in range(depth)]
    return torch.nn.ModuleList(parts).to(at.device)


def forward(model: Any, layer: str, x: Any, **more: Any) -> Any:
    """All layers, one after the other; experts take their splits."""
    for part in model:
        if layer == "GroupedLinear":
            tokens = x.shape[0] * x[0].numel() // x.shape[-1]
            x = part(x, [n * tokens // sum(SPLITS) for n in SPLITS], **more)
        else:
            x = part(x, **more)
    return x


def shape_of(layer: str, dim: int, tokens: int) -> tuple[int, ...]:
    return (tokens // 4, 4, dim) if layer == "TransformerLayer" else (tokens, dim)


def wide(per_tile: Any, view: Any) -> Any:
    """A number of each tile, at each of its elements."""
    (rows, columns), (bm, bk) = view.shape, view.tile
    return per_tile.repeat_interleave(bm, 0)[:rows].repeat_interleave(bk, 1)[:, :columns]
