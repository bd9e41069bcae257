"""Whose steps end a step where the optimizer holds none of the watched parameters, and what is said where none does."""

from __future__ import annotations

import copy
import gc
import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8watch.observer.step_state import STUCK_AFTER_PASSES
from fp8watch.session.step_optimizer import ASK_AGAIN, StepOwner
from fp8watch_agent.record import StepStatus
from fp8watch_agent.training_names import OPTIMIZER_BEGINS


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16()


def forward_backward(m):
    m(torch.randn(16, 64).bfloat16()).float().pow(2).mean().backward()


def copies_of(m, *, trained=True):
    made = [p.detach().float().clone().requires_grad_(trained) for p in m.parameters()]
    return made, torch.optim.AdamW(made)


def hand_over(m, copies):
    for p, c in zip(m.parameters(), copies, strict=True):
        c.grad, p.grad = p.grad.float(), None


def numbers(watch):
    return [int(h["step"]) for h, *_ in watch._recorder.steps]


def calls(watch):
    return [{int(r["num_calls"]) for r in watch._recorder.step(i)[1].values()} for i in range(len(numbers(watch)))]


@pytest.mark.parametrize("trained", [True, False])
def test_the_optimizer_of_float32_copies_ends_each_step_from_the_first_on(attach, capsys, trained):
    m = model()
    copies, optimizer = copies_of(m, trained=trained)
    watch = attach(m, recipe="observe")
    for _ in range(5):
        forward_backward(m)
        hand_over(m, copies)
        optimizer.step()
    assert numbers(watch) == [0, 1, 2, 3, 4]
    assert calls(watch) == [{1}] * 5
    assert capsys.readouterr().err.count("AdamW holds none of the watched parameters") == 1
    assert watch.summary()["steps"] == "ending"


def test_one_flat_copy_of_all_parameters_is_enough(attach):
    m = model()
    flat = torch.cat([p.detach().float().reshape(-1) for p in m.parameters()]).requires_grad_()
    optimizer = torch.optim.AdamW([flat])
    watch = attach(m, recipe="observe")
    for _ in range(3):
        forward_backward(m)
        flat.grad = torch.cat([p.grad.float().reshape(-1) for p in m.parameters()])
        optimizer.step()
    assert numbers(watch) == [0, 1, 2]


def test_megatron_leaves_the_copy_on_its_parameter(attach, capsys):
    m = model()
    watch = attach(m, recipe="observe")
    copies, optimizer = copies_of(m)
    for p, c in zip(m.parameters(), copies, strict=True):
        p.main_param = c
    small = torch.optim.SGD([nn.Parameter(torch.zeros(4))])
    for _ in range(3):
        forward_backward(m)
        small.step()  # of something else, and first
        hand_over(m, copies)
        optimizer.step()
    assert numbers(watch) == [0, 1, 2]
    assert "holds none" not in capsys.readouterr().err


def test_the_next_model_of_a_notebook_is_no_copy_of_one_whose_step_is_open(attach, capsys):
    """A cell is interrupted behind a backward, and the model and its optimizer are made anew; nothing detaches the old watch."""
    old = model()
    optimizer = torch.optim.AdamW(old.parameters())
    watch = attach(old, recipe="observe")
    for _ in range(3):
        forward_backward(old)
        optimizer.step()
    forward_backward(old)
    del optimizer
    gc.collect()
    new = model()
    optimizer = torch.optim.AdamW(new.parameters())
    for _ in range(5):
        forward_backward(new)
        optimizer.step()
    assert numbers(watch) == [0, 1, 2]
    assert "of their copies" not in capsys.readouterr().err


