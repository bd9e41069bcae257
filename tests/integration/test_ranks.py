"""Ranks that should be alike, seen from the collector: one flipped bit on one rank is told apart from a healthy run."""

from __future__ import annotations

import json
import textwrap
import time
import urllib.request

import pytest
from support.ranks import run_ranks

from fp8watch.demo.collector import incidents, running_collector

SCRIPT = textwrap.dedent(
    """
    import sys, time, torch, torch.distributed as dist, fp8watch
    from torch.nn.parallel import DistributedDataParallel as DDP
    from fp8watch_agent.uploader import Uploader
    flip_on, wrap = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo")
    register, held_s = Uploader.register, [1.5 * dist.get_rank()]

    def in_turn(*arguments):  # the collector hears of the second rank when the first has said all its steps
        time.sleep(held_s.pop() if held_s else 0)
        return register(*arguments)

    Uploader.register = in_turn
    torch.manual_seed(0)
    linear = torch.nn.Linear
    model = torch.nn.Sequential(linear(64, 64), torch.nn.ReLU(), linear(64, 64), torch.nn.ReLU(), linear(64, 64))
    if wrap == "before":
        run = model = DDP(model)
    watch = fp8watch.attach(model, overhead_budget=None, hash_every=2)
    if wrap == "after":
        run = DDP(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    for step in range(12):
        if step == 7 and dist.get_rank() == flip_on:
            weight = [m for m in model.modules() if isinstance(m, torch.nn.Linear)][1].weight
            weight.data.view(torch.int32)[17, 42] ^= 1  # the lowest bit of one float32
        opt.zero_grad()
        run(torch.randn(32, 64)).pow(2).mean().backward()
        opt.step()
    print(watch.flush(30), sum(watch.guard.errors.values()))
    watch.detach()
    dist.destroy_process_group()
    """
)


@pytest.fixture(scope="module")
def collector(tmp_path_factory):
    with running_collector(tmp_path_factory.mktemp("collector"), 0) as url:
        yield url


def trained(tmp_path, collector, run, flip_on, wrap, world=2):
    out = run_ranks(tmp_path, SCRIPT, str(flip_on), wrap, world=world, FP8WATCH_RUN=run, FP8WATCH_COLLECTOR=collector)
    assert out == ["True 0\n"] * world
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:  # until the farewells of all ranks were judged
        with urllib.request.urlopen(f"{collector}/api/v1/runs/{run}", timeout=10) as answer:
            told = json.loads(answer.read())
        if told["status"] == "ended" and told["last_step"] == 11:
            return told
        time.sleep(0.1)
    raise AssertionError(told)


def wait_for(collector, run, timeout_s=30):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := incidents(collector, run):
            return found
        time.sleep(0.1)
    return []


@pytest.mark.parametrize("wrap", ["before", pytest.param("after", marks=pytest.mark.long)])
def test_one_flipped_weight_bit_on_one_rank_is_found(tmp_path, collector, wrap):
    """By a mesh that was declared, and by what ranks had in common before. Of two replicas nobody can say which is
    right."""
    trained(tmp_path, collector, f"flipped-{wrap}", 1, wrap)
    found = wait_for(collector, f"flipped-{wrap}")
    assert [i["mode"] for i in found] == ["silent-data-corruption"]
    (incident,) = found
    assert incident["first_step"] in (7, 8)  # the first turn of this weight from the flip on
    assert set(incident["place"]["ranks"]) <= {0, 1}
    assert incident["place"]["module"] == "2"
    assert incident["place"]["operand"] == "weight"


@pytest.mark.long
def test_a_healthy_run_of_two_ranks_raises_nothing(tmp_path, collector):
    trained(tmp_path, collector, "healthy", -1, "before")
    time.sleep(1.0)
    assert incidents(collector, "healthy") == []


@pytest.mark.long
def test_of_four_ranks_the_odd_one_is_named(tmp_path, collector):
    trained(tmp_path, collector, "four", 2, "before", world=4)
    (incident,) = wait_for(collector, "four")
    assert (incident["mode"], incident["place"]["ranks"]) == ("silent-data-corruption", [2])
