"""Settings that are wrong from the first step: what is in FP8 and should not be, or the other way round, and how coarsely.

There is no onset and no baseline; the loss may look like any loss. Severity is the share of the model, or the octaves that
a quantiser is too coarse.
"""

from __future__ import annotations

import os
import sys
from typing import Any, ClassVar

import numpy as np
from proving.faults._base import Lasting, linears, one_of, role
from proving.training import Expected, Training
from torch import nn


class SensitiveLayersQuantised(Lasting):
    """Output head, router or both are on the FP8 path: a filter that takes every Linear."""

    name = "sensitive-layers-quantised"

    def __init__(self, *, modules: list[str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.modules = modules

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> SensitiveLayersQuantised | None:
        if training.recipe == "observe":
            return None
        found = {
            r: [n for n in role(training, r) if _is_taken(training.model.get_submodule(n))] for r in ("head", "router")
        }
        kinds = [r for r in found if found[r]]
        if not kinds or severity == "mild":
            return None
        modules = found[one_of(rng, kinds)] if severity == "medium" else [n for r in kinds for n in found[r]]
        return cls(
            step=0,
            severity=severity,
            expected=Expected(("sensitive-layer-quantized",), tuple(modules), None, True),
            drawn={"module": modules[0], "num_modules": len(modules)},
            modules=modules,
        )

    def before_attach(self, t: Training) -> None:
        taken = set(self.modules)
        t.attach = t.attach | {"filter_fn": lambda module, fqn: True if fqn in taken else None}


def _is_taken(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and not module.in_features % 16 and not module.out_features % 16


class Fp8NotActive(Lasting):
    """FP8 is asked for on the command line, and every GEMM computes as before (LlamaFactory #9500: `fp8: true` trains in
    BF16 in silence)."""

    name = "fp8-not-active"

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> Fp8NotActive | None:
        if training.recipe not in (None, "blockwise") or severity != "mild" or not linears(training):
            return None
        return cls(
            step=0,
            severity=severity,
            expected=Expected(("recipe-mismatch",), None, None, None),
            drawn={
                "flags": one_of(
                    rng, ("--fp8-format e4m3 --fp8-recipe blockwise", "--fp8-recipe blockwise --fp8-format e4m3")
                )
            },
        )

    def before_attach(self, t: Training) -> None:
        before, t.recipe = list(sys.argv), "observe"
        sys.argv += str(self.drawn["flags"]).split()
        os.environ["ACCELERATE_MIXED_PRECISION"] = "fp8"

        def put_back() -> None:
            sys.argv[:] = before
            os.environ.pop("ACCELERATE_MIXED_PRECISION", None)

        self.later(put_back)


class CoarseFromTheStart(Lasting):
    """The quantiser of inputs or weights is too coarse from the first step on: an eps meant for another unit."""

    name = "coarse-from-the-start"
    octaves: ClassVar[dict[str, tuple[float, float]]] = {
        "mild": (9.0, 11.0),
        "medium": (11.0, 14.0),
        "severe": (14.0, 18.0),
    }

    def __init__(self, *, variable: str, eps: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.variable, self.eps = variable, eps

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> CoarseFromTheStart | None:
        if training.recipe not in (None, "blockwise") or not linears(training):
            return None
        operand = one_of(rng, ("input", "weight"))
        amax = 3.0 if operand == "input" else 0.1  # of a tile, as most models begin
        eps = amax * 2.0 ** float(rng.uniform(*cls.octaves[severity]))
        return cls(
            step=0,
            severity=severity,
            expected=Expected(("chronic-quantization-noise", "recipe-mismatch"), None, operand, True),
            drawn={"operand": operand, "eps": float(f"{eps:.3g}")},
            variable={"input": "FP8_QUANT_FWD_INP_AMAX_EPS", "weight": "FP8_QUANT_FWD_WEIGHT_AMAX_EPS"}[operand],
            eps=eps,
        )

    def before_attach(self, t: Training) -> None:
        t.recipe = None
        os.environ[self.variable] = repr(self.eps)
        self.later(lambda: os.environ.pop(self.variable, None))
