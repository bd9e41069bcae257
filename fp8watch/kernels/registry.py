"""Which backend quantises: found by name, probed, and never swapped in silence.

A backend is one module of `fp8watch.kernels` with the functions of `fp8watch.kernels.backend.Backend`, and one row of
BACKENDS. Its `probe` says in words why it cannot serve a device. `resolve(None, device)` takes the first in the order of
speed that can; a name that was asked for explicitly is used or refused.
"""

from __future__ import annotations

import importlib
import logging
from typing import cast

import torch

from fp8watch.kernels.backend import Backend

_LOG = logging.getLogger("fp8watch.kernels")

BACKENDS: dict[str, tuple[str, ...]] = {"triton": ("cuda",), "cpu": ("cpu",), "reference": ()}
"""Name of the module -> types of the devices that AUTO takes it for, none: any. The fastest first, as AUTO tries them."""

BACKEND_NAMES: tuple[str, ...] = tuple(BACKENDS)
"""Every name that `backend=` takes, the fastest first."""

_said: set[tuple[str, str]] = set()


def _load(name: str) -> Backend:
    return cast(Backend, importlib.import_module(f"fp8watch.kernels.{name}"))


def _reason(name: str, device: torch.device) -> str | None:
    """Why the backend cannot serve the device, or None."""
    return _load(name).probe(device)


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
    for candidate, devices in BACKENDS.items():
        if devices and device.type not in devices:
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
    _LOG.warning("backend %r passed over for %s tensors: %s", name, device.type, reason)


def _choices(device: torch.device) -> str:
    reasons = available(device)
    usable = ", ".join(repr(n) for n, reason in reasons.items() if reason is None) or "none"
    refused = "; ".join(f"{n!r}: {reason}" for n, reason in reasons.items() if reason is not None)
    return f"Available for {device.type} tensors: {usable}; not available: {refused}. backend=None takes the best."
