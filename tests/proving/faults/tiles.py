"""Tiles whose scale degenerates: all zero, nearly zero, or below an eps that somebody set too high."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from proving.faults._base import (
    Lasting,
    change_input,
    linears,
    log_uniform,
    one_of,
    onset,
    role,
    seed,
    until,
)
from proving.faults._kernel import kernel_sites
from proving.faults._sites import OtherJob, put_kernel, tile_amax
from proving.training import Expected, Training
from torch import Tensor


class ZeroTileUnguarded(Lasting):
    """A kernel computes 448/amax without a guard for amax 0, and a tile is all zero: 0·Inf is NaN (Megatron-LM #7523,
    torchao #3356: NaN gradients at once with eps 0). The zeros are a masked token's or those of channels that died."""

    name = "zero-tile-unguarded"

    def __init__(self, *, module: str, operand: str, seed: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.module, self.operand = module, operand
        self.rng = np.random.default_rng(seed)

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> ZeroTileUnguarded | None:
        if severity != "severe" or training.recipe not in (None, "blockwise"):
            return None
        operand = one_of(rng, ("input", "grad_output"))
        names = kernel_sites(rng, training, operand)
        if not names:
            return None
        module = one_of(rng, names)
        return cls(
            step=onset(rng, training),
            severity=severity,
            expected=Expected(("zero-tile-eps", "quantiser-fault"), (module,), operand, True),
            drawn={"module": module, "operand": operand},
            module=module,
            operand=operand,
            seed=seed(rng),
        )

    def begin(self, t: Training) -> None:
        module = t.model.get_submodule(self.module)
        self.later(put_kernel(module, self.operand, lambda base: OtherJob(base, _unguarded)))
        tokens = round(log_uniform(self.rng, 1, 8))
        at = float(self.rng.random())
        self.note(num_zero_tokens=tokens)

        def mask(x: Tensor) -> Tensor:
            keep = torch.ones(x.shape[:-1], dtype=x.dtype)
            first = int(at * keep.numel())
            keep.view(-1)[first : first + tokens] = 0
            return x * keep.unsqueeze(-1)

        if self.operand == "input":
            self.later(change_input(module, mask))
        else:
            self.later(_change_gradient(module, mask))


def _unguarded(x: Tensor, job: Any) -> Any:
    return replace(job, force_scale_1=False)


def _change_gradient(module: torch.nn.Module, change: Any) -> Any:
    """From now on the gradient of a module's output is changed before the module's backward reads it."""

    def hook(m: torch.nn.Module, args: Any, y: Any) -> None:
        if isinstance(y, Tensor) and y.requires_grad:
            y.register_hook(change)

    return module.register_forward_hook(hook).remove


class DyingChannels(Lasting):
    """A group of channels fades by a constant factor a step, towards numbers that no scale can hold. Severity is how many
    of the channels."""

    name = "dying-channels"
    shares: ClassVar[dict[str, tuple[float, float]]] = {
        "mild": (0.1, 0.25),
        "medium": (0.25, 0.6),
        "severe": (0.6, 1.0),
    }

    def __init__(self, *, module: str, share: float, octaves: float, seed: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.module, self.share, self.octaves = module, share, octaves
        self.rng = np.random.default_rng(seed)
        self.steps = 0

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> DyingChannels | None:
        inner = set(role(training, "mlp.down", "attention.out"))
        names = [n for n in linears(training) if n in inner] or linears(training)
        if not names:
            return None
        module, octaves = one_of(rng, names), log_uniform(rng, 2, 8)
        share = log_uniform(rng, *cls.shares[severity])
        return cls(
            step=onset(rng, training),
            severity=severity,
            expected=Expected(("dying-tile", "dead-layer", "zero-tile-eps"), (module,), "input", None),
            drawn={"module": module, "octaves_a_step": round(octaves, 2), "share": round(share, 3)},
            module=module,
            share=share,
            octaves=octaves,
            seed=seed(rng),
        )

    def before_step(self, t: Training, step: int) -> None:
        super().before_step(t, step)
        self.steps = max(0, step - self.step + 1)

    def begin(self, t: Training) -> None:
        start = float(self.rng.random())

        def fade(x: Tensor) -> Tensor:
            k = x.shape[-1]
            n = max(1, round(self.share * k))
            gain = torch.ones(k, dtype=x.dtype)
            gain[(torch.arange(n) + int(start * k)) % k] = 2.0 ** -min(self.octaves * self.steps, 140.0)
            return x * gain

        self.later(change_input(t.model.get_submodule(self.module), fade))


class EpsTooLarge(Lasting):
    """The eps of an operand is far above its amax: every tile is scaled as if it held eps, and most of it is flushed to 0
    (`FP8_QUANT_BWD_GRAD_AMAX_EPS=1e-3` where 1e-12 was meant). Severity is eps over the tiles' median amax: a value of
    amax/4 is coarse from 2^10 on, and 0 from 2^15 on."""

    name = "eps-too-large"
    octaves: ClassVar[dict[str, tuple[float, float]]] = {
        "mild": (9.0, 11.0),
        "medium": (11.0, 14.0),
        "severe": (14.0, 20.0),
    }

    def __init__(self, *, modules: list[str], operand: str, octaves: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.modules, self.operand, self.above = modules, operand, octaves
        self.eps: dict[str, float] = {}

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> EpsTooLarge | None:
        if training.recipe not in (None, "blockwise") or not linears(training):
            return None
        operand = one_of(rng, ("grad_output", "grad_output", "input"))
        names = linears(training)  # the variable is one for all
        octaves, step = float(rng.uniform(*cls.octaves[severity])), onset(rng, training)
        mode = "gradient-underflow" if operand == "grad_output" else "chronic-quantization-noise"
        return cls(
            step=step,
            until=until(rng, step, 10, 40, stays=0.8),
            severity=severity,
            expected=Expected((mode, "gradient-underflow", "recipe-mismatch"), tuple(names), operand, True),
            drawn={"operand": operand, "octaves_above_amax": round(octaves, 2)},
            modules=names,
            operand=operand,
            octaves=octaves,
        )

    def begin(self, t: Training) -> None:
        for name in self.modules:

            def with_eps(x: Tensor, job: Any, name: str = name) -> Any:
                if name not in self.eps:
                    amax = tile_amax(x, job)
                    median = float(amax[amax > 0].median()) if bool((amax > 0).any()) else 1e-12
                    self.eps[name] = median * 2.0**self.above
                return replace(job, eps=self.eps[name])

            module = t.model.get_submodule(name)
            self.later(put_kernel(module, self.operand, lambda base, with_eps=with_eps: OtherJob(base, with_eps)))