@pytest.mark.parametrize("how", ["unwatched", "watched", "smaller", "in turns"])
def test_that_training_goes_on_with_a_copy_is_said_once(attach, capsys, how):
    m = model()
    watch, optimizer = attach(m, recipe="observe"), torch.optim.AdamW(m.parameters())
    for _ in range(3):
        forward_backward(m)
        optimizer.step()
    other = copy.deepcopy(m) if how != "smaller" else nn.Sequential(nn.Linear(64, 64)).bfloat16()
    if how == "watched":
        attach(other, recipe="observe", run="other")
    going_on = torch.optim.AdamW(other.parameters())
    for n in range(2 * STUCK_AFTER_PASSES + 8):
        forward_backward(other)
        going_on.step()
        if how == "in turns":
            forward_backward(m)
            optimizer.step()
        elif n == STUCK_AFTER_PASSES + 3:
            assert ("since step 3 nothing that is watched" in watch.summary()["steps"]) == (how == "unwatched")
            forward_backward(m)
            optimizer.step()
    said = [line for line in capsys.readouterr().err.splitlines() if "attach to that one" in line]
    assert len(said) == (how == "unwatched")
    forward_backward(m)
    optimizer.step()
    assert watch.summary()["steps"] == "ending"


def test_an_optimizer_of_a_part_is_adopted_after_three_steps_and_numbers_go_on(attach, capsys):
    m = model()
    part = [next(m.parameters()).detach().float().clone().requires_grad_()]
    optimizer = torch.optim.AdamW(part)
    watch = attach(m, recipe="observe")
    for _ in range(5):
        forward_backward(m)
        optimizer.step()
        optimizer.step()  # without a backward in between: not a step more
    assert numbers(watch) == [2, 3, 4]
    assert calls(watch) == [{3}, {1}, {1}]
    assert "its first 3 steps are recorded as one" in capsys.readouterr().err


def test_whoever_holds_the_parameters_displaces_the_adopted(attach):
    m = model()
    stranger = torch.optim.SGD([p.detach().clone() for p in m.parameters()], lr=0.0)
    owner = torch.optim.SGD(m.parameters(), lr=0.1)
    watch = attach(m, recipe="observe")
    for _ in range(3):
        forward_backward(m)
        stranger.step()
        owner.step()
    for _ in range(2):
        forward_backward(m)
        owner.step()
    assert numbers(watch) == [0, 1, 2, 3, 4]
    assert calls(watch) == [{1}] * 5


def test_the_steps_of_another_models_optimizer_do_not_list_the_parameters_each_time(attach, monkeypatch):
    """A discriminator, a critic: a model of thousands of modules takes longer to be listed than such a step takes."""
    m, other = model(), model()
    watch = attach(m, recipe="observe")
    owner, foreign = torch.optim.SGD(m.parameters(), lr=0.1), torch.optim.SGD(other.parameters(), lr=0.1)
    listed = []
    refresh = StepOwner._refresh
    monkeypatch.setattr(StepOwner, "_refresh", lambda self: (listed.append(1), refresh(self)))
    for _ in range(100):
        forward_backward(m)
        owner.step()
        forward_backward(other)
        foreign.step()
    assert len(numbers(watch)) == 100
    assert len(listed) <= 20


@pytest.mark.parametrize("steps_before", [3, 40])
def test_parameters_that_are_put_in_late_are_found_all_the_same(attach, capsys, steps_before):
    m, other = model(), model()
    watch = attach(m, recipe="observe")
    owner, optimizer = torch.optim.SGD(m.parameters(), lr=0.1), torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(steps_before):
        forward_backward(m)
        owner.step()
        forward_backward(other)
        optimizer.step()
    for mine, theirs in zip(m, other, strict=True):  # as FSDP2 replaces them
        mine.weight, mine.bias = theirs.weight, theirs.bias
    for _ in range(ASK_AGAIN):
        forward_backward(m)
        optimizer.step()
    assert len(numbers(watch)) >= steps_before + ASK_AGAIN // 2
    assert "holds none" not in capsys.readouterr().err


class Engine:
    """What wraps an optimizer and is none: `step` is its own."""

    def __init__(self, inner):
        self.optimizer = inner
        self.param_groups = inner.param_groups

    def step(self):
        self.optimizer.step()


def test_an_engine_is_asked_for_the_optimizer_inside(attach):
    m = model()
    copies, optimizer = copies_of(m)
    watch = attach(m, recipe="observe", optimizer=Engine(Engine(optimizer)))
    for _ in range(2):
        forward_backward(m)
        hand_over(m, copies)
        optimizer.step()
    assert numbers(watch) == [0, 1]


