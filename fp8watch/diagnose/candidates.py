"""The formats that a what-if tries by name, and how each is switched on.

Thread:     the caller's

A row of CANDIDATES is one format for all three operands. Ours carry the Recipe that computes it; others say whose object does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from fp8watch import recipe as recipes
from fp8watch.diagnose.readers import (
    CastReader,
    E5M6Reader,
    MxFloorReader,
    Nvfp4Reader,
    Reader,
    RecipeReader,
    Scales,
)
from fp8watch.recipe import Recipe

MakeReader = Callable[[torch.device, "str | None", "Scales | None"], Reader]
"""(device, backend, delayed scales of an attached model) -> a reader."""

HOPPER = (9, 0)
"""FP32 scales are refused where they cannot be computed; here they are only tried."""


@dataclass(frozen=True)
class Candidate:
    """One format."""

    name: str
    bits: int  # of an element, scales left out
    how: str  # what switches it on
    make: MakeReader
    recipe: Recipe | None = None


def of_recipe(name: str, recipe: Recipe, how: str | None = None) -> Candidate:
    """One of our recipes, built by hand or by name."""

    def make(device: torch.device, backend: str | None, scales: Scales | None) -> Reader:
        fits = scales if recipe.history is not None and scales and _same_history(recipe, scales) else None
        return RecipeReader(recipe, device, backend, fits)

    return Candidate(name, 8, how or f"fp8watch.attach(model, recipe=<this Recipe, {recipe.name!r}>)", make, recipe)


def _same_history(recipe: Recipe, scales: Scales) -> bool:
    return all(state.history == recipe.history for state in scales.values())


def _ours() -> tuple[Candidate, ...]:
    def row(name: str, recipe: Recipe, ours: str, others: str = "") -> Candidate:
        return of_recipe(name, recipe, f"fp8watch.{ours}" + (f"; {others}" if others else ""))

    plain: dict[str, str] = {}
    te = "Transformer Engine: "
    return (
        row("blockwise", recipes.blockwise(environ=plain), "blockwise()",
            te + "Float8BlockScaling(); Megatron: --fp8-recipe blockwise"),
        row("blockwise-fp32-scales",
            recipes.blockwise(power_2_scale=False, environ=plain, device_capability=HOPPER),
            "blockwise(power_2_scale=False)", te + "NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1 (not on Blackwell)"),
        row("blockwise-hybrid", recipes.blockwise(fp8_format="HYBRID", environ=plain), "blockwise(fp8_format='HYBRID')"),
        row("blockwise-e5m2", recipes.blockwise(fp8_format="E5M2", environ=plain), "blockwise(fp8_format='E5M2')"),
        row("blockwise-fine-weights", recipes.blockwise(block_dims=(1, 1, 1), environ=plain),
            "blockwise(block_dims=(1, 1, 1))", te + "Float8BlockScaling(w_block_scaling_dim=1)"),
        row("rowwise", recipes.rowwise(), "rowwise()", "torchao: Float8LinearConfig.from_recipe_name('rowwise')"),
        row("current", recipes.current(environ=plain), "current()",
            te + "Float8CurrentScaling(); Megatron: --fp8-recipe tensorwise"),
        row("current-e4m3", recipes.current(fp8_format="E4M3", environ=plain), "current(fp8_format='E4M3')",
            te + "Float8CurrentScaling(fp8_format=Format.E4M3)"),
        row("delayed", recipes.delayed(), "delayed()", te + "DelayedScaling(); Megatron: --fp8-recipe delayed"),
        row("delayed-margin-1", recipes.delayed(margin=1), "delayed(margin=1)", te + "DelayedScaling(margin=1)"),
        row("delayed-margin-2", recipes.delayed(margin=2), "delayed(margin=2)", te + "DelayedScaling(margin=2)"),
        row("mxfp8", recipes.mxfp8(), "mxfp8()",
            te + "MXFP8BlockScaling(); torchao: MX with ScaleCalculationMode.RCEIL; Megatron: --fp8-recipe mxfp8"),
    )  # fmt: skip


def _others() -> tuple[Candidate, ...]:
    te = "Transformer Engine: NVFP4BlockScaling"
    blocks = recipes.blockwise(environ={})

    def nvfp4(
        name: str, how: str, *, square: bool = False, stochastic: bool = False, transform: bool = False
    ) -> Candidate:
        return Candidate(
            name, 4, how, lambda *_: Nvfp4Reader(square=square, stochastic=stochastic, transform=transform)
        )

    return (
        Candidate("mxfp8-floor", 8, "torchao: MX with ScaleCalculationMode.FLOOR",
                  lambda device, backend, _: MxFloorReader(device, backend)),
        nvfp4("nvfp4", te + "(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True)"),
        nvfp4("nvfp4-2d", te + "(disable_rht=True, disable_stochastic_rounding=True)", square=True),
        nvfp4("nvfp4-stochastic", te + "(disable_rht=True, disable_2d_quantization=True)", stochastic=True),
        nvfp4("nvfp4-rht", te + "(disable_stochastic_rounding=True, disable_2d_quantization=True)", transform=True),
        nvfp4("nvfp4-training", te + "(); torchao: NVFP4TrainingConfig()", square=True, stochastic=True, transform=True),
        Candidate("e5m6-input", 12, "inputs in E5M6, the rest as blockwise: DeepSeek-V3's cache of attention's output; "
                  "no released library computes it", lambda device, backend, _: E5M6Reader(RecipeReader(blocks, device, backend))),
        Candidate("bf16", 16, "torch.bfloat16: leave the Linear out with filter_fn", lambda *_: CastReader(torch.bfloat16)),
        Candidate("fp16", 16, "torch.float16, with a GradScaler", lambda *_: CastReader(torch.float16)),
    )  # fmt: skip


CANDIDATES: dict[str, Candidate] = {c.name: c for c in (*_ours(), *_others())}
"""Formats that `what_if(formats=...)` takes by name."""

DEFAULTS = (
    "blockwise", "blockwise-fp32-scales", "blockwise-hybrid", "blockwise-e5m2", "rowwise", "current", "delayed",
    "mxfp8", "mxfp8-floor", "nvfp4", "nvfp4-training", "e5m6-input", "bf16", "fp16",
)  # fmt: skip

Formats = Iterable["str | Candidate | Recipe"] | Mapping[str, Recipe]


def candidates_of(formats: Formats | None) -> tuple[Candidate, ...]:
    """The formats to try: names of CANDIDATES, Recipes, or Recipes by a name of your own.

    Raises:
        ValueError: an unknown name, one twice, or none.
        TypeError: something else.
    """
    if isinstance(formats, str):
        formats = [formats]
    given: list[Candidate] = []
    if isinstance(formats, Mapping):
        given = [of_recipe(name, _checked(recipe)) for name, recipe in formats.items()]
    else:
        for item in DEFAULTS if formats is None else formats:
            if isinstance(item, Candidate):
                given.append(item)
            elif isinstance(item, str):
                if item not in CANDIDATES:
                    raise ValueError(f"format {item!r} is unknown; known are {', '.join(CANDIDATES)}")
                given.append(CANDIDATES[item])
            else:
                given.append(of_recipe(_checked(item).name, item))
    names = [c.name for c in given]
    if not names:
        raise ValueError(f"formats is empty: give some of {', '.join(CANDIDATES)}")
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise ValueError(f"formats has {', '.join(twice)} twice: give Recipes as a dict, each under a name of its own")
    return tuple(given)


def _checked(recipe: object) -> Recipe:
    if not isinstance(recipe, Recipe):
        raise TypeError(f"format {recipe!r}: must be a name of {', '.join(CANDIDATES)}, or a fp8watch.Recipe")
    return recipe
