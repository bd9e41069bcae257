"""Nothing waits for the device, a CUDA graph can be captured, and rows reach the host without being waited for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

from fp8watch.kernels import triton
from fp8watch.numerics.formats import FORMATS
from fp8watch.numerics.quantize_job import QuantizeJob
from fp8watch.sketch.host_copy import HostCopies
from fp8watch.sketch.slab import Slab
from fp8watch_agent.record import ROW


@pytest.fixture
def no_synchronisation() -> Iterator[None]:
    """An operation that waits for the device raises."""
    before = torch.cuda.get_sync_debug_mode()
    yield
    torch.cuda.set_sync_debug_mode(before)


def accumulate(slab: Slab, x: torch.Tensor, order: int) -> None:
    for row, tile in enumerate(((1, 128), (128, 1), (128, 128), (x.shape[0], x.shape[1]))):
        slab.accumulate(row, triton.quantize(x, QuantizeJob(tile, FORMATS["E4M3"], True, 0.0))[2], order)


def test_quantising_and_accumulating_do_not_wait(no_synchronisation: None) -> None:
    slab, x = Slab(4, "cuda"), torch.randn(500, 700, device="cuda", dtype=torch.bfloat16)
    accumulate(slab, x, 0)  # compiles
    copies = HostCopies("cuda")
    copies.begin(slab.buffer).tensors()
    torch.cuda.set_sync_debug_mode("error")
    accumulate(slab, x, 1)
    triton.quantize_dequantize_both(x, QuantizeJob((1, 128), FORMATS["E4M3"], True, 0.0))
    copy = copies.begin(slab.buffer)
    slab.clear()
    torch.cuda.set_sync_debug_mode("default")
    rows = copy.tensors()[0].numpy().reshape(-1).view(ROW)
    assert rows["num_calls"].tolist() == [2] * 4
    assert copy.ready()


def test_a_cuda_graph_replays_quantising_and_accumulating() -> None:
    x = torch.randn(500, 700, device="cuda", dtype=torch.bfloat16)
    eager, graphed = Slab(4, "cuda"), Slab(4, "cuda")
    accumulate(graphed, x, 0)
    graphed.clear()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        accumulate(graphed, x, 0)
    for seed in range(3):
        torch.manual_seed(seed)
        x.copy_(torch.randn_like(x) * 3)
        graph.replay()
        accumulate(eager, x, 0)
    assert graphed.copy_rows().tobytes() == eager.copy_rows().tobytes()


def test_a_copy_holds_the_values_of_its_moment() -> None:
    slab, copies = Slab(64, "cuda"), HostCopies("cuda")
    begun = []
    for step in range(20):
        slab.buffer.fill_(step)
        begun.append(copies.begin(slab.buffer))
        slab.clear()
    for step, copy in enumerate(begun):
        assert np.all(copy.tensors()[0].numpy() == step)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 512, bias=False), nn.GELU(), nn.Linear(512, 256)).cuda().bfloat16()


def test_forward_and_backward_of_an_attached_model_do_not_wait(
    no_synchronisation: None, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fp8watch

    monkeypatch.setenv("FP8WATCH_SPOOL_DIR", str(tmp_path))
    net = model()
    watch = fp8watch.attach(net, run="gpu", gemm="emulated", overhead_budget=None)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    x = torch.randn(384, 256, device="cuda", dtype=torch.bfloat16)
    for step in range(4):
        if step >= 2:
            torch.cuda.set_sync_debug_mode("error")
        net(x).float().square().mean().backward()
        torch.cuda.set_sync_debug_mode("default")
        optimizer.step()
        optimizer.zero_grad()
    summary = watch.summary()
    watch.detach()
    assert summary["internal_errors"] == {}
    assert summary["num_steps"] == 4


def test_closing_a_step_does_not_wait(
    no_synchronisation: None, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The promise for the whole step: rows are consumed a step later."""
    import fp8watch

    monkeypatch.setenv("FP8WATCH_SPOOL_DIR", str(tmp_path))
    net = model()
    watch = fp8watch.attach(net, run="gpu", gemm="emulated", overhead_budget=None)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    x = torch.randn(384, 256, device="cuda", dtype=torch.bfloat16)
    for step in range(4):
        torch.cuda.set_sync_debug_mode("error" if step >= 2 else "default")
        net(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.set_sync_debug_mode("default")
    errors = watch.summary()["internal_errors"]  # the guard swallows what the debug mode raises
    watch.detach()
    assert errors == {}
