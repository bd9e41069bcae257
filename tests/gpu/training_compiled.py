"""torch.compile and CUDA graphs."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from training_loops import adamw, autocast, lm, loop, text
from training_models import Lm
from training_registry import BOTH, THREE
from training_registry import scenario as any_scenario
from training_run import Run

scenario = functools.partial(any_scenario, apart=True)


def compiled(run: Run, what: Any, **how: Any) -> Any:
    """By inductor on the device; a rehearsal on a CPU only traces, because its compiler takes minutes."""
    return torch.compile(what, **(how if run.cuda else {"backend": "aot_eager", "dynamic": how.get("dynamic")}))


def small(run: Run, dtype: torch.dtype = torch.bfloat16, **how: Any) -> Lm:
    """Two layers: what compiles takes long."""
    return Lm(run.size(256, 64), 2, **how).to(run.device, dtype)


def _compiled(run: Run, *, first: str = "attach", dtype: torch.dtype = torch.bfloat16, **how: Any) -> None:
    model = small(run, dtype)
    called: Any = model
    if first == "attach":
        run.attach(model)
        called = compiled(run, model, **how)
    else:
        called = compiled(run, model, **how)
        run.attach(model if first == "compile" else called)
    loop(run, called if dtype == torch.bfloat16 else autocast(run, called), adamw(model))


@scenario(("defaults", "observe", "emulated", "delayed", "observe-all"), timeout_s=120, weight=5)
def compile_default(run: Run) -> None:
    """Attached, then compiled as a whole."""
    _compiled(run)


@scenario(timeout_s=120, weight=4)
def compile_first(run: Run) -> None:
    """Compiled, then attached to the model inside."""
    _compiled(run, first="compile")


@scenario(timeout_s=120, weight=4)
def compile_attached_outside(run: Run) -> None:
    """Compiled, then attached to what torch.compile returned."""
    _compiled(run, first="outside")


@scenario(timeout_s=120, weight=4)
def compile_autocast(run: Run) -> None:
    """bfloat16 over float32, compiled."""
    _compiled(run, dtype=torch.float32)


@scenario(timeout_s=150, weight=6, deterministic=False)
def compile_max_autotune(run: Run) -> None:
    """Kernels are chosen by measuring, without CUDA graphs."""
    _compiled(run, mode="max-autotune-no-cudagraphs")


@scenario(THREE, timeout_s=150, weight=5)
def compile_cuda_graphs(run: Run) -> None:
    """`reduce-overhead`: inductor's own CUDA graphs."""
    _compiled(run, mode="reduce-overhead")


@scenario(timeout_s=120, weight=4)
def compile_dynamic(run: Run) -> None:
    """Another length in each step, symbolic shapes."""
    model = small(run)
    run.attach(model)
    called = compiled(run, model, dynamic=True)
    data = [
        (ids[:, : 16 + 8 * (k % 3)].contiguous(), labels[:, : 16 + 8 * (k % 3)].contiguous())
        for k, (ids, labels) in enumerate(text(run))
    ]
    loop(run, called, adamw(model), data)


@scenario(timeout_s=120, weight=4)
def compile_blocks(run: Run) -> None:
    """Each layer compiled for itself, in place, with activation checkpointing around it."""
    model = small(run, recompute="nonreentrant")
    for layer in model.layers:
        layer.compile(**({} if run.cuda else {"backend": "aot_eager"}))
    run.attach(model)
    loop(run, model, adamw(model))


@scenario(timeout_s=120, weight=4)
def compile_optimizer(run: Run) -> None:
    """The model eager, the step of the optimizer compiled."""
    model = small(run)
    run.attach(model)
    optimizer, data = adamw(model), text(run)
    step = compiled(run, optimizer.step)
    for i in run.each():
        loss = model(*data[i])
        loss.backward()
        run.loss(loss)
        step()
        optimizer.zero_grad()


@scenario(THREE, cuda=True, steps=20, deterministic=False, weight=3)
def whole_step_graph(run: Run) -> None:
    """Forward, backward and optimizer in one CUDA graph, replayed; attached before."""
    _graphed(run, torch.bfloat16)


@scenario(THREE, cuda=True, steps=20, deterministic=False, weight=3)
def forward_backward_graph(run: Run) -> None:
    """Forward and backward in one CUDA graph, the optimizer outside of it."""
    _graphed(run, torch.bfloat16, optimizer_inside=False)


def _graphed(run: Run, dtype: torch.dtype, *, optimizer_inside: bool = True) -> None:
    model = lm(run, dtype)
    run.attach(model)
    optimizer, data = adamw(model, capturable=True), text(run)
    ids, labels = (t.clone() for t in data[0])

    def part() -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss: Tensor = model(ids, labels)
        loss.backward()
        if optimizer_inside:
            optimizer.step()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            part()
            if not optimizer_inside:
                optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = part()
    run.notes["before_replay"] = 3
    for i in run.each():
        ids.copy_(data[i][0])
        labels.copy_(data[i][1])
        graph.replay()
        run.loss(loss)
        if not optimizer_inside:
            optimizer.step()
    run.ended = -1  # what counts as a step there is not promised


@scenario(THREE, cuda=True, deterministic=False)
def graphed_callables(run: Run) -> None:
    """`torch.cuda.make_graphed_callables` of each layer of a watched model."""
    _graphed_layers(run, attach_first=True)


@scenario(THREE, cuda=True, deterministic=False)
def graphed_callables_first(run: Run) -> None:
    """The same, attached behind it."""
    _graphed_layers(run, attach_first=False)


def _graphed_layers(run: Run, *, attach_first: bool) -> None:
    model = lm(run, torch.bfloat16)
    if attach_first:
        run.attach(model)
    x = torch.randn(4, 256, 256, device=run.device, dtype=torch.bfloat16, requires_grad=True)
    for k, layer in enumerate(model.layers):
        model.layers[k] = torch.cuda.make_graphed_callables(layer, (x,))
    if not attach_first:
        run.attach(model)
    loop(run, model, adamw(model))
    run.ended = -1


@scenario(BOTH, timeout_s=120, weight=4)
def compile_linear(run: Run) -> None:
    """One Linear compiled by itself inside an eager model, and a graph break in another."""

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(128, 128), nn.Linear(128, 128)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.a(x))
            torch._dynamo.graph_break()
            return self.b(x).float().square().mean()

    model = Broken().to(run.device, torch.bfloat16)
    run.attach(model)
    called = compiled(run, model)
    data = [(torch.randn(200, 128).to(run.device, torch.bfloat16),) for _ in range(3)]
    loop(run, called, adamw(model), data)
