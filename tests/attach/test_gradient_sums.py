"""Gradients that real processes share add up, by sketches, to what their optimizers get; where they do not, who is named."""

from __future__ import annotations

import json
import textwrap
from typing import Any

import numpy as np
import pytest
import torch
from support.ranks import run_ranks

from fp8watch.session.gradient_sample import SAMPLE
from fp8watch.session.gradient_sketch import only_finite, sketches
from fp8watch_agent.update_names import GRADIENT_GIVEN, GRADIENT_GOT, GRADIENT_OF, SKETCH_NUMBERS
from fp8watch_server.detect.modes.silent_data_corruption.gradient_sums import APART, Verdict, judge

STEPS, AT = 24, 12
SCRIPT = textwrap.dedent(
    """
    import contextlib, json, sys, torch, torch.distributed as dist, fp8watch
    from torch.nn.parallel import DistributedDataParallel as DDP
    way, steps, at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    watch = fp8watch.attach(model)
    told, step = [], 0
    record = watch._recorder.record_step
    watch._recorder.record_step = lambda header, ids, rows, logs, *rest, **more: (told.append(dict(logs)), record(header, ids, rows, logs, *rest, **more))
    ddp = DDP(model, gradient_as_bucket_view=way == "views")
    def hook(_, bucket):
        mine = bucket.buffer()
        if step >= at and rank == 1 and way == "missing":
            mine = torch.zeros_like(mine)
        if step >= at and rank == 1 and way == "twice":
            mine = 2 * mine
        if way == "bf16":
            mine = mine.bfloat16().float()
        return dist.all_reduce(mine / world, async_op=True).get_future().then(lambda f: f.value()[0])
    if way in ("missing", "twice", "bf16"):
        ddp.register_comm_hook(None, hook)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(rank)
    for step in range(steps):
        opt.zero_grad(set_to_none=way != "views")
        for micro in range(3 if way in ("micro", "each") else 1):
            alone = way == "micro" and micro < 2 or way == "own" and step >= at
            with ddp.no_sync() if alone else contextlib.nullcontext():
                ddp(torch.randn(128, 64)).pow(2).mean().backward()
        if way == "norm":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        if way == "values":
            torch.nn.utils.clip_grad_value_(model.parameters(), 1e-5)
        if way == "one" and step >= at and rank == 1:
            model[0].weight.grad[::2] *= 3
            model[2].weight.grad[::2] *= 3
        opt.step()
    print("TOLD", json.dumps(told))
    print("ERRORS", sum(watch.guard.errors.values()))
    watch.detach()
    dist.destroy_process_group()
    """
)


def told_of(tmp_path: Any, way: str, world: int = 2) -> list[tuple[int, str, Verdict | None]]:
    """Step, parameter and verdict of each sketch that all ranks have."""
    outs = run_ranks(tmp_path, SCRIPT, way, str(STEPS), str(AT), world=world)
    assert all("ERRORS 0" in out for out in outs)
    ranks = [json.loads(next(line for line in out.splitlines() if line.startswith("TOLD"))[5:]) for out in outs]
    found = []
    for step, logs in enumerate(zip(*ranks, strict=True)):
        names = [{n for n in of if n.startswith(GRADIENT_OF)} for of in logs]
        assert all(of == names[0] for of in names), "the same parameter in the same step"
        for name in names[0]:
            assert {of[name] for of in logs} == {world}
            given, got = (
                np.array([[of[f"{what}{k}"] for k in range(SKETCH_NUMBERS)] for of in logs])
                for what in (GRADIENT_GIVEN, GRADIENT_GOT)
            )
            found.append((step, name.removeprefix(GRADIENT_OF), judge(tuple(range(world)), given, got)))
    return found


@pytest.mark.parametrize("way", ["plain", "views", "bf16", "micro", "each", "norm"])
def test_what_is_reduced_adds_up(tmp_path: Any, way: str) -> None:
    found = told_of(tmp_path, way)
    assert len(found) >= STEPS // 4 - 1
    assert len({name for _, name, _ in found}) == 4, "each parameter has its turn"
    assert all(verdict is None for *_, verdict in found)


def test_values_that_are_clipped_one_by_one_say_nothing(tmp_path: Any) -> None:
    assert told_of(tmp_path, "values") == []


@pytest.mark.parametrize(("way", "ranks"), [("missing", (1,)), ("twice", (1,)), ("own", ()), ("one", (1,))])
def test_a_reduction_that_breaks_is_told_with_its_process(tmp_path: Any, way: str, ranks: tuple[int, ...]) -> None:
    found = told_of(tmp_path, way, world=2 if way == "own" else 3)
    before = [verdict for step, _, verdict in found if step < AT]
    since = [(name, verdict) for step, name, verdict in found if step >= AT]
    assert before
    assert all(verdict is None for verdict in before)
    assert since
    wrong = [verdict for name, verdict in since if way != "one" or name.endswith("weight")]
    assert wrong
    for verdict in wrong:
        assert verdict is not None
        assert (verdict.how, verdict.ranks) == (way, ranks)
        assert verdict.apart > APART


def test_sketches_are_linear_and_say_nothing_of_what_is_not_finite() -> None:
    a, b = torch.randn(2, 16, SAMPLE // 16)
    numbers = [{k: float(v) for k, v in sketches("w", part, a + b, 2).items()} for part in (a, b)]
    given, got = (
        [[of[f"{what}{k}"] for k in range(SKETCH_NUMBERS)] for of in numbers] for what in (GRADIENT_GIVEN, GRADIENT_GOT)
    )
    assert np.sum(given, axis=0) == pytest.approx(got[0], rel=1e-4, abs=1e-3)
    only_finite(numbers[0])
    assert len(numbers[0]) == 1 + 2 * SKETCH_NUMBERS
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = {k: float(v) for k, v in sketches("w", a, a + b, 2).items()}
    assert again == numbers[0]
    a[3, 5] = torch.inf
    broken = {k: float(v) for k, v in sketches("w", a, a, 2).items()} | {"loss": 1.0}
    only_finite(broken)
    assert broken == {"loss": 1.0}
