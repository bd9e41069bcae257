"""Tensor parallelism that comes behind attach, and numbers that are spread over ranks: nothing raises, nothing is waited for."""

from __future__ import annotations

import json
import textwrap

import pytest
from support.ranks import run_ranks

LATER = textwrap.dedent(
    """
    import json, sys, torch, torch.distributed as dist, fp8watch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))

    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down, self.last = nn.Linear(64, 96), Own(96, 64), nn.Linear(64, 64)

        def forward(self, x):
            return self.last(self.down(torch.relu(self.up(x)))).pow(2).mean()

    facts = {}

    def run(recipe):
        torch.manual_seed(0)
        model, watch = Mlp(), None
        if recipe:
            watch = fp8watch.attach(model, recipe=recipe, filter_fn=lambda _, fqn: fqn != "last", overhead_budget=None)
            watch._recorder.update_facts = facts.update
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        torch.manual_seed(1)
        for _ in range(3):
            loss = model(torch.randn(32, 64))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses, watch

    alone, _ = run("")
    losses, watch = run(sys.argv[1])
    summary = watch.summary()
    print("RESULT" + json.dumps([losses == alone, summary["num_steps"], summary["internal_errors"], facts.get("silent", "")]), flush=True)
    watch.detach()
    dist.destroy_process_group()
    """
)

NUMBERS = textwrap.dedent(
    """
    import json, os, torch, torch.distributed as dist, fp8watch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32))
    watch = fp8watch.attach(model, recipe="observe", overhead_budget=None)
    optimizer, kept = torch.optim.SGD(model.parameters(), lr=1e-3), []
    record = watch._recorder.record_step
    watch._recorder.record_step = lambda step, ids, rows, logs, *rest, **more: (
        kept.append([round(float(step["grad_norm"]), 3), logs.get("whole")]), record(step, ids, rows, logs, *rest, **more))[1]
    for _ in range(3):
        model(torch.ones(8, 64)).pow(2).mean().backward()
        if os.environ["RANK"] == "0":  # as loggers do
            part = torch.tensor(3.0)
            watch.log(grad_norm=DTensor.from_local(part, mesh, [Partial()]), whole=DTensor.from_local(part, mesh, [Replicate()]))
        optimizer.step()
        optimizer.zero_grad()
    print("RESULT" + json.dumps([watch.summary()["num_steps"], watch.summary()["internal_errors"], kept]), flush=True)
    watch.detach()
    dist.destroy_process_group()
    """
)

OUTPUT = textwrap.dedent(
    """
    import json, torch, torch.distributed as dist, fp8watch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))
    parallelize_module(model, mesh, {"1": ColwiseParallel(use_local_output=False)})
    watch = fp8watch.attach(model, recipe="delayed", overhead_budget=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(3):
        out = model(torch.ones(8, 64))
        out.to_local().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    print("RESULT" + json.dumps([type(out).__name__, watch.summary()["num_steps"], watch.summary()["internal_errors"]]), flush=True)
    watch.detach()
    dist.destroy_process_group()
    """
)

GATHERED = textwrap.dedent(
    """
    import json, sys, torch, torch.distributed as dist, fp8watch
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    dist.init_process_group("gloo")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.vision, self.teacher = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
            self.teacher.eval().requires_grad_(False)

        def forward(self, x):
            return self.trunk(x).pow(2).mean()

    def shard(model):
        for part in (*model.children(), model):
            fully_shard(part)

    torch.manual_seed(0)
    model, facts = Model(), {}
    if sys.argv[1] == "before":
        shard(model)
    watch = fp8watch.attach(model, recipe="observe", overhead_budget=None)
    watch._recorder.update_facts = facts.update
    if sys.argv[1] == "after":
        shard(model)
    if sys.argv[1] == "offloaded":  # as if it computed on a GPU
        shard(model)
        model.vision.__dict__["_fp8watch_device"] = torch.device("cuda:1")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(3):
        model(torch.randn(8, 64)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    told = {name: facts.get(name, "") for name in ("silent", "not_called", "blind")}
    print("RESULT" + json.dumps([watch.summary()["num_steps"], watch.summary()["internal_errors"], told]), flush=True)
    watch.detach()
    dist.destroy_process_group()
    """
)


def results(tmp_path, script, *arguments):
    for out in run_ranks(tmp_path, script, *arguments):
        (line,) = [line for line in out.splitlines() if line.startswith("RESULT")]
        yield json.loads(line.removeprefix("RESULT"))


@pytest.mark.parametrize("recipe", ["observe", "blockwise"])
def test_what_is_sharded_behind_attach_trains_as_before_and_is_said_to_be_blind(tmp_path, recipe):
    for same, steps, errors, silent in results(tmp_path, LATER, recipe):
        assert (same, steps, errors) == (True, 3, {})
        assert (
            "up (spread over ranks by tensor parallelism since attach was called: nothing of it is observed" in silent
        )
        assert ("down (spread over ranks" in silent) == (
            recipe == "observe"
        )  # with a forward of its own it has no site in FP8


@pytest.mark.parametrize("sharded", ["before", "after", "offloaded"])
def test_what_fsdp_gathers_and_nobody_called_is_not_said_to_be_spread_by_tensor_parallelism(tmp_path, sharded):
    """Between forwards FSDP2 keeps a DTensor as well, and with an offload policy it keeps it on the CPU."""
    for steps, errors, told in results(tmp_path, GATHERED, sharded):
        assert (steps, errors) == (3, {})
        assert told["not_called"] == "vision"
        assert told["silent"].startswith("teacher (in evaluation mode and without gradients")
        assert "tensor parallelism" not in told["silent"]
        assert told["blind"] == ""


def test_a_number_of_which_each_rank_has_a_part_is_not_waited_for(tmp_path):
    first, second = results(tmp_path, NUMBERS)
    assert first[:2] == second[:2] == [3, {}]
    assert [whole for _, whole in first[2]] == [3.0] * 3
    assert [whole for _, whole in second[2]] == [None] * 3
    assert all(norm != 3.0 for norm, _ in first[2])


def test_an_output_that_is_shared_over_ranks_ends_a_forward(tmp_path):
    for kind, steps, errors in results(tmp_path, OUTPUT):
        assert (kind, steps, errors) == ("DTensor", 3, {})
