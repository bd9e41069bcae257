"""Which backend quantises: found by name, probed, and never swapped in silence.

A backend is one module of `fp8watch.kernels` with the functions of `Backend`. Its `probe` says in words why it
cannot serve a device. `resolve(None, device)` takes the first in the order of speed that can; a name that was
asked for explicitly is used or refused.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast

import torch

if TYPE_CHECKING:
    from fp8watch.numerics.formats import Fp8Format
    from fp8watch.numerics.tile_stats import TileStats

_LOG = logging.getLogger("fp8watch.kernels")

BACKEND_NAMES: tuple[str, ...] = ("triton", "cpu", "reference")
"""Every name, the fastest first: the order in which AUTO tries them."""

_DEVICES: dict[str, tuple[str, ...]] = {"triton": ("cuda",), "cpu": ("cpu",)}
"""The devices that AUTO takes a backend for; one that is not listed is for any device."""

_said: set[tuple[str, str]] = set()


class Backend(Protocol):
    """The functions that a backend's module has. `fp8watch.kernels.reference` documents them and is their judge."""

    NAME: str

    def probe(self, device: torch.device) -> str | None:
        """Return why this backend cannot serve the device, or None when it can."""

    def quantize(
        self,
        x: torch.Tensor,
        tile_shape: tuple[int, int],
        fmt: Fp8Format,
        power_2_scale: bool,
        eps: float,
        *,
        scale: torch.Tensor | None = None,
        guard: bool = True,
        invariant: bool = True,
        stats: bool = True,
        heavy: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor, TileStats | None]:
        """Return the codes, scale_inv and, when asked for, the statistics."""

    def quantize_dequantize(
        self,
        x: torch.Tensor,
        tile_shape: tuple[int, int],
        fmt: Fp8Format,
        power_2_scale: bool,
        eps: float,
        *,
        scale: torch.Tensor | None = None,
        guard: bool = True,
        invariant: bool = True,
        stats: bool = True,
        heavy: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor, TileStats | None]:
        """As `quantize`, with what the codes stand for (float32) in place of the codes."""

    def dequantize(self, data: torch.Tensor, scale_inv: torch.Tensor, tile_shape: tuple[int, int]) -> torch.Tensor:
        """Return the codes' values times scale_inv, float32."""


Quantized: TypeAlias = "tuple[torch.Tensor, torch.Tensor, TileStats | None]"
"""Codes or dequantised operand, scale_inv, statistics: what the functions of a backend return."""


def quantize_dequantize_both(
    backend: Backend,
    x: torch.Tensor,
    fmt: Fp8Format,
    power_2_scale: bool,
    eps: float,
    *,
    length: int = 128,
    scale: tuple[torch.Tensor, torch.Tensor] | None = None,
    stats: bool = True,
    heavy: bool = True,
) -> tuple[Quantized, Quantized]:
    """Both directions of one operand: as `quantize_dequantize` with tiles (1, length) and (length, 1).

    `scale` are the scales to use, rowwise and columnwise, in place of computed ones.

    A backend that reads the operand once for both has a function of this name with the same arguments, `backend` left
    out; another is called twice.

    Returns:
        What rowwise gives, what columnwise gives.
    """
    both = getattr(backend, "quantize_dequantize_both", None)
    if both is not None:
        got = both(x, fmt, power_2_scale, eps, length=length, scale=scale, stats=stats, heavy=heavy)
        return cast("tuple[Quantized, Quantized]", got)
    rowwise, columnwise = (
        backend.quantize_dequantize(x, tile, fmt, power_2_scale, eps, scale=given, stats=stats, heavy=heavy)
        for tile, given in zip(((1, length), (length, 1)), scale or (None, None), strict=True)
    )
    return rowwise, columnwise


