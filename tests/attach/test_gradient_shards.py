"""Gradients that FSDP2 leaves in parts add up, by sketches of one part, to what its holder gets; where they do not, who is named."""

from __future__ import annotations

import json
import textwrap
from typing import Any

import numpy as np
import pytest
from support.ranks import run_ranks

from fp8watch_agent.update_names import GRADIENT_GIVEN, GRADIENT_GOT, GRADIENT_OF, GROUP, SKETCH_NUMBERS
from fp8watch_server.detect.modes.silent_data_corruption.gradient_sums import APART, Verdict, judge

STEPS, AT = 32, 16
SCRIPT = textwrap.dedent(
    """
    import json, sys, torch, torch.distributed as dist, fp8watch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.utils.checkpoint import checkpoint
    way, steps, at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo")
    rank, world, step = dist.get_rank(), dist.get_world_size(), 0
    hidden = 252 if way.startswith("tensor") else 255
    torch.manual_seed(0)
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(64, hidden), torch.nn.Linear(hidden, 64)
        def forward(self, x):
            if way == "checkpointed":
                return self.down(checkpoint(lambda y: self.up(y).relu(), x, use_reentrant=False))
            return self.down(self.up(x).relu())
    model = Model()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")) if way == "hsdp" else init_device_mesh("cpu", (world,))
    if beside := way in ("tensor parallel", "tensor parallel broken", "stages"):
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        mesh = both["dp"]
        if way != "stages":
            parallelize_module(model, both["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    how = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if way == "bf16" else {}
    for part in (model.up, model.down, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=way != "whole", **how)
    watch = fp8watch.attach(model)
    told, record = [], watch._recorder.record_step
    watch._recorder.record_step = lambda header, ids, rows, logs, *rest, **more: (told.append(dict(logs)), record(header, ids, rows, logs, *rest, **more))
    name = next(n for n in ("reduce_scatter_single", "reduce_scatter_tensor") if hasattr(dist, n))  # of torch 2.13, and before
    reduce_scatter = getattr(dist, name)
    def broken(output, input, *rest, **more):
        if step >= at and way == "alone":
            output.copy_(input.chunk(world)[rank] / world)
            return None
        if step >= at and rank == 1 and way in ("missing", "twice", "tensor parallel broken"):
            input = input * (2 if way == "twice" else 0)
        done = reduce_scatter(output, input, *rest, **more)
        if step >= at and rank == 1 and way == "apart":
            output.add_(torch.randn_like(output) * output.abs().max())
        return done
    setattr(dist, name, broken)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(rank // 2 if beside else rank)
    for step in range(steps):
        opt.zero_grad(set_to_none=way != "zeros")
        for micro in range(3 if way in ("micro", "each") else 1):
            if way == "micro":
                model.set_requires_gradient_sync(micro == 2)
            model(torch.randn(128, 64)).pow(2).mean().backward()
        if way == "norm":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        if way == "left-out" and step % 4:  # as a loss scaler does
            continue
        opt.step()
    print("TOLD", json.dumps(told))
    print("ERRORS", sum(watch.guard.errors.values()))
    watch.detach()
    dist.destroy_process_group()
    """
)


