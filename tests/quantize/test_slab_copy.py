"""Rows on their way to the host hold the values of the moment when the copy was begun."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fp8watch.sketch.host_copy import HostCopies, side_by_side
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


def test_numbers_side_by_side_are_each_what_it_is_by_itself() -> None:
    values = {
        "loss": torch.tensor(1.1, dtype=torch.float32), "count": torch.tensor(3), "found": torch.tensor(True),
        "half": torch.tensor([0.1], dtype=torch.bfloat16), "losses": torch.tensor([1.0, 2.0, 6.0]),
        "exact": torch.tensor(1e-300, dtype=torch.float64), "large": torch.tensor(2**53 - 1), "nan": torch.tensor(float("nan")),
    }  # fmt: skip
    names, together = side_by_side(values)
    assert sorted(names) == sorted(values)
    assert together.dtype == torch.float64
    for name, value in zip(names, together.tolist(), strict=True):
        assert value == pytest.approx(float(values[name].double().mean()), rel=0, abs=0, nan_ok=True), name


def test_numbers_of_one_dtype_are_put_together_before_they_are_converted() -> None:
    class Counts(TorchDispatchMode):
        num = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.num += func._schema.name in ("aten::_to_copy", "aten::mean")
            return func(*args, **(kwargs or {}))

    with Counts() as counts:
        side_by_side({f"n{i}": torch.tensor(float(i)) for i in range(20)})
    assert counts.num == 1
