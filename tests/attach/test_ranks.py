"""Two ranks make one run, and DDP does not notice."""

from __future__ import annotations

import textwrap
import warnings

import pytest
from support.ranks import run_ranks

from fp8watch.session.identity import identify

SCRIPT = textwrap.dedent(
    """
    import sys, torch, torch.distributed as dist, fp8watch
    from torch.nn.parallel import DistributedDataParallel as DDP
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    watch = fp8watch.attach(model)
    ddp = DDP(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        opt.zero_grad()
        ddp(torch.randn(16, 64)).pow(2).mean().backward()
        opt.step()
    s = watch.summary()
    print("RESULT", s["run_id"], s["session"], s["rank"], s["num_steps"], float(model[0].weight.sum()))
    watch.detach()
    dist.destroy_process_group()
    """
)


FSDP_SCRIPT = textwrap.dedent(
    """
    import sys, torch, torch.distributed as dist, fp8watch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    order = sys.argv[1]
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    mesh = init_device_mesh("cpu", (2,))
    def shard():
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    if order == "before":
        shard()
    watch = fp8watch.attach(model)
    if order == "after":
        shard()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    def train():
        for _ in range(3):
            opt.zero_grad()
            model(torch.randn(16, 64)).pow(2).mean().backward()
            opt.step()
        return watch.summary()["num_sites"], watch.summary()["num_steps"], sum(watch.guard.errors.values())
    print("RESULT", *train(), flush=True)
    watch.detach()
    watch = fp8watch.attach(model)
    print("RESULT", *train(), flush=True)
    watch.detach()
    dist.destroy_process_group()
    """
)


@pytest.mark.parametrize("order", ["before", "after"])
def test_fsdp2_shards_before_or_after_attach(tmp_path, order):
    for out in run_ranks(tmp_path, FSDP_SCRIPT, order):
        assert [line for line in out.splitlines() if line.startswith("RESULT")] == ["RESULT 10 3 0"] * 2


def test_two_ranks_are_one_run(tmp_path):
    outputs = run_ranks(tmp_path, SCRIPT)
    results = [next(line for line in out.splitlines() if line.startswith("RESULT")).split() for out in outputs]
    (run_a, session_a, rank_a, steps_a, sum_a), (run_b, session_b, rank_b, steps_b, sum_b) = (r[1:] for r in results)
    assert run_a == run_b
    assert session_a != session_b
    assert {rank_a, rank_b} == {"0", "1"}
    assert steps_a == steps_b == "3"
    assert sum_a == sum_b


def test_the_launchers_id_comes_first():
    assert identify({"FP8WATCH_RUN": "mine", "SLURM_JOB_ID": "7"}).run_id == "mine"
    assert identify({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "7"}).run_id == "7"
    local = identify({})
    assert (local.source, local.rank, local.world_size) == ("local", 0, 1)


def test_many_ranks_without_a_common_id_warn_once():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        identify({"RANK": "1", "WORLD_SIZE": "4"})
    assert len(seen) == 1
    with pytest.raises(ValueError, match="FP8WATCH_RUN"):
        identify({"FP8WATCH_RUN": "a/b"})


PARALLEL_SCRIPT = textwrap.dedent(
    """
    import copy, sys, torch, torch.distributed as dist, fp8watch
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.parallel import DistributedDataParallel as DDP
    how = sys.argv[1]
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 32))
    models = {name: copy.deepcopy(plain) for name in ("by hand", how)}
    watches = [fp8watch.attach(m, overhead_budget=None) for m in models.values()]
    run = dict(models)
    if how == "ddp":
        run[how] = DDP(models[how])
    else:
        fully_shard(models[how], mesh=init_device_mesh("cpu", (2,)))
    if how == "fsdp2 compiled":
        run[how] = torch.compile(models[how], backend="aot_eager")
    torch.manual_seed(1 + dist.get_rank())
    data = [torch.randn(48, 64) for _ in range(6)]
    for name, model in models.items():
        opt = torch.optim.SGD(model.parameters(), lr=0.05)
        for first, second in zip(data[::2], data[1::2]):
            opt.zero_grad()
            for x in (first, second):  # gradient accumulation
                run[name](x).square().mean().backward()
            if name == "by hand":
                for p in model.parameters():
                    dist.all_reduce(p.grad)
                    p.grad /= 2
            opt.step()
    def weights(m):
        return torch.cat([(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().flatten() for p in m.parameters()])
    want = weights(models["by hand"])
    moved = float((want - torch.cat([p.detach().flatten() for p in plain.parameters()])).abs().max())
    off = {n: float((weights(m) - want).abs().max()) for n, m in models.items()}
    calls = [int(w.summary()["num_steps"]) for w in watches], sum(sum(w.guard.errors.values()) for w in watches)
    print("RESULT", moved > 1e-3, all(v < 1e-6 for v in off.values()), *calls, off, flush=True)
    for w in watches:
        w.detach()
    dist.destroy_process_group()
    """
)


@pytest.mark.parametrize("how", ["ddp", "fsdp2", "fsdp2 compiled"])
def test_parallel_training_gives_the_weights_of_training_by_hand(tmp_path, how):
    for out in run_ranks(tmp_path, PARALLEL_SCRIPT, how):
        (line,) = [line for line in out.splitlines() if line.startswith("RESULT")]
        assert line.startswith("RESULT True True [3, 3] 0"), line


def test_the_launchers_restarts_are_a_fact_of_the_session(attach, mlp, monkeypatch):
    assert "restart_count" not in attach(mlp)._recorder.session.facts
    for value, fact in (("3", 3), ("three", None)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", value)
        assert attach(mlp.__class__())._recorder.session.facts.get("restart_count") == fact


FSDP1_COVERAGE = textwrap.dedent(
    """
    import torch, torch.distributed as dist, fp8watch
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from fp8watch.selection.flop_coverage import coverage
    from fp8watch.selection.wrappers import named_modules
    dist.init_process_group("gloo")
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.norm, self.down = nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 64)
    def plain():
        return nn.Sequential(Block(), Block(), nn.Conv1d(16, 32, 3), nn.Linear(64, 64))
    def sharded(original):
        policy = ModuleWrapPolicy({Block})
        return FSDP(plain(), auto_wrap_policy=policy, use_orig_params=original, device_id=torch.device("cpu"))
    for model in (plain(), sharded(True), sharded(False)):
        watch = fp8watch.attach(model)
        facts = watch._recorder._session.facts
        blocks = coverage(list(named_modules(model)), [m for m in model.modules() if isinstance(m, Block)])
        print(facts["gemm_flops_observed"], facts["not_taken"], round(blocks.observed, 4))
        watch.detach()
    dist.destroy_process_group()
    """
)


def test_what_fsdp1_has_sharded_counts_by_its_full_shape(tmp_path):
    for out in run_ranks(tmp_path, FSDP1_COVERAGE):
        plain, sharded, flat = out.splitlines()
        assert plain == "0.96 2 (Conv1d [32, 16, 3], 4 %) 0.8533"
        assert sharded == plain
        assert flat.startswith("1.0 ")  # the convolution has no parameter there: nothing is known of it
