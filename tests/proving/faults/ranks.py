"""One rank of several that differs from the others: weights, gradients, recipe, version.

Severity is the relative difference of what must be equal.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

import numpy as np
import torch
from proving.faults._base import Lasting, linears, log_uniform, one_of, onset, role, seed, trained, until
from proving.training import Expected, Training
from torch import Tensor

_DIFFERENCES: dict[str, tuple[float, float]] = {"mild": (1e-6, 1e-3), "medium": (1e-3, 0.03), "severe": (0.03, 0.5)}


class _OneRank(Lasting):
    """Something about one rank of a training on several."""

    def __init__(self, *, on: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.on = on

    def is_here(self, t: Training) -> bool:
        """Whether this process is that rank."""
        return t.rank == self.on


class _OneModuleOfOneRank(_OneRank):
    """A relative difference of one module's weight or gradient."""

    modes: ClassVar[tuple[str, ...]] = ("cross-rank-disagreement", "silent-data-corruption")
    lasts: ClassVar[tuple[int, int, float]]

    def __init__(self, *, module: str, difference: float, seed: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.module, self.difference = module, difference
        self.rng = np.random.default_rng(seed)

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> _OneModuleOfOneRank | None:
        names = trained(training, linears(training) or role(training, "linears"))
        if training.world_size < 2 or not names:
            return None
        module, difference, step = one_of(rng, names), log_uniform(rng, *_DIFFERENCES[severity]), onset(rng, training)
        on = int(rng.integers(training.world_size))
        return cls(
            step=step,
            until=until(rng, step, *cls.lasts),
            severity=severity,
            expected=Expected(cls.modes, (module,), "weight", False),
            drawn={"module": module, "rank": on, "difference": float(f"{difference:.2g}")},
            on=on,
            module=module,
            difference=difference,
            seed=seed(rng),
        )

    def _off(self, x: Tensor) -> Tensor:
        """x with an error of the drawn size."""
        noise = torch.from_numpy(self.rng.standard_normal(tuple(x.shape))).to(x.dtype)
        return x + noise * (self.difference * x.norm() / noise.norm())


class ReplicaDrifts(_OneModuleOfOneRank):
    """One rank's weight is changed once, in low bits or more, and nothing brings it back: updates are the same on all."""

    name = "replica-drifts"
    lasts = (1, 1, 1.0)

    @torch.no_grad()
    def begin(self, t: Training) -> None:
        if self.is_here(t):
            weight = t.model.get_submodule(self.module).weight
            weight.copy_(self._off(weight))


class GradientsNotReduced(_OneModuleOfOneRank):
    """One rank steps with another gradient than the rest: a bucket that was not waited for (Megatron-Bridge #1255), a
    parameter outside of the reducer."""

    name = "gradients-not-reduced"
    lasts = (3, 30, 0.6)

    @torch.no_grad()
    def after_backward(self, t: Training, step: int) -> None:
        if self.active(step) and self.is_here(t):
            gradient = t.model.get_submodule(self.module).weight.grad
            if gradient is not None:
                gradient.copy_(self._off(gradient))


class RankOfOtherRecipe(_OneRank):
    """One node was started with another environment: its scales, or its eps, are not those of the others."""

    name = "rank-of-other-recipe"
    settings: ClassVar[dict[str, tuple[tuple[str, str], ...]]] = {
        "mild": (("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1"), ("FP8_QUANT_BWD_GRAD_AMAX_EPS", "1e-12")),
        "medium": (("recipe", "delayed"), ("recipe", "current")),
        "severe": (("FP8_QUANT_FWD_INP_AMAX_EPS", "1e5"),),
    }

    def __init__(self, *, setting: tuple[str, str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.setting = setting

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> RankOfOtherRecipe | None:
        if training.world_size < 2 or training.recipe not in (None, "blockwise") or not linears(training):
            return None
        setting, on = one_of(rng, cls.settings[severity]), int(rng.integers(training.world_size))
        return cls(
            step=0,
            severity=severity,
            expected=Expected(("recipe-mismatch", "cross-rank-disagreement"), None, None, True),
            drawn={"rank": on, "setting": "=".join(setting)},
            on=on,
            setting=setting,
        )

    def before_attach(self, t: Training) -> None:
        if not self.is_here(t):
            return
        name, value = self.setting
        if name == "recipe":
            t.recipe = value
        else:
            os.environ[name] = value
            self.later(lambda: os.environ.pop(name, None))


class RankOfOtherVersion(_OneRank):
    """One node has an image with another torch and other kernels. The results may be the same; nobody has checked."""

    name = "rank-of-other-version"

    def __init__(self, *, version: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.version = version

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> RankOfOtherVersion | None:
        if training.world_size < 2 or severity != "mild":
            return None
        on, version = int(rng.integers(training.world_size)), one_of(rng, ("2.9.1", "2.10.0", "2.12.0+cpu"))
        return cls(
            step=0,
            severity=severity,
            expected=Expected(("recipe-mismatch", "cross-rank-disagreement"), None, None, None),
            drawn={"rank": on, "torch": version},
            on=on,
            version=version,
        )

    def before_attach(self, t: Training) -> None:
        if self.is_here(t):
            right = torch.__version__
            torch.__version__ = type(right)(self.version)
            self.later(lambda: setattr(torch, "__version__", right))

    def attached(self, t: Training, watch: Any) -> None:
        self.undo()  # everything else in this process is the version that it is
