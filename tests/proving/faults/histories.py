"""Scales of whole tensors that belong to something else: a slot of the amax history that two tensors share, settings that the second launch
does not have, a scale that nobody computes.

Severity is how far an operand is clipped, or the relative error of what the GEMM reads.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
from proving.faults._base import ERRORS, Lasting, linears, log_uniform, one_of, onset, relative_error, until
from proving.faults._kernel import kernel_sites
from proving.faults._sites import Wrapped, put_kernel, quantizers
from proving.faults.delayed import DelayedFault
from proving.training import Expected, Training
from torch import Tensor

from fp8watch.kernels.backend import Backend, Quantized
from fp8watch.numerics.quantize_job import QuantizeJob
from fp8watch.recipe import delayed


class HistorySlotShared(DelayedFault):
    """Two tensors share one slot of the amax history, and whoever writes last wins (Transformer Engine #567: several tensors with one
    `fp8_meta`): an activation is cast with the scale of a smaller activation, or of a weight. With whose follows from the clip
    depth that was drawn, as far as the model has it."""

    name = "history-slot-shared"
    modes = ("frozen-scale", "delayed-clip", "quantiser-fault")
    lasts = (1, 1, 1.0)

    def begin(self, t: Training) -> None:
        (mine,) = (q.state for q in quantizers(t.model.get_submodule(self.module), "input"))  # type: ignore[attr-defined]
        others = {
            (name, operand): quantizers(t.model.get_submodule(name), operand)[0].state  # type: ignore[attr-defined]
            for name in linears(t)
            for operand in ("input", "weight")
            if (name, operand) != (self.module, "input")
        }
        own = float(mine.amax_history.max())
        depth = {key: own / max(float(state.amax_history.max()), 1e-30) for key, state in others.items()}
        below = {key: times for key, times in depth.items() if times > 1.2} or depth
        key = min(below, key=lambda k: abs(math.log(max(below[k], 1e-9) / self.size)))
        other, record = others[key], mine.record
        self.note(other=".".join(key), depth=round(depth[key], 2))
        kept = mine.amax_history.clone()
        mine.amax_history.copy_(other.amax_history)

        def of_the_other(amax: Tensor, num_nan: Tensor | None = None) -> None:
            record(other.amax_history[-1:])

        mine.record = of_the_other
        self.later(lambda: mine.amax_history.copy_(kept))
        self.later(lambda: mine.__dict__.pop("record", None))


class DelayedSettingsChanged(Lasting):
    """The second launch of a run with delayed scaling has other settings, from another default or another file: the newest amax in place of
    the largest, a margin of the wrong sign, one format for both directions (Transformer Engine #1169, Primus #669: settings that
    only one recipe is meant to have). Severity is what they cost the operands."""

    name = "delayed-settings-changed"
    resumes = True
    prepares = True
    needs_recipe = "delayed"
    settings: ClassVar[dict[str, tuple[dict[str, Any], ...]]] = {
        "mild": ({"amax_compute_algo": "most_recent"}, {"margin": -1}, {"fp8_format": "E4M3"}),
        "medium": ({"margin": -2}, {"margin": -3}, {"amax_compute_algo": "most_recent", "margin": -2}),
        "severe": ({"margin": -5}, {"margin": -6}, {"fp8_format": "E4M3", "margin": -5}),
    }

    def __init__(self, *, setting: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.setting = setting
        self.resumed = False

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> DelayedSettingsChanged | None:
        if training.recipe not in (None, "blockwise", "delayed") or not linears(training) or training.resume_at:
            return None
        setting = one_of(rng, cls.settings[severity])
        formats = ("gradient-underflow",) if "fp8_format" in setting else ()
        clips = ("delayed-clip",) if "margin" in setting or "amax_compute_algo" in setting else ()
        return cls(
            step=onset(rng, training),
            severity=severity,
            expected=Expected(("recipe-mismatch", *clips, *formats), None, None, True),
            drawn={"setting": " ".join(f"{name}={value}" for name, value in setting.items())},
            setting=setting,
        )

    def before_resume(self, t: Training, state: dict[str, Any]) -> dict[str, Any]:
        self.resumed = True
        return state

    def before_attach(self, t: Training) -> None:
        t.recipe = delayed(**self.setting) if self.resumed else "delayed"  # type: ignore[assignment]


class _Unwritten(Wrapped):
    """A quantiser whose scale is what the buffer holds. All that it says belongs to the scale that it uses."""

    def __init__(self, base: Backend, fault: ScaleNeverComputed) -> None:
        super().__init__(base)
        self.fault = fault
        self.held: Tensor | None = None

    def scale(self, x: Tensor, job: QuantizeJob) -> Tensor:
        now = (1.0 / self.base.quantize(x, job)[1]).contiguous()
        if self.held is None:
            if not float(x.abs().max()) > 0:
                return now
            errors = {
                octaves: relative_error(self.base.quantize_dequantize(x, job, now * 2.0**-octaves)[0], x)
                for octaves in (half / 2 for half in range(72))
            }
            best = min(errors, key=lambda octaves: abs(errors[octaves] - self.fault.error))
            self.held = (now * 2.0**-best).contiguous()
            self.fault.note(octaves=best, error=errors[best], held=float(f"{float(self.held.max()):.4g}"))
        return self.held

    def quantize(self, x: Tensor, job: QuantizeJob, scale: Tensor | None = None) -> Quantized:
        return self.base.quantize(x, job, self.scale(x, job))

    def quantize_dequantize(self, x: Tensor, job: QuantizeJob, scale: Tensor | None = None) -> Quantized:
        return self.base.quantize_dequantize(x, job, self.scale(x, job))


class ScaleNeverComputed(Lasting):
    """A fused kernel of bias and cast has no code for the amax under current scaling, and gradients are cast with what the scale's buffer
    holds (Transformer Engine #2007): far too small a scale for numbers as small as these, most of which become 0. How small
    follows from the error that was drawn."""

    name = "scale-never-computed"
    prepares = True
    needs_recipe = "current"

    def __init__(self, *, modules: list[str], error: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.modules, self.error = modules, error

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> ScaleNeverComputed | None:
        if training.recipe not in (None, "blockwise", "current"):
            return None
        biased = [
            n for n in kernel_sites(rng, training, "grad_output") if training.model.get_submodule(n).bias is not None
        ]
        if not biased:
            return None
        step, error = onset(rng, training), log_uniform(rng, *ERRORS[severity])
        return cls(
            step=step,
            until=until(rng, step, 6, 40, stays=0.8),
            severity=severity,
            expected=Expected(
                ("gradient-underflow", "frozen-scale", "quantiser-fault"), tuple(biased), "grad_output", True
            ),
            drawn={"module": biased[0], "num_modules": len(biased), "asked_error": round(error, 4)},
            modules=biased,
            error=error,
        )

    def before_attach(self, t: Training) -> None:
        t.recipe = "current"

    def begin(self, t: Training) -> None:
        for name in self.modules:
            module = t.model.get_submodule(name)
            self.later(put_kernel(module, "grad_output", lambda base: _Unwritten(base, self)))
