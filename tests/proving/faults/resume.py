"""Checkpoints that come back as something else: moments, weights, recipe, coverage.

The run is stopped at a drawn step and goes on in a new process. Severity of moments is the size of the first updates, that
of weights the relative error of what was loaded, that of a recipe what its quantisation costs.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

import numpy as np
import torch
from proving.faults._base import (
    ERRORS,
    Lasting,
    has_adam,
    linears,
    log_uniform,
    one_of,
    onset,
    role,
    seed,
    some_of,
)
from proving.training import Expected, Training


class _Resumed(Lasting):
    """Something is wrong from the second leg on."""

    resumes = True

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.resumed = False

    def before_resume(self, t: Training, state: dict[str, Any]) -> dict[str, Any]:
        self.resumed = True
        return self.loaded(t, state)

    def loaded(self, t: Training, state: dict[str, Any]) -> dict[str, Any]:
        """What is loaded in place of the checkpoint."""
        return state


class MomentsRestoredWrongly(_Resumed):
    """Adam's moments come back multiplied: zeroed (an optimizer state that was not saved), ×k (another unit; marin #1368
    says ×2 leads spikes), or the second moment alone is lost while the step count says that it is warm."""

    name = "moments-restored-wrongly"
    ways: ClassVar[dict[str, tuple[str, ...]]] = {
        "mild": ("both zeroed", "first times 5"),
        "medium": ("first times 20", "second times 0.001"),
        "severe": ("second zeroed", "first times 100"),
    }

    def __init__(self, *, way: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.way = way

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> MomentsRestoredWrongly | None:
        if not has_adam(training):
            return None
        way = one_of(rng, cls.ways[severity])
        return cls(
            step=onset(rng, training),
            severity=severity,
            expected=Expected(("optimizer-divergence", "recipe-mismatch"), None, None, False),
            drawn={"way": way},
            way=way,
        )

    def loaded(self, t: Training, state: dict[str, Any]) -> dict[str, Any]:
        which, _, how = self.way.partition(" ")
        factor = 0.0 if how == "zeroed" else float(how.rpartition(" ")[2])
        names = {"both": ("exp_avg", "exp_avg_sq"), "first": ("exp_avg",), "second": ("exp_avg_sq",)}[which]
        moments = state["optimizer"]["state"]
        changed = {i: {k: v * factor if k in names else v for k, v in of.items()} for i, of in moments.items()}
        return state | {"optimizer": state["optimizer"] | {"state": changed}}


class MomentsShuffled(_Resumed):
    """Moments belong to other parameters of the same shape: the order of the groups changed between save and load."""

    name = "moments-shuffled"

    def __init__(self, *, share: float, seed: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.share, self.seed = share, seed

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> MomentsShuffled | None:
        if not has_adam(training):
            return None
        share = float(rng.uniform(*{"mild": (0.1, 0.3), "medium": (0.3, 0.7), "severe": (0.7, 1.0)}[severity]))
        return cls(
            step=onset(rng, training),
            severity=severity,
            expected=Expected(("optimizer-divergence", "recipe-mismatch", "silent-data-corruption"), None, None, False),
            drawn={"share": round(share, 3)},
            share=share,
            seed=seed(rng),
        )

    def loaded(self, t: Training, state: dict[str, Any]) -> dict[str, Any]:
        rng, moments = np.random.default_rng(self.seed), state["optimizer"]["state"]
        by_shape: dict[tuple[int, ...], list[int]] = {}
        for i, of in moments.items():
            if rng.random() < self.share:
                by_shape.setdefault(tuple(of["exp_avg"].shape), []).append(i)
        if all(len(same) < 2 for same in by_shape.values()):
            for i, of in moments.items():
                by_shape.setdefault(tuple(of["exp_avg"].shape), []).append(i)
        source = {i: i for i in moments}
        for same in (list(dict.fromkeys(same)) for same in by_shape.values()):
            source |= dict(zip(same, same[1:] + same[:1], strict=True))
        changed = {i: moments[source[i]] for i in moments}
        return state | {"optimizer": state["optimizer"] | {"state": changed}}


class WeightsRestoredWrongly(_Resumed):
    """Some weights are not those that were saved: experts or layers that the loader did not find stay at random init
    (Automodel #2722), or a part of a shard is zeros. Severity is the error of the weights, over the modules concerned."""

    name = "weights-restored-wrongly"
    modes: ClassVar[tuple[str, ...]] = (
        "silent-data-corruption",
        "recipe-mismatch",
        "scalar-shift",
        "optimizer-divergence",
    )

    def __init__(self, *, modules: list[str], error: float, way: str, seed: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.modules, self.error, self.way, self.seed = modules, error, way, seed

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> WeightsRestoredWrongly | None:
        experts = role(training, "experts")
        names = linears(training) or role(training, "linears")
        if experts and rng.random() < 0.7:
            expert = one_of(rng, experts)
            names = [n for n in names if n.startswith(f"{expert}.")] or names
        if not names:
            return None
        modules, error = some_of(rng, names, 1, 3), log_uniform(rng, *ERRORS[severity])
        way = one_of(rng, ("random init", "zeros"))
        return cls(
            step=onset(rng, training),
            severity=severity,
            expected=Expected(cls.modes, tuple(modules), None, False),
            drawn={"module": modules[0], "num_modules": len(modules), "way": way, "asked_error": round(error, 3)},
            modules=modules,
            error=error,
            way=way,
            seed=seed(rng),
        )

    def loaded(self, t: Training, state: dict[str, Any]) -> dict[str, Any]:
        rng, model = np.random.default_rng(self.seed), dict(state["model"])
        for name in self.modules:
            weight = model[f"{name}.weight"].clone()
            rows = max(1, round(min(1.0, self.error**2 / (2 if self.way == "random init" else 1)) * weight.shape[0]))
            first = int(rng.integers(weight.shape[0] - rows + 1))
            fresh = torch.zeros_like(weight[:rows])
            if self.way == "random init":
                fresh = torch.from_numpy(rng.standard_normal(tuple(fresh.shape))).to(weight.dtype) * weight.std()
            weight[first : first + rows] = fresh
            model[f"{name}.weight"] = weight
        return state | {"model": model}


class RecipeChanged(_Resumed):
    """The second launch has other FP8 settings: scales, format, eps or recipe. Severity is what they cost the operands."""

    name = "recipe-changed"
    settings: ClassVar[dict[str, tuple[tuple[str, str], ...]]] = {
        "mild": (
            ("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1"),
            ("FP8_QUANT_FWD_INP_AMAX_EPS", "1e-12"),
            ("FP8_QUANT_BWD_GRAD_AMAX_EPS", "1e-10"),
            ("NVTE_FP8_BLOCK_SCALING_BWD_GRAD_POWER2", "0"),
        ),
        "medium": (("recipe", "delayed"), ("recipe", "current"), ("FP8_QUANT_FWD_INP_AMAX_EPS", "4e3")),
        "severe": (("FP8_QUANT_FWD_INP_AMAX_EPS", "1e5"), ("FP8_QUANT_FWD_WEIGHT_AMAX_EPS", "1e3")),
    }

    def __init__(self, *, setting: tuple[str, str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.setting = setting

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> RecipeChanged | None:
        if training.recipe not in (None, "blockwise") or not linears(training):
            return None
        setting = one_of(rng, cls.settings[severity])
        modes = ("recipe-mismatch",) if severity == "mild" else ("recipe-mismatch", "chronic-quantization-noise")
        return cls(
            step=onset(rng, training),
            severity=severity,
            expected=Expected(modes, None, None, True),
            drawn={"setting": "=".join(setting)},
            setting=setting,
        )

    def before_attach(self, t: Training) -> None:
        name, value = self.setting
        if not self.resumed:
            return
        if name == "recipe":
            t.recipe = value
        else:
            os.environ[name] = value
            self.later(lambda: os.environ.pop(name, None))


class LayersLeaveFp8(_Resumed):
    """After a resume some modules compute in high precision: a pattern of names is read another way (prime-rl #2442: 3 of
    477 modules; LlamaFactory #9500: all, in silence). The loss does not show it; severity is the share of the modules."""

    name = "layers-leave-fp8"
    shares: ClassVar[dict[str, tuple[float, float]]] = {
        "mild": (0.01, 0.15),
        "medium": (0.15, 0.5),
        "severe": (0.5, 1.0),
    }

    def __init__(self, *, modules: list[str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.modules = modules

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> LayersLeaveFp8 | None:
        names = linears(training)
        if len(names) < 3:
            return None
        n = max(1, round(rng.uniform(*cls.shares[severity]) * len(names)))
        modules = some_of(rng, names, n, n)
        return cls(
            step=onset(rng, training),
            severity=severity,
            expected=Expected(("recipe-mismatch",), None, None, None),
            drawn={"num_modules": n, "of": len(names), "module": modules[0]},
            modules=modules,
        )

    def before_attach(self, t: Training) -> None:
        if self.resumed:
            left = set(self.modules)
            t.attach = t.attach | {"filter_fn": lambda module, fqn: False if fqn in left else None}