class Own:
    """An optimizer of one's own, that torch knows nothing of."""

    def __init__(self, parameters):
        self.parameters = list(parameters)
        self.param_groups = [{"params": self.parameters, "lr": 0.1}]

    def step(self):
        for p in self.parameters:
            p.data.sub_(p.grad, alpha=0.1)
            p.grad = None


def test_an_optimizer_without_a_step_of_torch_is_refused_with_the_remedy(attach):
    m = model()
    with pytest.raises(ValueError, match=r"Engine → Own.*watch\.step\(\)"):
        attach(m, optimizer=Engine(Own(m.parameters())))
    assert type(m[0]) is nn.Linear


def test_that_no_step_ends_is_said_once_and_unsaid_when_one_does(attach, capsys):
    m = model()
    optimizer = Own(m.parameters())
    watch = attach(m, recipe="observe")
    assert watch.summary()["steps"] == "none yet"
    for n in range(25):
        forward_backward(m)
        optimizer.step()
        assert ("no step has ended" in watch.summary()["steps"]) == (n >= 19)
    assert numbers(watch) == []
    assert capsys.readouterr().err.count("call watch.step() after each optimizer step") == 1
    assert "watch.step()" in watch._recorder.facts["no_step_ended"]
    watch.step()
    assert watch._recorder.facts["no_step_ended"] == ""
    assert watch.summary()["steps"] == "ending"
    for _ in range(25):
        forward_backward(m)
    assert "no step has ended" not in capsys.readouterr().err


def test_that_no_step_ended_stays_said_when_training_is_over(attach):
    """The end of the watch ends the step that nobody has ended, and that is none that was seen."""
    m = model()
    optimizer = Own(m.parameters())
    watch = attach(m, recipe="observe")
    for _ in range(25):
        forward_backward(m)
        optimizer.step()
    watch.detach()
    assert watch.summary()["num_steps"] == 1
    assert "no step has ended" in watch.summary()["steps"]
    assert "watch.step()" in watch._recorder.facts["no_step_ended"]


def test_a_model_that_never_runs_while_a_copy_is_trained_is_said_once_and_unsaid_when_it_runs(attach, capsys):
    m = model()
    watch = attach(m, recipe="observe")
    trained = copy.deepcopy(m)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    for n in range(25):
        forward_backward(trained)
        optimizer.step()
        assert ("nothing that is watched of the model has run" in watch.summary()["steps"]) == (n >= 19)
    assert capsys.readouterr().err.count("attach to what is trained") == 1
    assert "attach to what is trained" in watch._recorder.facts["no_step_ended"]
    own = torch.optim.SGD(m.parameters(), lr=0.1)
    forward_backward(m)
    own.step()
    assert watch._recorder.facts["no_step_ended"] == ""
    assert watch.summary()["steps"] == "ending"


def test_an_optimizer_of_another_model_says_nothing_of_one_that_is_paused_or_has_run(attach, capsys):
    m, other = model(), model()
    watch = attach(m, recipe="observe")
    first, second = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (m, other))
    watch.pause()
    for n in range(50):
        if n == 25:
            watch.resume()
            forward_backward(m)
            first.step()
        forward_backward(other)
        second.step()
    assert "attach to what is trained" not in capsys.readouterr().err


def test_micro_batches_of_a_step_are_no_missing_end(attach, mlp, capsys):
    attach(mlp)
    optimizer = torch.optim.SGD(mlp.parameters(), lr=0.1)
    for _ in range(2):
        for _ in range(19):
            mlp(torch.randn(8, 64)).backward()
        optimizer.step()
    assert "no step has ended" not in capsys.readouterr().err


