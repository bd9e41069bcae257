"""Experts that FSDP2 shards or DDP replicates, attached before and after it: observed in full, and no number changes; in FP8 they
compute what they compute alone."""

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


IN_FP8 = textwrap.dedent(
    """
    import sys, torch, torch.distributed as dist, fp8watch.session.start
    sys.path.insert(0, sys.argv[1])
    from attach.conftest import Kept
    from support import sharded_experts
    from support.own_models import Moe
    from torch.utils.checkpoint import checkpoint
    fp8watch.session.start.Recorder = Kept
    dist.init_process_group("gloo")

    class Checkpointed(Moe):
        def __init__(self, checkpointed):
            super().__init__()
            self.experts.up_bias, self.checkpointed = None, checkpointed

        def forward(self, x):
            if not self.checkpointed:
                return super().forward(x.requires_grad_())
            ids = torch.arange(len(x)) * 7 % 3
            y = checkpoint(lambda y: self.experts(self.first(y), ids), x.requires_grad_(), use_reentrant=False)
            return self.last(y).pow(2).mean()

    def loss(model, batch):
        return model(torch.randn(32, 64, generator=torch.Generator().manual_seed(10 * batch[0] + batch[1])))

    subject = sharded_experts.Subject(Checkpointed, loss, lambda model: [model.experts])
    print("RESULT", sharded_experts.compare(subject, sys.argv[2], sys.argv[3], before=sys.argv[4] == "before"), flush=True)
    dist.destroy_process_group()
    """
)


@pytest.mark.parametrize(
    ("how", "recipe", "order"),
    [("fsdp", "blockwise", "after"), ("fsdp", "mxfp8", "before"), ("ddp", "blockwise", "before")],
)
def test_experts_in_fp8_compute_on_ranks_what_they_compute_alone(tmp_path, how, recipe, order):
    for out in run_ranks(tmp_path, IN_FP8, str(Path(__file__).parents[1]), how, recipe, order):
        (line,) = [line for line in out.splitlines() if line.startswith("RESULT")]
        assert (
            line == "RESULT {'losses': True, 'experts in FP8': True, 'experts': True, 'statistics': True, 'told': True}"
        )