def told_of(
    tmp_path: Any, way: str, world: int = 2, groups: tuple[tuple[int, ...], ...] = ()
) -> list[tuple[int, str, tuple[int, ...], Verdict | None]]:
    """Step, parameter, who holds the part and the verdict of each sketch that all ranks of a group have, all of them one group if none
    is given."""
    outs = run_ranks(tmp_path, SCRIPT, way, str(STEPS), str(AT), world=world)
    assert all("ERRORS 0" in out for out in outs), outs
    ranks = [json.loads(next(line for line in out.splitlines() if line.startswith("TOLD"))[5:]) for out in outs]
    found = []
    for group in groups or (tuple(range(world)),):
        for step, logs in enumerate(zip(*(ranks[rank] for rank in group), strict=True)):
            names = [{n for n in of if n.startswith(GRADIENT_OF)} for of in logs]
            assert all(of == names[0] for of in names), "the same parameter in the same step"
            for name in names[0]:
                assert {of[name] for of in logs} == {len(group)}
                assert name.endswith(f"{GROUP}{group[0]}") is bool(groups)
                holders = tuple(i for i, of in enumerate(logs) if f"{GRADIENT_GOT}0" in of)
                given = np.array([[of[f"{GRADIENT_GIVEN}{k}"] for k in range(SKETCH_NUMBERS)] for of in logs])
                got = np.array([[logs[i][f"{GRADIENT_GOT}{k}"] for k in range(SKETCH_NUMBERS)] for i in holders])
                verdict = judge(group, given, got, holders=holders)
                found.append((step, name.removeprefix(GRADIENT_OF), tuple(group[i] for i in holders), verdict))
    return found


@pytest.mark.parametrize(
    "way", ["plain", "whole", "bf16", "micro", "each", "zeros", "norm", "checkpointed", "left-out"]
)
def test_what_is_scattered_adds_up(tmp_path: Any, way: str) -> None:
    found = told_of(tmp_path, way)
    assert len(found) >= STEPS // 4 - 1 - (6 if way == "left-out" else 0)
    if way != "left-out":
        assert len({(name, holders) for _, name, holders, _ in found}) >= 6, "parameters and parts have their turns"
    assert all(len(holders) == 1 for *_, holders, _ in found)
    assert [verdict for *_, verdict in found if verdict is not None] == []


def test_copies_of_a_part_are_all_held_against_the_sum(tmp_path: Any) -> None:
    found = told_of(tmp_path, "hsdp", world=4)
    assert {holders for *_, holders, _ in found} == {(0, 2), (1, 3)}
    assert [verdict for *_, verdict in found if verdict is not None] == []


@pytest.mark.parametrize("way", ["tensor parallel", "stages"])
def test_what_is_scattered_among_some_processes_adds_up_among_these(tmp_path: Any, way: str) -> None:
    """Beside tensor parallelism each rank has its part of a weight, and shares its gradients with those that hold the same part."""
    found = told_of(tmp_path, way, world=4, groups=((0, 2), (1, 3)))
    parameters = {name.rpartition(GROUP)[0] for _, name, *_ in found}
    assert parameters == {"up.weight", "up.bias", "down.weight", "down.bias"}
    assert {holders for *_, holders, _ in found} == {(0,), (1,), (2,), (3,)}
    assert [verdict for *_, verdict in found if verdict is not None] == []


def test_a_rank_that_is_missing_among_some_processes_is_told(tmp_path: Any) -> None:
    found = told_of(tmp_path, "tensor parallel broken", world=4, groups=((0, 2), (1, 3)))
    wrong = [(step, name, verdict) for step, name, _, verdict in found if verdict is not None]
    assert wrong
    assert all(name.endswith(f"{GROUP}1") and step >= AT for step, name, _ in wrong)
    assert {(verdict.how, verdict.ranks) for *_, verdict in wrong} <= {("missing", (1,)), ("alone", (3,))}


def test_one_process_alone_says_nothing_that_nobody_could_judge(tmp_path: Any) -> None:
    assert told_of(tmp_path, "plain", world=1) == []


@pytest.mark.parametrize("way", ["missing", "twice", "alone", "apart"])
def test_a_reduction_that_breaks_is_told_with_its_process(tmp_path: Any, way: str) -> None:
    found = told_of(tmp_path, way, world=3)
    before = [verdict for step, *_, verdict in found if step < AT]
    since = [
        (holders, verdict) for step, _, holders, verdict in found if step >= AT and (way != "apart" or holders == (1,))
    ]
    assert before
    assert all(verdict is None for verdict in before)
    assert since
    for holders, verdict in since:
        assert verdict is not None
        assert verdict.how == way
        assert verdict.ranks == {"alone": holders, "apart": ()}.get(way, (1,))
        assert verdict.apart > APART