def test_the_run_is_registered_and_says_it_although_no_step_is_ever_sent(tmp_path):
    from support.agents import eventually, serve

    script = textwrap.dedent(
        """
        import sys, torch, fp8watch
        model = torch.nn.Sequential(torch.nn.Linear(32, 32))
        watch = fp8watch.attach(model, recipe="observe")
        for _ in range(21):
            model(torch.randn(8, 32)).sum().backward()
        sys.stdin.read()
        import os; os._exit(0)
        """
    )
    with serve() as collector:
        env = {**os.environ, "FP8WATCH_SPOOL_DIR": str(tmp_path), "FP8WATCH_COLLECTOR": collector.url}
        child = subprocess.Popen(
            [sys.executable, "-c", script], env=env, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        try:
            assert eventually(lambda: "no_step_ended" in json.dumps(list(collector.sessions.values())), 60)
        finally:
            child.kill()
            child.communicate()
    (session,) = collector.sessions.values()
    assert "watch.step()" in session["facts"]["no_step_ended"]
    assert collector.batches() == []


def test_a_loop_that_steps_by_hand_too_ends_each_step_once(attach):
    m = model()
    copies, optimizer = copies_of(m)
    watch = attach(m, recipe="observe")
    for _ in range(10):
        forward_backward(m)
        hand_over(m, copies)
        optimizer.step()
        watch.step()
    assert numbers(watch) == list(range(10))
    assert calls(watch) == [{1}] * 10


@pytest.mark.parametrize("num_skipped", [1, 4])
def test_steps_that_a_gradscaler_skips_before_adoption_are_skipped(attach, num_skipped):
    m = model()
    copies, optimizer = copies_of(m)
    watch = attach(m, recipe="observe")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for i in range(num_skipped + 2):
        scaler.scale(m(torch.randn(16, 64).bfloat16()).float().pow(2).mean()).backward()
        hand_over(m, copies)
        if i < num_skipped:
            copies[0].grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
    statuses = [StepStatus(int(h["status"])).name for h, *_ in watch._recorder.steps]
    assert statuses == ["SKIPPED"] * num_skipped + ["OK"] * 2
    assert calls(watch) == [{1}] * (num_skipped + 2)


class Checkpointed(nn.Module):
    def __init__(self, num):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(num))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x.pow(2).mean()


@pytest.mark.parametrize("recipe", ["observe", "blockwise"])
def test_the_nested_backwards_of_reentrant_checkpointing_are_one(attach, capsys, recipe):
    m = Checkpointed(STUCK_AFTER_PASSES + 4)
    watch = attach(m, recipe=recipe)
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    for _ in range(2):
        m(torch.randn(8, 32, requires_grad=True)).backward()
        optimizer.step()
    assert "no step has ended" not in capsys.readouterr().err
    assert numbers(watch) == [0, 1]


@pytest.mark.parametrize("first", [1, 20], ids=["soon", "later"])
@pytest.mark.parametrize("more", [False, True], ids=["the same", "more"])
def test_an_optimizer_that_takes_over_ends_its_first_step_and_that_is_said(attach, first, more):
    """The second stage of a training, while the optimizer of the first lives on. Before it is known who ends steps it waits for both."""
    m = nn.Sequential(*model(), nn.Linear(64, 64).bfloat16())
    watch = attach(m, recipe="observe")
    stages = [torch.optim.AdamW(m[:2].parameters()), torch.optim.AdamW((m if more else m[:2]).parameters())]
    for optimizer, num in zip(stages, (first, 6), strict=True):
        for _ in range(num):
            forward_backward(m)
            optimizer.step()
            optimizer.zero_grad()
    sure = first > 1
    assert len(numbers(watch)) == first + 6 - (not sure)
    told = [int(h["step"]) for h, _, _, logs, _ in watch._recorder.steps if OPTIMIZER_BEGINS in logs]
    assert told == ([first] if sure else [])


@pytest.mark.parametrize("shared", [True, False], ids=["the same", "others"])
def test_an_optimizer_that_is_added_beside_another_ends_its_steps_with_it(attach, shared):
    """Both go on: however they share parameters, an update of the two is one step."""
    m = model()
    watch = attach(m, recipe="observe")
    one, other = (torch.optim.SGD((m if shared else m[i]).parameters(), lr=1e-3) for i in range(2))
    for step in range(30):
        forward_backward(m)
        if step >= 20 and not shared:
            other.step()
        one.step()
        if step >= 20 and shared:
            other.step()
    assert len(numbers(watch)) == 30
    assert not any(OPTIMIZER_BEGINS in logs for _, _, _, logs, _ in watch._recorder.steps)
