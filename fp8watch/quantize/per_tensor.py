"""Per-tensor scaling: one FP32 scale a tensor, from its own amax (current) or from those of earlier passes (delayed).

Shapes:     x [M, K] -> codes [M, K], scale_inv [1, 1]; amax_history [amax_history_len]     Thread: training

The arithmetic is that of the blockwise rule with one tile, the tensor. Columnwise data are the transpose, with the
same codes and the same scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fp8watch.kernels.backend import Backend
from fp8watch.kernels.registry import resolve
from fp8watch.numerics.formats import Fp8Format
from fp8watch.numerics.operand_checks import check_denormals, check_operand, check_scale
from fp8watch.numerics.quantize_job import quantize_jobs
from fp8watch.numerics.tile_stats import TileStats
from fp8watch.recipe.spec import AmaxHistory

_FLOAT32_MAX = torch.finfo(torch.float32).max
_SMALLEST = 2.0**-149  # the smallest positive float32


@dataclass(frozen=True)
class TensorQuantized:
    """A tensor in FP8 with one scale."""

    data: torch.Tensor  # torch.float8_*: [M, K]
    scale_inv: torch.Tensor  # float32 [1, 1]
    stats: TileStats
    format: Fp8Format
    backend: str
    _dequantizer: Backend

    def dequantize(self) -> torch.Tensor:
        """Return what the codes stand for: float32 [M, K]."""
        return self._dequantizer.dequantize(self.data, self.scale_inv, (self.data.shape[0], self.data.shape[1]))


def quantize_per_tensor(
    x: torch.Tensor,
    fp8_format: str = "E4M3",
    power_2_scale: bool = False,
    amax_epsilon: float = 0.0,
    scale: torch.Tensor | None = None,
    backend: str | None = None,
) -> TensorQuantized:
    """Quantise a tensor with one scale: its own (current scaling), or a given one (delayed scaling).

    Args:
        x: [M, K] float32, bfloat16 or float16; any strides. Not differentiated.
        fp8_format: "E4M3" or "E5M2".
        power_2_scale: the scale is a power of two, rounded down; else float32.
        amax_epsilon: an amax below is raised to it.
        scale: float32 [1, 1] to use in place of FP8_MAX/amax; what lies above FP8_MAX/scale is clipped.
        backend: a name of `fp8watch.kernels.BACKEND_NAMES`, or None for the fastest that can serve x's device.

    Returns:
        Codes, scale_inv, statistics of the one tile, and `dequantize()`.

    Raises:
        TypeError: x is not a tensor of one of the three dtypes, or scale is not float32.
        ValueError: x is not 2-D or is empty or on device meta, or another argument is none of the above.
        RuntimeError: subnormal numbers are flushed to zero in this thread (CPU).
    """
    check_operand(x)
    check_denormals(x)
    tile, eps = (x.shape[0], x.shape[1]), float(amax_epsilon)
    job = quantize_jobs(tile, fp8_format, bool(power_2_scale), eps, invariant=scale is None)[-1]
    if scale is not None:
        check_scale(scale, (1, 1), x)
    chosen = resolve(backend, x.device)
    data, scale_inv, stats = chosen.quantize(x, job, scale)
    assert stats is not None
    return TensorQuantized(data, scale_inv, stats, job.fmt, chosen.NAME, chosen)


class DelayedScale:
    """The scale of one operand under delayed scaling, and the amax history that it follows. Lives on the device.

    Source: Transformer Engine 2.20, `DelayedScalingRecipeState` and `_amax_and_scale_update`. Nothing here reads a
    value back to the host, and both tensors keep their addresses: a CUDA graph may capture `record` and `roll`.

    Attributes:
        scale: float32 [1, 1], 1 at first. Multiplies before the cast.
        amax_history: float32 [amax_history_len], 0 at first. Entry 0 is the pass that runs now; the last entry is the
            pass before, entry 1 the oldest.
    """

    def __init__(self, fmt: Fp8Format, history: AmaxHistory, device: torch.device | str = "cpu") -> None:
        self.format, self.history = fmt, history
        with torch.inference_mode(False):  # a tensor made in inference mode could not be written outside of it
            self.scale = torch.ones((1, 1), dtype=torch.float32, device=device)
            self.amax_history = torch.zeros(history.amax_history_len, dtype=torch.float32, device=device)
            self._largest = torch.full((1,), fmt.max_finite / 2.0**history.margin, dtype=torch.float32, device=device)
            self._nan = torch.full((1,), float("nan"), dtype=torch.float32, device=device)
            self._take_views()

    def _take_views(self) -> None:
        """Views are kept: making one costs as much as an operation on it."""
        self._scale, self._running = self.scale.view(1), self.amax_history[:1]

    def to(self, device: torch.device) -> None:
        """Move to another device, where the operand went there."""
        if self.scale.device != device:
            with torch.inference_mode(False):
                self.scale, self.amax_history = self.scale.to(device), self.amax_history.to(device)
                self._largest, self._nan = self._largest.to(device), self._nan.to(device)
                self._take_views()

    @torch.no_grad()
    def record(self, amax: torch.Tensor, num_nan: torch.Tensor | None = None) -> None:
        """Note the amax of one quantisation of the running pass: the largest of a pass counts.

        Args:
            amax: float32, one element; Inf where an element is.
            num_nan: number of NaN in the operand, one element. Where it is above 0 the pass counts as NaN, because
                an amax ignores them.
        """
        newest = amax.reshape(1)
        if num_nan is not None:
            newest = torch.where(num_nan.reshape(1) > 0, self._nan, newest)
        torch.maximum(self._running, newest, out=self._running)  # keeps a NaN

    @torch.no_grad()
    def roll(self) -> None:
        """End the pass: the amax over the window gives the next scale, and the history moves on by one.

        scale = (FP8_MAX / 2^margin) / amax where the amax is finite and positive, else the old scale stays; a scale
        that overflows float32 is its largest number. The window is the running pass and the amax_history_len − 1
        before it; with "most_recent" it is the running pass alone.
        """
        history = self.amax_history
        amax = history.amax(0, keepdim=True) if self.history.amax_compute_algo == "max" else self._running
        usable = amax == amax.clamp(_SMALLEST, _FLOAT32_MAX)  # not so for 0, Inf and NaN
        fresh = torch.div(self._largest, amax).clamp_(max=_FLOAT32_MAX)
        torch.where(usable, fresh, self._scale, out=self._scale)
        history.copy_(history.roll(-1))
        self._running.zero_()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies of scale and amax_history."""
        return {"scale": self.scale.clone(), "amax_history": self.amax_history.clone()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over what `state_dict` gave.

        Raises:
            ValueError: names or shapes differ (a history of another length is another recipe), or the scale is not
                finite and positive; nothing is loaded then.
        """
        pairs = (("scale", self.scale), ("amax_history", self.amax_history))
        for name, mine in pairs:
            given = state.get(name)
            if given is None or given.shape != mine.shape:
                got = "nothing" if given is None else tuple(given.shape)
                raise ValueError(f"{name} is {got}: must have shape {tuple(mine.shape)}, as this recipe keeps it")
        scale = float(state["scale"])
        if not 0 < scale < float("inf"):
            raise ValueError(
                f"scale is {scale}: must be finite and above 0; the checkpoint is damaged, or was written after training "
                "broke: load an earlier one, or leave the scale states out to begin them anew"
            )
        for name, mine in pairs:
            mine.copy_(state[name])
