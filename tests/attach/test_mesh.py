"""Where a rank stands in the mesh, from what the training has set up."""

from __future__ import annotations

import sys
import textwrap
from types import SimpleNamespace

import pytest
from support.ranks import run_ranks
from torch import nn

from fp8watch.session.mesh import mesh_coordinates


def test_a_single_process_knows_nothing(attach, mlp):
    assert mesh_coordinates(mlp) == {}
    assert attach(mlp)._recorder.session.mesh == {}


def test_megatron_tells_where_it_is_initialised(attach, mlp, monkeypatch):
    state = SimpleNamespace(
        model_parallel_is_initialized=lambda: True,
        get_data_parallel_rank=lambda: 3,
        get_tensor_model_parallel_rank=lambda: 1,
        get_pipeline_model_parallel_rank=lambda: 2,
        get_expert_model_parallel_rank=lambda: 0,
    )  # of a version without context parallelism
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    assert attach(mlp)._recorder.session.mesh == {"dp": 3, "tp": 1, "pp": 2, "ep": 0}
    state.model_parallel_is_initialized = lambda: False
    assert mesh_coordinates(nn.Linear(2, 2)) == {}


def test_a_mesh_that_cannot_be_read_costs_the_mesh_only(attach, mlp, monkeypatch, train):
    broken = SimpleNamespace(model_parallel_is_initialized=lambda: 1 / 0)
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", broken)
    watch = attach(mlp)
    assert watch._recorder.session.mesh == {}
    assert watch.guard.errors == {"mesh": 1}
    train(mlp, steps=1)


SCRIPT = textwrap.dedent(
    """
    import copy, torch, torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor, Replicate, Shard
    from torch.nn.parallel import DistributedDataParallel as DDP
    from fp8watch.session.mesh import mesh_coordinates
    dist.init_process_group("gloo")
    calls = []
    for name in ("all_reduce", "all_gather", "broadcast", "barrier", "all_gather_object", "all_gather_into_tensor"):
        def counted(*a, _f=getattr(dist, name), _n=name, **k):
            calls.append(_n)
            return _f(*a, **k)
        setattr(dist, name, counted)
    def plain():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    names = ("fsdp2", "hsdp", "tp", "fsdp2+tp", "other hsdp", "unnamed tp", "unnamed both", "other names", "copies")
    models = {"ddp": DDP(plain()), **{name: plain() for name in names}}
    fully_shard(models["fsdp2"], mesh=init_device_mesh("cpu", (4,)))
    fully_shard(models["hsdp"], mesh=hybrid)
    fully_shard(models["other hsdp"], mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner")))
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "cols"))
    for name, number, mesh, *placements in (
        ("tp", 0, grid["tp"], Shard(0)), ("fsdp2+tp", 0, grid["tp"], Shard(0)), ("unnamed tp", 0, line, Replicate()),
        ("unnamed tp", 1, line, Shard(1)), ("unnamed both", 0, square, Replicate(), Shard(0)),
        ("other names", 0, other["cols"], Shard(0)), ("copies", 0, line, Replicate()),
    ):
        weight = models[name][number].weight
        models[name][number].weight = torch.nn.Parameter(distribute_tensor(weight.data, mesh, placements))
    fully_shard(models["other names"], mesh=other["rows"])
    fully_shard(models["fsdp2+tp"], mesh=grid["dp"])
    calls.clear()
    found = {name: mesh_coordinates(m) for name, m in models.items()}
    print(sorted((n, sorted(c.items())) for n, c in found.items()), calls)
    dist.destroy_process_group()
    """
)


@pytest.mark.long
def test_four_ranks_find_their_coordinates_without_a_collective(tmp_path):
    for rank, out in enumerate(run_ranks(tmp_path, SCRIPT, world=4)):
        dp, tp = divmod(rank, 2)
        both = [("dp", dp), ("tp", tp)]
        want = {name: [("dp", rank)] for name in ("ddp", "fsdp2", "hsdp", "other hsdp", "copies")}
        want |= {"tp": both, "fsdp2+tp": both, "unnamed both": both, "other names": both}
        want["unnamed tp"] = [("tp", rank)]  # along which one weight is sharded, though another is not
        assert out.strip() == f"{sorted(want.items())} []"


HASHES = textwrap.dedent(
    """
    import copy, torch, torch.distributed as dist, fp8watch, fp8watch.session.start as start
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel as DDP
    from fp8watch_agent.record import Measured
    class Kept:
        def __init__(self, settings, session, guard): self.session, self.steps = session, []
        def record_step(self, step, ids, rows, *_):
            self.steps.append([int(r["weight_hash"]) for r in rows if int(r["measured"]) & Measured.HASH])
        def __getattr__(self, name): return lambda *a, **k: frozenset()
    start.Recorder = Kept
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    models = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))]
    models += [copy.deepcopy(models[0]) for _ in range(2)]
    watches = [fp8watch.attach(m, hash_every=2, overhead_budget=None) for m in models]
    runs = [DDP(models[0]), models[1], models[2]]
    fully_shard(models[1], mesh=init_device_mesh("cpu", (2,)))
    fully_shard(models[2][0], mesh=init_device_mesh("cpu", (2,)))
    fully_shard(models[2], mesh=init_device_mesh("cpu", (2,)))
    torch.manual_seed(dist.get_rank())
    data = [torch.randn(16, 64) for _ in range(3)]
    for run in runs:
        opt = torch.optim.SGD(run.parameters(), lr=0.1)
        for x in data:
            opt.zero_grad()
            run(x).square().mean().backward()
            opt.step()
    print([w._recorder.steps for w in watches], sum(sum(w.guard.errors.values()) for w in watches))
    dist.destroy_process_group()
    """
)


def test_replicas_hash_alike_under_ddp_and_as_gathered_under_fsdp2(tmp_path):
    first, second = run_ranks(tmp_path, HASHES)
    assert first == second  # the same bits on both ranks, although a shard is not the other's
    kept, errors = eval(first.strip().replace("] 0", "], 0"))
    assert errors == 0
    for steps in kept:
        assert [len(s) for s in steps] == [2, 1, 1], "all in the first step, then one after the other"
        assert steps[0][0] != steps[2][0]
        assert steps[0][1] != steps[1][0]
    assert kept[0][0] == kept[1][0] == kept[2][0]
