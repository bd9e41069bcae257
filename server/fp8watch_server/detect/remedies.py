"""What a remedy is, the place that it is for, and the switches of the frameworks that quantise.

Shapes:     Place -> Fix
Thread:     any; only data and pure functions
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fp8watch_agent.module_settings import SETTING
from fp8watch_server.detect.sessions import FLAG

FixKind = Literal["env", "flag", "code", "data", "hardware"]

EPS_VARIABLE = {
    "input": "FP8_QUANT_FWD_INP_AMAX_EPS",
    "weight": "FP8_QUANT_FWD_WEIGHT_AMAX_EPS",
    "grad_output": "FP8_QUANT_BWD_GRAD_AMAX_EPS",
}
POWER_2_VARIABLE = {
    "input": "NVTE_FP8_BLOCK_SCALING_FWD_INP_POWER2",
    "weight": "NVTE_FP8_BLOCK_SCALING_FWD_WEIGHT_POWER2",
    "grad_output": "NVTE_FP8_BLOCK_SCALING_BWD_GRAD_POWER2",
}
QPARAMS = {
    "input": "fp8_quant_fwd_inp",
    "weight": "fp8_quant_fwd_weight",
    "grad_output": "fp8_quant_bwd_grad",
}
OPERANDS = ("input", "weight", "grad_output")
STOCK, LOONGFORGE = "transformer_engine", "loongforge"
"""Backends of operands that Transformer Engine quantises: NVIDIA's own reads none of the variables above."""
TORCHAO, OWN_FORWARD = "torchao", "own forward"
"""Backends of operands that torchao's Float8Linear casts, and those that a module of the user's own does."""
OWN_FILTER = "your_filter(module, fqn)"
"""What a filter asked before: a new one alone converts what it left out, as heads, and sizes that are no multiple of 16."""
OF_CONFIG = "dataclasses.replace(config, {}), of the Float8LinearConfig that is in use"
"""A new Float8LinearConfig of torchao's is tensorwise, whatever the old one was."""


@dataclass(frozen=True)
class Fix:
    """One thing to change, most likely first in a list of them."""

    kind: FixKind
    text: str

    def as_json(self) -> dict[str, str]:
        """As CONTRACT names it."""
        return {"kind": self.kind, "text": self.text}


@dataclass(frozen=True)
class Place:
    """Where it is, and what else the finding knows."""

    name: str | None  # qualified name of the module
    operand: str
    operands: tuple[str, ...]  # roles that are hit
    eps: float
    power_2_scale: bool
    backend: str  # what quantises at the site: the switch is that of its framework
    verdict: str
    batch_id: str | None  # where the user gave one
    lr: float | None  # of the step, and before
    usual_lr: float | None
    extra: Mapping[str, Any]
    site_recipe: str = ""
    format: str = ""  # E4M3 | E5M2 | E2M1, of the site

    @property
    def recipe(self) -> str:
        """The arithmetic that is used there: of the site, else as the session says it; "" where neither does."""
        return self.site_recipe or str(self.already.get("recipe", ""))

    @property
    def module(self) -> str:
        """The module in a sentence."""
        return self.name or "the module"

    @property
    def already(self) -> Mapping[str, Any]:
        """What the run's recipe sets, as its session says it: `margin`, `amax_history_len`, ...; empty where it said nothing."""
        return self.extra.get("already") or {}

    def number(self, fact: str) -> int | None:
        """A setting of the recipe that is a whole number; None where the session does not say it."""
        try:
            return int(self.already[fact])
        except (KeyError, TypeError, ValueError):
            return None

    @property
    def keep_out(self) -> Fix:
        """The module in high precision for the time being."""
        name = self.name
        how = {
            STOCK: f"run {self.module} under fp8_autocast(enabled=False)",
            LOONGFORGE: f"run {self.module} under fp8_autocast(enabled=False)",
            TORCHAO: f"convert_to_float8_training(model, module_filter_fn=lambda module, fqn: fqn != {name!r} and {OWN_FILTER})",
            OWN_FORWARD: f"make {self.module} an nn.Linear",
        }.get(self.backend, f"attach(model, filter_fn=lambda module, fqn: False if fqn == {name!r} else None)")
        return Fix("code", f"Until then keep it in BF16: {how}.")

    @property
    def batch(self) -> Fix:
        """The batch of the step, by its name where that is known."""
        named = f"{_LOOK_AT}{self.batch_id!r}." if self.batch_id else None
        return Fix("data", named or "Find the batch: give it to watch.log(batch_id=...).")


