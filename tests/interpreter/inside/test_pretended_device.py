"""A training whose tensors are told to be on a device: the kernels look at it, nothing is read at once, and little is asked of the device."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from attach.conftest import Kept
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fp8watch
from fp8watch.kernels import triton_fold, triton_launch, triton_look, triton_strip, triton_tiles
from fp8watch.observer.unseen import unseen
from fp8watch.session import start
from fp8watch.session.overhead_budget import MAX_LIGHT_EVERY
from fp8watch.sketch import host_copy, slab
from fp8watch_agent.record import Measured

STEPS = 3
STEADY = 40
"""Steps behind which each parameter has had its first turn, and what is looked at is what a long training is."""
MOST_LAUNCHES, MOST_OPERATORS = 40, 400


class There:
    """What has arrived as soon as anybody asks."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that asks a tensor or the slab where it is gets "the CPU" for an answer, and copies to the host come later."""
    made, copies = slab.Slab.__init__, host_copy.HostCopies.__init__

    def slab_made(self: slab.Slab, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.is_cpu, self._cleared = False, None

    def copies_made(self: host_copy.HostCopies, *args: Any) -> None:
        copies(self, *args)
        self.late = True

    def begin(_self: host_copy.HostCopies, *tensors: torch.Tensor) -> host_copy.HostCopy:
        return host_copy.HostCopy([t.detach().clone() for t in tensors], There())

    monkeypatch.setattr(slab.Slab, "__init__", slab_made)
    monkeypatch.setattr(host_copy.HostCopies, "__init__", copies_made)
    monkeypatch.setattr(host_copy.HostCopies, "begin", begin)
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda _self: False))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


Train = Callable[..., Any]


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[Train]:
    monkeypatch.setenv("FP8WATCH_SPOOL_DIR", str(tmp_path))
    monkeypatch.setattr(start, "Recorder", Kept)
    watches = []

    def run(
        around: Callable[[int], Any] | None = None, *, blocks: int = 1, steps: int = STEPS, spoil: int = -1, watched: bool = True, **options: Any
    ) -> Any:  # fmt: skip
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(blocks)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        watch = None
        if watched:
            watch = fp8watch.attach(model, recipe="observe", overhead_budget=None, **options)
            watches.append(watch)
            if around is not None:
                watch._overhead.every = watch._overhead.light_every = MAX_LIGHT_EVERY
        for step in range(steps):
            x = torch.randn(4, 8, 32)
            if step == spoil:
                x[1, 3, 5] = float("inf")
            with around(step) if around is not None else torch.enable_grad():
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        if watch is not None:
            watch._flush.drain(wait=True)
            assert watch.summary()["internal_errors"] == {}
        return watch

    yield run
    for watch in watches:
        watch.detach()


@pytest.mark.parametrize("spoil", [1, pytest.param(-1, marks=pytest.mark.long)])
def test_its_rows_are_those_of_the_cpu(train: Train, monkeypatch: pytest.MonkeyPatch, spoil: int) -> None:
    cpu = train(backend="cpu", every=1, spoil=spoil)
    looks = Counter[str]()
    monkeypatch.setattr(triton_look, "INTERPRETED_BLOCK", 1024)
    monkeypatch.setattr(triton_look, "TIMES", 2)
    for name in ("look_into", "count_into"):
        monkeypatch.setattr(triton_look, name, counted(looks, name, getattr(triton_look, name)))
    pretend(monkeypatch)
    there = train(backend="triton", every=1, spoil=spoil)
    assert looks["look_into"] > 0
    assert looks["count_into"] > 0
    num_seen = 0
    for step in range(STEPS):
        (_, a), (_, b) = cpu._recorder.step(step), there._recorder.step(step)
        for site, row in b.items():  # outputs are looked at in some steps there
            if row["measured"] & int(Measured.AMAX):
                num_seen += 1
                for name in ("num_elements", "num_nan", "num_inf", "amax_max", "first_nonfinite"):
                    assert np.array_equal(a[site][name], row[name], equal_nan=True), (step, site, name)
    assert num_seen > 3 * STEPS


def counted(looks: Counter[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        looks[name] += 1
        return function(*args, **kwargs)

    return call


class Operations(TorchDispatchMode):
    """How many operators are called that a device has something to do for."""

    VIEWS = frozenset(
        [
            "alias",
            "as_strided",
            "detach",
            "empty",
            "expand",
            "permute",
            "reshape",
            "select",
            "slice",
            "split",
            "t",
            "transpose",
            "unbind",
            "unsqueeze",
            "view",
        ]
    )

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name.split("::")[1].removeprefix("_").split("_")[0] not in self.VIEWS
        return func(*args, **(kwargs or {}))


class Launches:
    """In place of a kernel: it is called, and nothing is computed."""

    count = 0

    def __getitem__(self, _grid: object) -> Callable[..., None]:
        def launch(*_args: object, **_constants: object) -> None:
            Launches.count += 1

        return launch


def test_little_is_asked_of_the_device_in_a_step(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operation costs a host some microseconds, and a step of a small model has few hundred. As the budget sets it at last: each
    Linear is looked at once in 16 steps."""
    pretend(monkeypatch)
    for module in (triton_fold, triton_launch, triton_look, triton_strip, triton_tiles):
        for name in (n for n in vars(module) if n.endswith("_kernel") and n != "has_kernel"):
            monkeypatch.setattr(module, name, Launches())
    for module in [m for name, m in sys.modules.items() if name.startswith("fp8watch")]:  # no mode sees what observes
        if hasattr(module, "num_dispatch_modes"):
            monkeypatch.setattr(module, "num_dispatch_modes", lambda: 0)
        if getattr(module, "unseen", None) is unseen:
            monkeypatch.setattr(module, "unseen", lambda function: function)
    counts: dict[bool, tuple[float, float]] = {}
    for watched in (False, True):
        operations, Launches.count = Operations(), 0

        def around(step: int, operations: Operations = operations) -> Any:
            if step == STEADY:
                Launches.count = 0
            return operations if step >= STEADY else torch.enable_grad()

        train(around, blocks=16, steps=STEADY + 32, watched=watched, backend="triton")
        counts[watched] = operations.count / 32, Launches.count / 32
    operators, launches = counts[True][0] - counts[False][0], counts[True][1]
    print(f"{operators:.0f} operators and {launches:.1f} kernels a step, beside {counts[False][0]:.0f} of the model's")
    assert counts[False][1] == 0
    assert 10 < launches <= MOST_LAUNCHES
    assert operators <= MOST_OPERATORS
