"""Recipes with a state of their own under DDP and FSDP2: two ranks, and the numbers of the model alone."""

from __future__ import annotations

import textwrap

import pytest
from support.ranks import run_ranks

SCRIPT = textwrap.dedent(
    """
    import copy, sys, torch, torch.distributed as dist, fp8watch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel as DDP
    kind, recipe = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    alone = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    model = copy.deepcopy(alone)
    ranks = model
    if kind == "fsdp":
        for part in (model[0], model):
            fully_shard(part, mesh=init_device_mesh("cpu", (2,)))
    watches = [fp8watch.attach(m, recipe=recipe, overhead_budget=None) for m in (alone, model)]
    if kind == "ddp":
        ranks = DDP(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, model)]
    for step in range(4):
        x = torch.randn(16, 64)  # the same on both ranks: the mean of the gradients is the gradient
        losses = []
        for call, optimizer in zip((alone, ranks), optimizers):
            optimizer.zero_grad()
            loss = call(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[0] == losses[1], (step, losses)
    a, b = (w.state_dict().get("amax_histories", {}) for w in watches)
    assert a.keys() == b.keys() and bool(a) == (recipe == "delayed")
    assert all(torch.equal(a[n][k], b[n][k]) for n in a for k in a[n])
    errors = [dict(w.guard.errors) for w in watches]
    assert errors == [{}, {}], errors
    for w in watches:
        w.detach()
    print("RESULT", watches[1].summary()["num_steps"])
    dist.destroy_process_group()
    """
)


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [("ddp", "delayed"), ("fsdp", "delayed"), pytest.param("fsdp", "mxfp8", marks=pytest.mark.long)],
)
def test_ranks_compute_what_the_model_alone_computes(tmp_path, kind, recipe):
    for out in run_ranks(tmp_path, SCRIPT, kind, recipe):
        assert "RESULT 4" in out