_LOOK_AT = "Look at batch "
_NAMED_BATCH = re.compile(rf"{_LOOK_AT}('.*'|\".*\")", re.DOTALL)


def without_batch(text: str) -> str:
    """A fix without the name that the user gave to the batch."""
    return _NAMED_BATCH.sub(f"{_LOOK_AT}'batch'", text)


_HISTORY = {
    "amax_history_len": "--fp8-amax-history-len",
    "amax_compute_algo": "--fp8-amax-compute-algo",
    "margin": "--fp8-margin",
}
_TORCHAO = {
    "power_2_scale": "Float8LinearConfig.round_scales_to_power_of_2",
    "eps": "torchao.float8.float8_utils.EPS",
    "format": "Float8LinearConfig.cast_config_{}.target_dtype",
    "tile": "Float8LinearConfig.cast_config_{}.scaling_granularity",
    "recipe": "Float8LinearConfig.cast_config_{}.scaling_granularity",
}


def switch_of(fact: str, backend: str, by_flags: bool) -> str:
    """What sets a fact of the recipe, as people find it in their own launch script.

    Args:
        fact: as a session says it: `input.eps`, `flag.fp8_format`, `margin`.
        backend: of the operands: the switch is that of its framework.
        by_flags: a trainer's flags are among the facts: what has a flag is named by it.
    """
    if fact.startswith(FLAG):
        return "--" + fact[len(FLAG) :].replace("_", "-")
    if fact.startswith(SETTING):
        return fact[len(SETTING) :]
    operand, _, name = fact.partition(".")
    if operand in OPERANDS and backend == TORCHAO and name in _TORCHAO:
        return _TORCHAO[name].format(operand)
    if operand in OPERANDS and backend == OWN_FORWARD:
        return f"{name} of {operand} in the module's own cast"
    if operand in OPERANDS and name in ("eps", "power_2_scale"):
        if backend == STOCK:
            return f"recipe.{QPARAMS[operand]}.{'amax_epsilon' if name == 'eps' else name}"
        return (EPS_VARIABLE if name == "eps" else POWER_2_VARIABLE)[operand]
    return _HISTORY[fact] if by_flags and fact in _HISTORY else fact


def set_to(backend: str, operands: Sequence[str], eps: float | None, power_2_scale: bool) -> tuple[FixKind, str]:
    """What sets eps (or, where that is None, the kind of scale) of operands, in the framework that quantises them.

    fp8watch and LoongForge's Transformer Engine read a variable an operand; NVIDIA's own reads attributes of its recipe.
    """
    if backend == TORCHAO:
        if eps is None:
            return "code", OF_CONFIG.format(f"round_scales_to_power_of_2={power_2_scale}")
        return "code", f"`torchao.float8.float8_utils.EPS = {eps:g}`, a constant for all operands"
    if backend == OWN_FORWARD:
        rounded = "round scales down to powers of two" if power_2_scale else "do not round scales"
        return (
            "code",
            f"In the module's own cast, {rounded if eps is None else f'clamp the amax at {eps:g} from below'}",
        )
    if backend == STOCK:
        value = f"QParams(power_2_scale={power_2_scale}, amax_epsilon={eps or 0.0:g})"
        return "code", "; ".join(f"`recipe.{QPARAMS[o]} = {value}`" for o in operands)
    if eps is None:
        return "env", " ".join(f"{POWER_2_VARIABLE[o]}={int(power_2_scale)}" for o in operands)
    return "env", " ".join(f"{EPS_VARIABLE[o]}={eps:g}" for o in operands)
