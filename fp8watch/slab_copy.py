"""Small tensors on their way to the host, without waiting for the device: rows of the slab, losses, norms.

Upstream:   fp8watch.slab     Downstream: fp8watch_agent.recorder
Shapes:     tensors on a device -> the same bytes in host memory     Thread: training

On a GPU a copy is taken on the device at once, in the order of the stream, so that the slab may be cleared behind it; it
travels to pinned memory on a stream of its own, and an event tells when it has arrived. Whoever consumes it a step later
finds it there. On the CPU it is there at once.

State of this file: tested on the CPU; its GPU path has not run on a GPU yet (tests/gpu).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class HostCopy:
    """Tensors on their way. Values are those of the moment when the copy was begun."""

    def __init__(self, tensors: Sequence[torch.Tensor], arrived: Any) -> None:
        self._tensors, self._arrived = list(tensors), arrived

    def ready(self) -> bool:
        """Whether `tensors` would not wait."""
        return self._arrived is None or bool(self._arrived.query())

    def tensors(self) -> list[torch.Tensor]:
        """The tensors on the host. Waits for those that are not there yet."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        return self._tensors


class HostCopies:
    """Begins copies from one device."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._stream: Any = None  # torch.cuda.Stream, made when it is needed

    def begin(self, *tensors: torch.Tensor) -> HostCopy:
        """Begin to copy tensors of this device, without waiting for anything.

        Raises:
            ValueError: a tensor is on another device.
        """
        for t in tensors:
            if t.device.type != self.device.type:
                raise ValueError(f"a tensor is on {t.device}: must be on {self.device}, whose copies these are")
        if self.device.type != "cuda":
            return HostCopy([t.detach().to("cpu", copy=True) for t in tensors], None)
        with torch.cuda.device(self.device):
            if self._stream is None:
                self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            stream = self._stream
            taken = [t.detach().clone() for t in tensors]  # in the order of the current stream
            stream.wait_stream(torch.cuda.current_stream(self.device))
            out = []
            with torch.cuda.stream(stream):
                for t in taken:
                    host = torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=True)
                    host.copy_(t, non_blocking=True)
                    t.record_stream(stream)  # its memory is not given to others before the copy is through
                    out.append(host)
                arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
                arrived.record(stream)
        return HostCopy(out, arrived)