def measure(
    backend: Backend,
    x: torch.Tensor,
    tile_shape: tuple[int, int],
    fmt: Fp8Format,
    power_2_scale: bool,
    eps: float,
    *,
    scale: torch.Tensor | None = None,
    invariant: bool = True,
    heavy: bool = True,
) -> TileStats:
    """The statistics of `quantize` alone, for operands that nobody multiplies in FP8.

    A backend that can measure without writing what it quantised has a function of this name with the same arguments,
    `backend` left out; of another the codes are thrown away.
    """
    alone = getattr(backend, "measure", None)
    if alone is not None:
        got = alone(x, tile_shape, fmt, power_2_scale, eps, scale=scale, invariant=invariant, heavy=heavy)
        return cast("TileStats", got)
    _, _, stats = backend.quantize(
        x, tile_shape, fmt, power_2_scale, eps, scale=scale, invariant=invariant, stats=True, heavy=heavy
    )
    assert stats is not None
    return stats


def measure_both(
    backend: Backend,
    x: torch.Tensor,
    fmt: Fp8Format,
    power_2_scale: bool,
    eps: float,
    *,
    length: int = 128,
    scale: tuple[torch.Tensor, torch.Tensor] | None = None,
    heavy: bool = True,
) -> tuple[TileStats, TileStats]:
    """Both directions of one operand: as `measure` with tiles (1, length) and (length, 1).

    A backend that reads the operand once for both has a function of this name; another is called twice.
    """
    both = getattr(backend, "measure_both", None)
    if both is not None:
        return cast(
            "tuple[TileStats, TileStats]", both(x, fmt, power_2_scale, eps, length=length, scale=scale, heavy=heavy)
        )
    rowwise, columnwise = (
        measure(backend, x, tile, fmt, power_2_scale, eps, scale=given, heavy=heavy)
        for tile, given in zip(((1, length), (length, 1)), scale or (None, None), strict=True)
    )
    return rowwise, columnwise


def _module_name(name: str) -> str:
    return f"fp8watch.kernels.{name}"


def _reason(name: str, device: torch.device) -> str | None:
    """Why the backend cannot serve the device, or None."""
    devices = _DEVICES.get(name)
    if devices is not None and device.type not in devices and name != "triton":  # which has an interpreter, and says so
        return f"serves {' and '.join(devices)} tensors, not {device.type}"
    if importlib.util.find_spec(_module_name(name)) is None:
        return "not part of this version"
    return _load(name).probe(device)


def _load(name: str) -> Backend:
    return cast(Backend, importlib.import_module(_module_name(name)))


def available(device: torch.device | str = "cpu") -> dict[str, str | None]:
    """Return every backend's name with the reason why it cannot serve the device, None for those that can."""
    device = torch.device(device)
    return {name: _reason(name, device) for name in BACKEND_NAMES}


def resolve(name: str | None, device: torch.device | str) -> Backend:
    """Return the backend of that name, or the fastest that can serve the device.

    Args:
        name: one of BACKEND_NAMES, or None for the fastest available. With None a faster backend that was passed
            over is told once per device type, in the log "fp8watch.kernels".
        device: where the operand lies.

    Raises:
        ValueError: the name is unknown, or that backend cannot serve the device; the message says which can.
    """
    device = torch.device(device)
    if name is not None:
        reason = _reason(name, device) if name in BACKEND_NAMES else "no backend has that name"
        if reason is None:
            return _load(name)
        raise ValueError(f"backend={name!r} cannot be used: {reason}. {_choices(device)}")
    for candidate in BACKEND_NAMES:
        if device.type not in _DEVICES.get(candidate, (device.type,)):
            continue  # a backend for other devices is no loss, and Triton's interpreter is for tests
        reason = _reason(candidate, device)
        if reason is None:
            return _load(candidate)
        _say_once(candidate, device, reason)
    raise ValueError(f"no backend can serve {device.type} tensors. {_choices(device)}")


def _say_once(name: str, device: torch.device, reason: str) -> None:
    if (name, device.type) in _said:
        return
    _said.add((name, device.type))
    # What this version does not have is no surprise; what is here and does not work is one.
    level = logging.INFO if reason == "not part of this version" else logging.WARNING
    _LOG.log(level, "backend %r passed over for %s tensors: %s", name, device.type, reason)


def _choices(device: torch.device) -> str:
    reasons = available(device)
    usable = ", ".join(repr(n) for n, reason in reasons.items() if reason is None) or "none"
    refused = "; ".join(f"{n!r}: {reason}" for n, reason in reasons.items() if reason is not None)
    return f"Available for {device.type} tensors: {usable}; not available: {refused}. backend=None takes the best."
