"""Stages of torch's pipelining: what they run to learn shapes is no training."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from support.ranks import run_ranks

SCRIPT = textwrap.dedent(
    """
    import math, os, sys, torch, torch.distributed as dist, torch.nn.functional as F, fp8watch.session.start
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    from torch.distributed.pipelining.stage import PipelineStage as Stage
    sys.path.insert(0, sys.argv[2])
    from attach.conftest import Kept
    fp8watch.session.start.Recorder = Kept
    original = Stage._prepare_forward_infra, Stage._prepare_backward_infra
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    empty, memory = torch.empty_strided, [0.0, 0.0]
    def filled(*args, **kwargs):  # as memory may be that nothing was written into
        made = empty(*args, **kwargs).fill_(memory[0])
        made.view(-1)[:1] = memory[1]
        return made

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.norm = nn.Linear(32, 32), nn.LayerNorm(32)
        def forward(self, x):
            return self.norm(torch.relu(self.up(x)))

    def run(recipe):
        torch.manual_seed(rank)
        model = Part()
        watch = fp8watch.attach(model, recipe=recipe, overhead_budget=None) if recipe else None
        stage = PipelineStage(model, rank, 2, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, 2, loss_fn=lambda y, t: F.cross_entropy(y, t))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(7)
        found = []
        for step in range(4):
            x, t = torch.randn(64, 32), torch.randint(32, (64,))
            optimizer.zero_grad()
            losses = []
            given = (dict(target=t, losses=losses) if rank else {}), (() if rank else (x,))
            torch.empty_strided = filled
            schedule.step(*given[1], **given[0])
            if step == 1:
                model.eval()
                with torch.no_grad():
                    schedule.eval(*given[1], **({"target": t} if rank else {}))
                model.train()
            torch.empty_strided = empty
            optimizer.step()
            found += [float(loss.detach()) for loss in losses]
        return found, watch, [p.detach().clone() for p in model.parameters()]

    alone, clean, plain = run("" if sys.argv[1] == "observe" else sys.argv[1])
    if clean:
        clean.detach()
    memory[:] = 1e30, math.nan
    found, watch, weights = run(sys.argv[1])
    same = alone == found and all(map(torch.equal, plain, weights))
    kept = watch._recorder
    rows = [kept.step(n)[1] for n in range(4)]
    nan = sum(int(row["num_nan"]) for step in rows for row in step.values())
    read = (("up", "input"), ("up", "grad_output"))
    calls = {int(row["num_elements"]) for step in rows for at, row in step.items() if at[:2] in read}
    watch.detach()
    back = original == (Stage._prepare_forward_infra, Stage._prepare_backward_infra)
    print("RESULT", same, len(kept.steps), nan, calls, back, watch.summary()["internal_errors"], flush=True)
    dist.destroy_process_group()
    """
)


@pytest.mark.parametrize("recipe", ["observe", "blockwise", "delayed"])
def test_what_stages_run_for_shapes_is_not_observed_and_no_scale_remembers_it(tmp_path, recipe):
    for out in run_ranks(tmp_path, SCRIPT, recipe, str(Path(__file__).parents[1])):
        (line,) = [line for line in out.splitlines() if line.startswith("RESULT")]
        assert line == f"RESULT True 4 0 {{{64 * 32}}} True {{}}"
