"""The recipes by name: blockwise, current, delayed, mxfp8, observe, rowwise, nvfp4, each built from arguments and environment.

Thread:     any

Source of each: the class of the same kind in `transformer_engine.common.recipe`, version 2.20; of rowwise
`torchao.float8`, version 0.18. An argument that is given wins over its variable; where the two differ the recipe says so in `declared_not_effective`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fp8watch.numerics.formats import FORMATS
from fp8watch.recipe.environment import (
    CURRENT_POWER_2_VARIABLE,
    EPS_VARIABLES,
    FP32_SCALES_VARIABLE,
    NVFP4_VARIABLES,
    POWER_2_VARIABLES,
    block_scaling,
    capability,
    environment,
    refuse_fp32_scales_on_blackwell,
    set_too_late,
    switch,
)
from fp8watch.recipe.registry import register_recipe
from fp8watch.recipe.spec import OPERANDS, ROW, AmaxHistory, OperandRecipe, Operands, Recipe, in_order

FORMAT_NAMES = (*FORMATS, "HYBRID")
BLOCK_TILES: dict[int, tuple[int, int]] = {1: (1, 128), 2: (128, 128)}


Formats = str | tuple[str, str, str]


def operand_formats(fp8_format: Formats) -> dict[str, str]:
    """The format of each operand: HYBRID is E4M3 forward and E5M2 for grad_output; three names are those of input, weight,
    grad_output.

    Raises:
        ValueError: another name.
    """
    if isinstance(fp8_format, tuple) and len(fp8_format) == len(OPERANDS) and all(f in FORMATS for f in fp8_format):
        return dict(zip(OPERANDS, fp8_format, strict=True))
    if fp8_format not in FORMAT_NAMES:
        known = ", ".join(map(repr, FORMAT_NAMES))
        raise ValueError(f"fp8_format={fp8_format!r}: must be one of {known}, or three of {', '.join(FORMATS)}")
    if fp8_format != "HYBRID":
        return dict.fromkeys(OPERANDS, fp8_format)
    return {"input": "E4M3", "weight": "E4M3", "grad_output": "E5M2"}


def _operands(made: dict[str, OperandRecipe], high_precision: Sequence[str]) -> Operands:
    """Input, weight, grad_output; None for those that stay in high precision."""
    if isinstance(high_precision, str) or any(o not in OPERANDS for o in high_precision):
        raise ValueError(f"high_precision={high_precision!r}: must be a list of {', '.join(map(repr, OPERANDS))}")
    return in_order({o: None if o in high_precision else spec for o, spec in made.items()})


@register_recipe(
    variables=(*EPS_VARIABLES.values(), *POWER_2_VARIABLES.values(), FP32_SCALES_VARIABLE),
    transformer_engine="Float8BlockScaling",
    megatron="blockwise",
)
def blockwise(
    *,
    fp8_format: Formats = "E4M3",
    power_2_scale: bool | None = None,
    amax_epsilon: float | None = None,
    block_dims: tuple[int, int, int] = (1, 2, 1),
    warmup_steps: int = 0,
    observe_only: bool = False,
    high_precision: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    device_capability: tuple[int, int] | None = None,
) -> Recipe:
    """Transformer Engine's `Float8BlockScaling`: 1×128 tiles for input and grad_output, 128×128 blocks for weight.

    Args:
        fp8_format: "E4M3" everywhere, "HYBRID": E5M2 for grad_output, "E5M2", or three names: of input, weight,
            grad_output.
        power_2_scale: powers of two or FP32 scales, for all operands. None: as the environment says, else powers of two.
        amax_epsilon: smallest amax a scale is computed from, for all operands. None: as the environment says, else 0.
        block_dims: of input, weight, grad_output: 1 for 1×128 tiles, 2 for 128×128 blocks; at most one 2.
        warmup_steps: steps in high precision before the first in FP8.
        observe_only: leave the GEMMs as they are.
        high_precision: operands that are not quantised, such as ["grad_output"]: GEMMs that read one compute as before.
        environ: instead of `os.environ`.
        device_capability: compute capability of the GPU; None: of the one that this process uses, if any.

    Raises:
        ValueError: an argument or environment variable that cannot be meant: name, value, rule.
    """
    env = environment(environ)
    scaling, formats = block_scaling(env), operand_formats(fp8_format)
    device = capability() if device_capability is None else device_capability
    if not isinstance(block_dims, tuple) or len(block_dims) != 3 or any(d not in BLOCK_TILES for d in block_dims):
        raise ValueError(f"block_dims={block_dims!r}: must be three of 1 (1×128) and 2 (128×128), for {OPERANDS}")
    made: dict[str, OperandRecipe] = {}
    notes = list(set_too_late(env, scaling))
    for operand, dim in zip(OPERANDS, block_dims, strict=True):
        said = scaling[operand]
        power_2, eps = said.power_2_scale, said.eps
        if power_2_scale is not None:
            if said.power_2_variable is not None and power_2_scale != power_2:
                notes.append(_overruled(env, said.power_2_variable, "power_2_scale", power_2_scale))
            power_2 = bool(power_2_scale)
        if amax_epsilon is not None:
            if said.eps_variable is not None and amax_epsilon != eps:
                notes.append(_overruled(env, said.eps_variable, "amax_epsilon", amax_epsilon))
            eps = float(amax_epsilon)
        if not power_2:
            variable = said.power_2_variable if power_2_scale is None else None
            words = f"{variable}={env[variable]!r}" if variable is not None else f"power_2_scale={power_2}"
            refuse_fp32_scales_on_blackwell(words, device)
        made[operand] = OperandRecipe(BLOCK_TILES[dim], formats[operand], power_2, eps)
    return Recipe(
        "blockwise",
        *_operands(made, high_precision),
        observe_only=observe_only,
        warmup_steps=warmup_steps,
        declared_not_effective=tuple(dict.fromkeys(notes)),
    )


def _overruled(environ: Mapping[str, str], variable: str, argument: str, value: object) -> str:
    return f"{variable}={environ[variable]} has no effect: the argument {argument}={value} wins"


@register_recipe(
    variables=(CURRENT_POWER_2_VARIABLE,), transformer_engine="Float8CurrentScaling", megatron="tensorwise"
)
def current(
    *,
    fp8_format: Formats = "HYBRID",
    power_2_scale: bool | None = None,
    amax_epsilon: float = 0.0,
    warmup_steps: int = 0,
    observe_only: bool = False,
    high_precision: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Recipe:
    """Transformer Engine's `Float8CurrentScaling`: one FP32 scale a tensor, from the amax of the tensor itself.

    Args:
        fp8_format: "HYBRID" (E5M2 for grad_output), "E4M3" or "E5M2".
        power_2_scale: round the scales down to powers of two. None: as NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES says.
        amax_epsilon: smallest amax a scale is computed from.
        warmup_steps: as for `blockwise`.
        observe_only: as for `blockwise`.
        high_precision: as for `blockwise`.
        environ: as for `blockwise`.

    Raises:
        ValueError: an argument or environment variable that cannot be meant.
    """
    env, formats = environment(environ), operand_formats(fp8_format)
    said = switch(env, CURRENT_POWER_2_VARIABLE)
    power_2 = bool(said) if power_2_scale is None else bool(power_2_scale)
    notes: tuple[str, ...] = ()
    if said is not None and said != power_2:
        notes = (_overruled(env, CURRENT_POWER_2_VARIABLE, "power_2_scale", power_2),)
    made = {o: OperandRecipe(None, formats[o], power_2, float(amax_epsilon)) for o in OPERANDS}
    return Recipe(
        "current",
        *_operands(made, high_precision),
        observe_only=observe_only,
        warmup_steps=warmup_steps,
        declared_not_effective=notes,
    )


@register_recipe(transformer_engine="DelayedScaling", megatron="delayed")
def delayed(
    *,
    fp8_format: Formats = "HYBRID",
    amax_history_len: int = 1024,
    amax_compute_algo: str = "max",
    margin: int = 0,
    warmup_steps: int = 0,
    observe_only: bool = False,
    high_precision: Sequence[str] = (),
) -> Recipe:
    """Transformer Engine's `DelayedScaling`: one FP32 scale a tensor, from the amax of earlier passes.

    Args:
        fp8_format: "HYBRID" (E5M2 for grad_output), "E4M3" or "E5M2".
        amax_history_len: passes that are remembered.
        amax_compute_algo: "max" over the history, or "most_recent".
        margin: octaves of room above the amax.
        warmup_steps: as for `blockwise`. Histories fill during the warm-up.
        observe_only: as for `blockwise`. Histories fill during the warm-up.
        high_precision: as for `blockwise`.

    Raises:
        ValueError: an argument that cannot be meant.
    """
    formats = operand_formats(fp8_format)
    made = {o: OperandRecipe(None, formats[o], power_2_scale=False, scaling="delayed") for o in OPERANDS}
    history = AmaxHistory(amax_history_len, amax_compute_algo, margin)
    return Recipe(
        "delayed",
        *_operands(made, high_precision),
        history=history,
        observe_only=observe_only,
        warmup_steps=warmup_steps,
    )


@register_recipe(transformer_engine="MXFP8BlockScaling", megatron="mxfp8")
def mxfp8(
    *,
    fp8_format: Formats = "E4M3",
    warmup_steps: int = 0,
    observe_only: bool = False,
    high_precision: Sequence[str] = (),
) -> Recipe:
    """Transformer Engine's `MXFP8BlockScaling`, emulated: 1×32 tiles with an E8M0 scale for all three operands.

    Args:
        fp8_format: "E4M3", "HYBRID" or "E5M2".
        warmup_steps: as for `blockwise`.
        observe_only: as for `blockwise`.
        high_precision: as for `blockwise`.

    Raises:
        ValueError: an argument that cannot be meant.
    """
    formats = operand_formats(fp8_format)
    made = {o: OperandRecipe((1, 32), formats[o], scaling="mx") for o in OPERANDS}
    return Recipe("mxfp8", *_operands(made, high_precision), observe_only=observe_only, warmup_steps=warmup_steps)


@register_recipe()
def observe(recipe: Recipe | None = None, *, environ: Mapping[str, str] | None = None) -> Recipe:
    """Leave the GEMMs as they are and quantise their operands on the side, for statistics.

    Args:
        recipe: with which arithmetic; None: `blockwise`.
        environ: instead of `os.environ`.
    """
    base = blockwise(environ=environ) if recipe is None else recipe
    return replace(base, name="observe", observe_only=True, warmup_steps=0)


@register_recipe()
def rowwise(
    *,
    fp8_format: Formats = "E4M3",
    power_2_scale: bool = True,
    amax_epsilon: float = 1e-12,
    warmup_steps: int = 0,
    observe_only: bool = False,
    high_precision: Sequence[str] = (),
) -> Recipe:
    """torchao's float8 recipe "rowwise": one scale for each row of each operand, along the contraction axis of its GEMM.

    Args:
        fp8_format: "E4M3", "HYBRID" or "E5M2".
        power_2_scale: scales rounded down to powers of two, as torchao's recipe has them; else FP32.
        amax_epsilon: smallest amax a scale is computed from, above 0.
        warmup_steps: as for `blockwise`.
        observe_only: as for `blockwise`.
        high_precision: as for `blockwise`.

    Raises:
        ValueError: an argument that cannot be meant.
    """
    formats = operand_formats(fp8_format)
    made = {o: OperandRecipe(ROW, formats[o], bool(power_2_scale), float(amax_epsilon)) for o in OPERANDS}
    return Recipe("rowwise", *_operands(made, high_precision), observe_only=observe_only, warmup_steps=warmup_steps)


@register_recipe(variables=tuple(NVFP4_VARIABLES.values()), transformer_engine="NVFP4BlockScaling")
def nvfp4(
    *,
    disable_rht: bool | None = None,
    disable_stochastic_rounding: bool | None = None,
    disable_2d_quantization: bool | None = None,
    warmup_steps: int = 0,
    observe_only: bool = False,
    high_precision: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Recipe:
    """Transformer Engine's `NVFP4BlockScaling`, emulated: E2M1 in blocks of 16, an E4M3 scale each, one float32 scale a tensor.

    Args:
        disable_rht: no random Hadamard transform of what wgrad reads. None: as the environment says, else False.
        disable_stochastic_rounding: gradients to nearest as well. None: as the environment says, else False.
        disable_2d_quantization: weights in blocks of 1×16 in place of 16×16. None: as the environment says, else False.
        warmup_steps: as for `blockwise`.
        observe_only: as for `blockwise`.
        high_precision: as for `blockwise`.
        environ: as for `blockwise`.

    Raises:
        ValueError: an argument or environment variable that cannot be meant.
    """
    env, notes = environment(environ), list[str]()

    def is_off(name: str, given: bool | None) -> bool:
        said = switch(env, NVFP4_VARIABLES[name])
        if given is not None and said is not None and bool(given) != said:
            notes.append(_overruled(env, NVFP4_VARIABLES[name], name, bool(given)))
        return bool(said) if given is None else bool(given)

    rht = not is_off("disable_rht", disable_rht)
    stochastic = not is_off("disable_stochastic_rounding", disable_stochastic_rounding)
    square = not is_off("disable_2d_quantization", disable_2d_quantization)
    made = {
        o: OperandRecipe((1, 16), "E2M1", False, scaling="nvfp4", random_hadamard_transform=rht, stochastic_rounding=s)
        for o, s in (("input", False), ("grad_output", stochastic))
    }
    made["weight"] = OperandRecipe((16, 16) if square else (1, 16), "E2M1", False, scaling="nvfp4")
    return Recipe(
        "nvfp4",
        *_operands({o: made[o] for o in OPERANDS}, high_precision),
        observe_only=observe_only,
        warmup_steps=warmup_steps,
        declared_not_effective=tuple(notes),
    )
