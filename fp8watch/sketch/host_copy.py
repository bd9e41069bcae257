"""Small tensors on their way to the host, without waiting for the device: rows of the slab, losses, norms.

Downstream: fp8watch.session.step_flush
Shapes:     tensors on a device -> the same bytes in host memory     Thread: training

On a GPU a copy is taken on the device at once, in the order of the stream, so that the slab may be cleared behind it; it
travels to pinned memory on a stream of its own, and an event tells when it has arrived. Whoever consumes it a step later
finds it there. Pinned memory is made once and used again: making it would wait for the device. On the CPU nothing is
copied and nothing is late: the tensors themselves are handed out, to be read before they are written to again.

State of this file: tested on the CPU, with streams and events of the test's own, and on an H200 (tests/gpu).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

POLL_S = 0.0005
ARRIVAL_TIMEOUT_S = 2.0
MAX_PINNED_BYTES = 8 << 20
"""Kept for later copies; what is beyond goes back to torch."""

_Release = Callable[[list[torch.Tensor]], None]


def side_by_side(numbers: Mapping[str, torch.Tensor]) -> tuple[list[str], torch.Tensor]:
    """Numbers of one device as one tensor: names, and what they are, float64 [N]; of a tensor of several elements its mean.

    Those of one dtype are put together before they are converted: on a device each operation costs, however small it is.
    """
    alike: dict[torch.dtype, list[tuple[str, torch.Tensor]]] = {}
    for name, value in numbers.items():
        one = value.detach()
        if type(one) is not torch.Tensor or one.numel() != 1:
            one = one.double().mean()
        alike.setdefault(one.dtype, []).append((name, one.reshape(())))
    wide = [torch.stack([one for _, one in some]).double() for some in alike.values()]
    return [name for some in alike.values() for name, _ in some], wide[0] if len(wide) == 1 else torch.cat(wide)


class HostCopy:
    """Tensors on their way. On a GPU their values are those of the moment when the copy was begun."""

    def __init__(self, tensors: Sequence[torch.Tensor], arrived: Any, release: _Release | None = None) -> None:
        self._tensors, self._arrived, self._release = list(tensors), arrived, release

    def ready(self) -> bool:
        """Whether `tensors` would not wait."""
        return self._arrived is None or bool(self._arrived.query())

    def wait(self) -> bool:
        """Wait for the device, `ARRIVAL_TIMEOUT_S` at most: one that hangs must not keep a process from ending."""
        until = time.monotonic() + ARRIVAL_TIMEOUT_S
        while not self.ready():
            if time.monotonic() >= until:
                return False
            time.sleep(POLL_S)
        return True

    def tensors(self) -> list[torch.Tensor]:
        """The tensors on the host. Waits for those that are not there yet."""
        if self._arrived is not None:
            if not self._arrived.query():
                self._arrived.synchronize()
            self._arrived = None
        return self._tensors

    def release(self) -> None:
        """Say that nobody reads the tensors any more: their memory goes to the next copy."""
        if self._release is not None and self._arrived is None:
            self._release(self._tensors)
            self._release = None


class HostCopies:
    """Begins copies from one device."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.late = self.device.type == "cuda"
        """Whether copies arrive later than they are begun; else they are to be read at once."""
        self._stream: Any = None  # torch.cuda.Stream, made when it is needed
        self._free: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = {}
        self._free_bytes = 0

    def begin(self, *tensors: torch.Tensor) -> HostCopy:
        """Begin to copy tensors of this device, without waiting for anything.

        Raises:
            ValueError: a tensor is on another device.
        """
        for t in tensors:
            if t.device.type != self.device.type:
                raise ValueError(f"a tensor is on {t.device}: must be on {self.device}, whose copies these are")
        if not self.late:
            return HostCopy([t.detach().to("cpu") for t in tensors], None)
        with torch.cuda.device(self.device):
            if self._stream is None:
                self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            stream = self._stream
            taken = [t.detach().clone() for t in tensors]  # in the order of the current stream
            stream.wait_stream(torch.cuda.current_stream(self.device))
            out = []
            with torch.cuda.stream(stream):
                for t in taken:
                    host = self._pinned(t)
                    host.copy_(t, non_blocking=True)
                    t.record_stream(stream)  # its memory is not given to others before the copy is through
                    out.append(host)
                arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
                arrived.record(stream)
        return HostCopy(out, arrived, self._take_back)

    def _pinned(self, like: torch.Tensor) -> torch.Tensor:
        free = self._free.get((like.shape, like.dtype))
        if free:
            self._free_bytes -= like.numel() * like.element_size()
            return free.pop()
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)

    def _take_back(self, tensors: list[torch.Tensor]) -> None:
        for t in tensors:
            size = t.numel() * t.element_size()
            if self._free_bytes + size <= MAX_PINNED_BYTES:
                self._free.setdefault((t.shape, t.dtype), []).append(t)
                self._free_bytes += size
