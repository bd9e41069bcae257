"""Environment variables for blockwise scaling, read when a recipe is built, and refused when wrong.

Thread:     any

One launch script means the same on our path and in LoongForge's Transformer Engine. NVIDIA's own reads
NVTE_FP8_BLOCK_SCALING_FP32_SCALES and NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES alone, once, when it is imported, and nothing of
single operands: there its recipe object is what can be set. The refusals are ours.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fp8watch.recipe.framework import LOONGFORGE, assignment, transformer_engine
from fp8watch.recipe.spec import FLOAT32_MAX, OPERANDS

EPS_VARIABLES: dict[str, str] = {
    "input": "FP8_QUANT_FWD_INP_AMAX_EPS",
    "weight": "FP8_QUANT_FWD_WEIGHT_AMAX_EPS",
    "grad_output": "FP8_QUANT_BWD_GRAD_AMAX_EPS",
}
POWER_2_VARIABLES: dict[str, str] = {
    "input": "NVTE_FP8_BLOCK_SCALING_FWD_INP_POWER2",
    "weight": "NVTE_FP8_BLOCK_SCALING_FWD_WEIGHT_POWER2",
    "grad_output": "NVTE_FP8_BLOCK_SCALING_BWD_GRAD_POWER2",
}
FP32_SCALES_VARIABLE = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
CURRENT_POWER_2_VARIABLE = "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES"
NVFP4_VARIABLES: dict[str, str] = {
    "disable_rht": "NVTE_NVFP4_DISABLE_RHT",
    "disable_stochastic_rounding": "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING",
    "disable_2d_quantization": "NVTE_NVFP4_DISABLE_2D_QUANTIZATION",
}
"""Fields of Transformer Engine's NVFP4BlockScaling, and arguments of ours."""
QPARAMS: dict[str, str] = {
    "input": "fp8_quant_fwd_inp",
    "weight": "fp8_quant_fwd_weight",
    "grad_output": "fp8_quant_bwd_grad",
}
"""Attributes of Transformer Engine's recipe objects that its quantisers read."""

NVFP4_QPARAMS: dict[str, str] = {
    "input": "fp4_quant_fwd_inp",
    "weight": "fp4_quant_fwd_weight",
    "grad_output": "fp4_quant_bwd_grad",
}
"""The same of its NVFP4 recipe."""

BLACKWELL = (10, 0)
"""Compute capability from which Transformer Engine runs blockwise scaling on MX hardware, whose scales are E8M0."""

_EPS_RULE = "must be a finite number, 0 or more (1e-12 is recommended), and one that float32 holds"


@dataclass(frozen=True)
class BlockScaling:
    """What the variables say of one operand, and which variable said so; None: no variable, the default."""

    power_2_scale: bool
    power_2_variable: str | None
    eps: float
    eps_variable: str | None


def environment(environ: Mapping[str, str] | None) -> Mapping[str, str]:
    """The given mapping, else the process's environment."""
    return os.environ if environ is None else environ


def switch(environ: Mapping[str, str], variable: str) -> bool | None:
    """A variable that is "0" or "1"; None where it is unset.

    Raises:
        ValueError: any other value.
    """
    value = environ.get(variable)
    if value is None:
        return None
    if value not in ("0", "1"):
        raise ValueError(f"{variable}={value!r}: must be '0' or '1'; unset it for the default")
    return value == "1"


def _eps(environ: Mapping[str, str], variable: str) -> float | None:
    value = environ.get(variable)
    if value is None:
        return None
    try:
        eps = float(value)
    except ValueError:
        raise ValueError(f"{variable}={value!r}: {_EPS_RULE}") from None
    if not 0 <= eps <= FLOAT32_MAX:  # NaN too
        raise ValueError(f"{variable}={value!r}: {_EPS_RULE}")
    return eps


def block_scaling(environ: Mapping[str, str]) -> dict[str, BlockScaling]:
    """The variables of NVIDIA's blockwise recipe, operand by operand.

    Raises:
        ValueError: a variable with a value that cannot be meant: name, value, rule.
    """
    fp32 = switch(environ, FP32_SCALES_VARIABLE)
    made: dict[str, BlockScaling] = {}
    for operand in OPERANDS:
        forced, eps = switch(environ, POWER_2_VARIABLES[operand]), _eps(environ, EPS_VARIABLES[operand])
        variable = POWER_2_VARIABLES[operand] if forced is not None else FP32_SCALES_VARIABLE if fp32 else None
        made[operand] = BlockScaling(
            power_2_scale=(not fp32) if forced is None else forced,
            power_2_variable=variable,
            eps=0.0 if eps is None else eps,
            eps_variable=None if eps is None else EPS_VARIABLES[operand],
        )
    return made


def capability() -> tuple[int, int] | None:
    """Compute capability of the GPU that this process uses; None without one. Loads nothing and starts no driver."""
    torch: Any = sys.modules.get("torch")
    if torch is None or torch.version.hip is not None or not torch.cuda.is_available():
        return None
    got: tuple[int, int] = torch.cuda.get_device_capability()
    return got


def refuse_fp32_scales_on_blackwell(said: str, device: tuple[int, int] | None) -> None:
    """Raise where FP32 scales were asked for, in the words of `said`, and the GPU has E8M0 scales only.

    Raises:
        ValueError: variable or argument, value, rule.
    """
    if device is not None and device >= BLACKWELL:
        raise ValueError(
            f"{said}: FP32 scales do not exist on Blackwell (compute capability {device[0]}.{device[1]}), whose tensor "
            "cores take powers of two; leave it at its default"
        )


def set_too_late(environ: Mapping[str, str], scaling: Mapping[str, BlockScaling]) -> tuple[str, ...]:
    """Variables that Transformer Engine, imported before, does not follow, and what sets it there."""
    module: Any = sys.modules.get("transformer_engine.common.recipe")
    held = getattr(module, "Float8BlockScaling", None)
    notes: list[str] = []
    for operand in OPERANDS:
        params, ours = getattr(held, QPARAMS[operand], None), scaling[operand]
        if params is None:
            continue
        for variable, wanted, has in (
            (ours.power_2_variable, ours.power_2_scale, bool(getattr(params, "power_2_scale", True))),
            (ours.eps_variable, ours.eps, float(getattr(params, "amax_epsilon", 0.0))),
        ):
            if variable is not None and wanted != has:
                what = "power_2_scale" if isinstance(wanted, bool) else "amax_epsilon"
                late = is_read(variable)
                why = "it was imported before and" if late else "it does not read that variable, and"
                remedy = "set it before the first import" if late else f"assign {_assigned(operand, ours)}"
                notes.append(
                    f"{variable}={environ[variable]} has no effect on Transformer Engine's modules: {why} holds "
                    f"{what}={has} for {operand}; {remedy}"
                )
    return tuple(dict.fromkeys(notes))


def is_read(variable: str) -> bool:
    """Whether the Transformer Engine that is imported reads that variable at all."""
    return variable in (FP32_SCALES_VARIABLE, CURRENT_POWER_2_VARIABLE) or transformer_engine() == LOONGFORGE


def _assigned(operand: str, wanted: BlockScaling) -> str:
    return assignment(QPARAMS[operand], wanted.power_2_scale, wanted.eps)
