"""Rows on their way to the host hold the values of the moment when the copy was begun."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fp8watch.sketch.host_copy import HostCopies
from fp8watch.sketch.slab import Slab
from fp8watch_agent.record import ROW, empty_rows


def test_on_the_cpu_nothing_is_copied_and_all_is_there_at_once() -> None:
    slab, copies = Slab(3), HostCopies("cpu")
    slab.buffer.fill_(7)
    copy = copies.begin(slab.buffer, torch.tensor(2.5))
    assert copy.ready()
    assert not copies.late
    rows, loss = copy.tensors()
    assert rows.data_ptr() == slab.buffer.data_ptr()
    assert np.all(rows.numpy() == 7)
    assert float(loss) == 2.5
    slab.clear()
    assert slab.copy_rows().tobytes() == empty_rows(3).tobytes()
    assert rows.numpy().reshape(-1).view(ROW).shape == (3,)


def test_a_tensor_of_another_device_is_refused() -> None:
    with pytest.raises(ValueError, match="a tensor is on meta: must be on cpu"):
        HostCopies("cpu").begin(torch.empty(1, device="meta"))


def test_a_gpu_s_copy_is_waited_for_only_when_it_is_read() -> None:
    """The waiting itself, with an event of our own; the GPU's is in tests/gpu."""
    from fp8watch.sketch.host_copy import HostCopy

    class Event:
        def __init__(self) -> None:
            self.waited = 0

        def query(self) -> bool:
            return self.waited > 0

        def synchronize(self) -> None:
            self.waited += 1

    event = Event()
    copy = HostCopy([torch.ones(2)], event)
    assert not copy.ready()
    assert event.waited == 0
    assert copy.tensors()[0].tolist() == [1, 1]
    copy.tensors()
    assert event.waited == 1
    assert copy.ready()
