"""How far an operand travels: calls that change the product file, and the files that they change between.

A reader follows the path of one Linear file by file. Counted are Python calls only, on the cpu backend, in a step with
full statistics.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import fp8watch
import fp8watch_agent
from fp8watch.layers.module_hooks import ForwardBegins, LossHook
from fp8watch.observer.site_rows import INPUT
from fp8watch.quantize.site_quantizer import SiteQuantizer
from fp8watch.session import step_boundary
from fp8watch.session.gradient_arrival import GradientArrival

ROOMS = tuple(f"{Path(package.__file__).parent}/" for package in (fp8watch, fp8watch_agent))
MOST = {"forward": (37, 13), "backward": (26, 16), "optimizer.step": (84, 38)}
"""Moves between files, and files."""


def files_of(action: Callable[[], object]) -> list[str]:
    """Product files in the order in which calls enter them."""
    found: list[str] = []

    def enter(frame, event, _arg) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOMS):
            found.append(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(enter)
    try:
        action()
    finally:
        sys.setprofile(before)
    return found


def test_an_operand_crosses_few_files(tmp_path, monkeypatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setenv("FP8WATCH_SPOOL_DIR", str(tmp_path))
    # those of other tests would be told too
    monkeypatch.setattr(step_boundary, "_watches", weakref.WeakValueDictionary())
    monkeypatch.setattr(LossHook, "_see_inputs", lambda *_: None)  # of the model: once a pass, and no operand's way
    monkeypatch.setattr(ForwardBegins, "__call__", lambda *_: None)
    model, x = torch.nn.Sequential(torch.nn.Linear(256, 256)), torch.randn(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    try:
        watch = fp8watch.attach(model, backend="cpu", overhead_budget=None)
    except ValueError as reason:
        pytest.skip(str(reason))
    with watch:
        watch._plan.canary.share = 0.0  # after its first turn none: a turn is not the way of every step
        watch._plan.canary.reads_rows = False  # nor is reading all of it once more
        monkeypatch.setattr(GradientArrival, "has_turn", False)  # nor a gradient's turn
        for _ in range(6):  # past what is looked up once
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        outputs: list[torch.Tensor] = []
        optimizer.zero_grad()
        ways = {"forward": files_of(lambda: outputs.append(model(x)))}
        loss = outputs[0].sum()
        ways |= {"backward": files_of(loss.backward), "optimizer.step": files_of(optimizer.step)}
        assert not watch.guard.errors
    took = {name: (sum(a != b for a, b in pairwise(way)), len(set(way))) for name, way in ways.items()}
    print(took)
    for name, (moves, files) in took.items():
        assert moves, f"{name} was not seen"
        most_moves, most_files = MOST[name]
        assert moves <= most_moves, f"{name}: {moves} moves between files, at most {most_moves}"
        assert files <= most_files, f"{name}: {files} files, at most {most_files}"


def test_a_quantiser_that_was_replaced_is_the_one_that_runs(attach) -> None:
    """Rows and quantisers of an operand are looked up once; a fault of the demo puts another one there."""
    runs: list[int] = []

    class Counted(SiteQuantizer):
        def __call__(self, x_MK, *, stats, heavy):
            runs.append(1)
            return super().__call__(x_MK, stats=stats, heavy=heavy)

    model, x = torch.nn.Sequential(torch.nn.Linear(128, 128)), torch.randn(32, 128)
    rows = attach(model)._plan.sites
    model(x)
    row = rows.row(0, INPUT, False)
    old = rows.quantizers[row]
    rows.replace(row, Counted(old.spec, old.columnwise, old.backend))
    model(x)
    assert runs == [1]
