"""Experts that FSDP2 shards, attached before and after it: observed in full, and no number changes."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from support.ranks import run_ranks

SCRIPT = textwrap.dedent(
    """
    import sys, torch, torch.distributed as dist, fp8watch
    sys.path.insert(0, sys.argv[2])
    from support.own_models import Moe
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.device_mesh import init_device_mesh
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))

    def run(order):
        torch.manual_seed(0)
        model, watch = Moe(), None
        if order == "before":
            watch = fp8watch.attach(model, recipe="observe", overhead_budget=None)
        fully_shard(model.experts, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if order == "after":
            watch = fp8watch.attach(model, recipe="observe", overhead_budget=None)
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        torch.manual_seed(1 + dist.get_rank())
        for _ in range(3):
            loss = model(torch.randn(32, 64))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses, watch

    alone, _ = run("")
    losses, watch = run(sys.argv[1])
    rows = watch._flush.registration._registered
    seen = {watch._table[row].fqn for row in rows if watch._table[row].operand == "weight"}
    print("RESULT", losses == alone, watch.summary()["num_steps"], watch.summary()["internal_errors"], sorted(seen), flush=True)
    watch.detach()
    dist.destroy_process_group()
    """
)


@pytest.mark.parametrize("order", ["before", "after"])
def test_sharded_experts_are_observed_and_no_number_changes(tmp_path, order):
    for out in run_ranks(tmp_path, SCRIPT, order, str(Path(__file__).parents[1])):
        (line,) = [line for line in out.splitlines() if line.startswith("RESULT")]
        assert line == "RESULT True 3 {} ['experts.down', 'experts.up', 'first', 'last']"
