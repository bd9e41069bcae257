"""nn.DataParallel: its replicas run as without us, and that they are not observed is said."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict

import pytest
import torch
from attach.linears_and_experts import Model
from torch import nn

from fp8watch.layers.moved_linear import DEVICE_KEY, REPLICATED_KEY

NUM_REPLICAS, STEPS = 2, 4


def replicas_of(model):
    """What torch.nn.parallel.replicate makes of a model, which asks for GPUs."""
    found = []
    for _ in range(NUM_REPLICAS):
        made = {module: module._replicate_for_data_parallel() for module in model.modules()}
        for module, replica in made.items():
            replica._former_parameters = OrderedDict()
            for name, child in module._modules.items():
                setattr(replica, name, made[child])
            for name, parameter in module._parameters.items():
                setattr(replica, name, parameter.clone())
        found.append(made[model])
    return found


def trained(model):
    torch.manual_seed(1)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(STEPS):
        outputs = [torch.empty(())] * NUM_REPLICAS

        def run(i, replica, x, outputs=outputs):
            outputs[i] = replica(x)

        parts = zip(replicas_of(model), torch.randn(64, 64).chunk(NUM_REPLICAS), strict=True)
        threads = [threading.Thread(target=run, args=(i, *part)) for i, part in enumerate(parts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        loss = torch.stack(outputs).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("recipe", ["observe", "blockwise"])
def test_replicas_run_as_without_us_and_are_told_as_not_observed(attach, capsys, recipe):
    torch.manual_seed(0)
    model = Model()
    expected = trained(copy.deepcopy(model))
    watch = attach(model, recipe=recipe, every=1)
    assert trained(model) == expected
    summary = watch.summary()
    assert (summary["num_steps"], summary["internal_errors"]) == (STEPS, {})
    [line] = [line for line in capsys.readouterr().err.splitlines() if "not observed: " in line]
    assert line.count("run by nn.DataParallel: replicas are not observed, and nothing in them is in FP8") == 3
    watch.detach()
    assert not any({DEVICE_KEY, REPLICATED_KEY} & set(module.__dict__) for module in model.modules())


def test_without_replicas_nothing_is_said_of_them(attach, capsys):
    model = Model()
    attach(model, recipe="observe", every=1)
    model(torch.randn(32, 64)).backward()
    assert "DataParallel" not in capsys.readouterr().err
    assert not any(REPLICATED_KEY in module.__dict__ for module in model.modules())


def test_a_replica_of_a_linear_is_the_linear_before(attach):
    model = nn.Sequential(nn.Linear(64, 64))
    before = copy.deepcopy(model)
    attach(model, recipe="blockwise")
    x = torch.randn(32, 64)
    assert not torch.equal(model(x), before(x))
    for replica in replicas_of(model):
        assert torch.equal(replica(x), before(x))
