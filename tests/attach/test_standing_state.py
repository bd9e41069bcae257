"""What an optimizer keeps stands still between its steps; what does not is named. Clipping and causal attention beside it."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fp8watch.session.standing_state import TURN_STEPS, merge
from fp8watch_agent.training_names import (
    CHANGED,
    CLIP_NORM,
    EPS,
    MOMENTS_CHANGED,
    MOMENTS_LOOKED,
    MOMENTS_WHICH,
    SECOND_LOOKED,
    SECOND_ZERO,
    SEES_AHEAD,
    WEIGHTS_CHANGED,
    WEIGHTS_LOOKED,
    WEIGHTS_WHICH,
    WRITTEN,
)

NAMES = (MOMENTS_CHANGED, MOMENTS_LOOKED, WEIGHTS_CHANGED, WEIGHTS_LOOKED)


def logs(watch, begins=("optimizer/moments", "optimizer/weights", CHANGED, WRITTEN)):
    return [{k: v for k, v in logs.items() if k.startswith(begins)} for *_, logs, _ in watch._recorder.steps]


def doubled(optimizer, key):
    """The state of another run, with one of its moments twice as large."""
    state = copy.deepcopy(optimizer.state_dict())
    for kept in state["state"].values():
        kept[key] = 2 * kept[key] + 1
    return state


def one_moment(model, optimizer):
    optimizer.state[model.down.weight]["exp_avg_sq"].view(-1)[5] += 1


def another_moment(model, optimizer):
    state = optimizer.state[model.down.weight]
    state["exp_avg"] = state["exp_avg"] * 2 + 1


def one_weight(model, optimizer):
    with torch.no_grad():
        model.up.weight[0, 3] += 1


def loaded_moments(model, optimizer):
    optimizer.load_state_dict(doubled(optimizer, "exp_avg"))


def loaded_unchanged(model, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def loaded_all(model, optimizer):
    loaded_moments(model, optimizer)
    model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})


BEFORE_A_STEP = {"state": {}}


def loaded_start(model, optimizer):
    """As behind a search for the learning rate: the optimizer had not stepped."""
    model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
    optimizer.load_state_dict(optimizer.state_dict() | BEFORE_A_STEP)


def loaded_no_moments(model, optimizer):
    optimizer.load_state_dict(optimizer.state_dict() | BEFORE_A_STEP)


FOUND = [
    (one_moment, (1, 0), "exp_avg_sq of down.weight"),
    (another_moment, (1, 0), "exp_avg of down.weight"),
    (one_weight, (0, 1), None),
    (loaded_moments, (5, 0), "exp_avg of up.weight"),
    (loaded_all, (5, 5), "exp_avg of up.weight"),
    (loaded_unchanged, None, None),
    (loaded_start, (0, 5), None),
    (loaded_no_moments, None, None),
]


@pytest.mark.parametrize(("happens", "counts", "first"), FOUND, ids=[f[0].__name__ for f in FOUND])
def test_what_changes_between_two_steps_is_named_in_that_step_and_in_no_other(
    attach, mlp, train, happens, counts, first
):
    watch, optimizer = attach(mlp), torch.optim.AdamW(mlp.parameters(), lr=1e-3)
    train(mlp, 4, optimizer=optimizer)
    happens(mlp, optimizer)
    train(mlp, 4, optimizer=optimizer)
    steps = logs(watch)
    if counts is None:
        assert steps == [{}] * 8
    else:
        assert [bool(s) for s in steps] == [False] * 4 + [True] + [False] * 3
        # 5 of 6 parameters are wide enough: the head's bias has 16 elements
        looked = 0 if happens is loaded_start else 10
        assert [steps[4][n] for n in NAMES] == [counts[0], looked, counts[1], 5]
        assert [n for n in steps[4] if n.startswith(CHANGED)] == ([CHANGED + first] if first else [])
        written = [n.removeprefix(WRITTEN) for n in steps[4] if n.startswith(WRITTEN)]
        assert written == (["up.weight"] if happens in (one_weight, loaded_start) else [])
    assert not watch.guard.errors


@pytest.mark.parametrize("writes", [True, False])
def test_weights_are_held_against_what_an_optimizer_left_that_another_one_follows(attach, mlp, train, writes):
    """As at a rewind, or where the next fold begins."""
    watch, optimizer = attach(mlp), torch.optim.AdamW(mlp.parameters(), lr=1e-3)
    train(mlp, 4, optimizer=optimizer)
    optimizer = torch.optim.AdamW(mlp.parameters(), lr=1e-3)
    if writes:
        mlp.load_state_dict({k: v + 1 for k, v in mlp.state_dict().items()})
    train(mlp, 4, optimizer=optimizer)
    steps = logs(watch)
    assert [bool(s) for s in steps] == [False] * 4 + [writes] + [False] * 3
    if writes:
        assert [steps[4][n] for n in NAMES] == [0, 0, 5, 5]
        assert [n.removeprefix(WRITTEN) for n in steps[4] if n.startswith(WRITTEN)] == ["up.weight"]
    assert not watch.guard.errors


def test_an_element_is_found_where_its_turn_has_come(attach, mlp, train):
    watch, optimizer = attach(mlp), torch.optim.AdamW(mlp.parameters(), lr=1e-3)
    train(mlp, TURN_STEPS + 3, optimizer=optimizer)
    optimizer.state[mlp.down.weight]["exp_avg"].view(-1)[5] += 1  # not looked at any more
    train(mlp, 1, optimizer=optimizer)
    start = int(0.6180339887498949 * (mlp.down.weight.numel() - 63))  # in the second turn
    optimizer.state[mlp.down.weight]["exp_avg"].view(-1)[start + 5] += 1
    train(mlp, 1, optimizer=optimizer)
    assert [bool(s) for s in logs(watch)][-2:] == [False, True]


def test_what_is_loaded_frees_the_memory_of_what_was_there(attach, mlp, train):
    attach(mlp)
    optimizer = torch.optim.AdamW(mlp.parameters(), lr=1e-3)
    train(mlp, 3, optimizer=optimizer)
    old = weakref.ref(optimizer.state[mlp.up.weight]["exp_avg"])
    optimizer.load_state_dict(doubled(optimizer, "exp_avg"))
    gc.collect()
    assert old() is None


def test_nothing_stays_on_an_optimizer_and_it_is_copied_and_stored_as_before(attach, mlp, train):
    watch, optimizer = attach(mlp), torch.optim.AdamW(mlp.parameters(), lr=1e-3)
    train(mlp, 3, optimizer=optimizer)
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 1
    pickle.dumps(optimizer)
    copy.deepcopy(optimizer)
    watch.detach()
    assert not optimizer._optimizer_load_state_dict_pre_hooks
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None


def test_an_optimizer_that_makes_its_moments_anew_is_left_alone(attach, mlp):
    class Anew(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                self.state[p]["mean"] = self.state[p].get("mean", torch.zeros_like(p)) * 0.9 + p.grad
                p -= 1e-3 * self.state[p]["mean"]

    watch, optimizer = attach(mlp), Anew(mlp.parameters(), {})
    for _ in range(20):
        mlp(torch.randn(32, 64)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert logs(watch) == [{}] * 20
    assert not watch.guard.errors


@pytest.mark.parametrize("when", ["paused", "skipped"])
def test_steps_that_are_not_looked_at_say_nothing(attach, mlp, train, when):
    watch, optimizer = attach(mlp), torch.optim.AdamW(mlp.parameters(), lr=1e-3)
    train(mlp, 3, optimizer=optimizer)
    if when == "paused":
        watch.pause()
        train(mlp, 2, optimizer=optimizer)
        one_moment(mlp, optimizer)
        watch.resume()
        train(mlp, 3, optimizer=optimizer)
        assert all(not s for s in logs(watch))
    else:  # a backward without a step: the state stands
        mlp(torch.randn(32, 64)).backward()
        train(mlp, 2, optimizer=optimizer)
        assert all(not s for s in logs(watch))


def test_moments_of_a_checkpoint_are_held_against_what_was_loaded(attach, mlp, train):
    watch, optimizer = attach(mlp), torch.optim.AdamW(mlp.parameters(), lr=1e-3)
    train(mlp, 3, optimizer=optimizer)
    saved, weights, moments = watch.state_dict(), copy.deepcopy(mlp.state_dict()), copy.deepcopy(optimizer.state_dict())
    assert len(saved["contents"]["moments"]) == 12
    watch.detach()
    for given, said in (
        (moments, None),
        (
            doubled(optimizer, "exp_avg"),
            ", ".join(f"exp_avg of {name}" for name, _ in mlp.named_parameters()) + " of 12",
        ),
        (None, "none of 12: the optimizer has none"),
    ):
        other = type(mlp)()
        going_on, optimizer_2 = attach(other), torch.optim.AdamW(other.parameters(), lr=1e-3)
        going_on.load_state_dict(saved)
        other.load_state_dict(weights)
        if given is not None:
            optimizer_2.load_state_dict(given)
        train(other, 1, optimizer=optimizer_2)
        assert going_on._recorder.facts.get("loaded_moments") == said
        assert not going_on.guard.errors
        going_on.detach()


def two_optimizers(mlp, first=torch.optim.AdamW):
    """One of the first layer, one of the rest."""
    up, rest = list(mlp.up.parameters()), [*mlp.down.parameters(), *mlp.lm_head.parameters()]
    return first(up, lr=1e-3), torch.optim.AdamW(rest, lr=1e-3)


def steps(mlp, optimizers, num):
    for _ in range(num):
        mlp(torch.randn(32, 64)).backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


def test_what_two_optimizers_say_of_a_step_is_put_together(attach, mlp):
    """A step ends with the last of them: there both are said, and the first that says something names it."""
    watch, optimizers = attach(mlp), two_optimizers(mlp)
    steps(mlp, optimizers, 4)
    first, second = (optimizers[0], mlp.up.weight), (optimizers[1], mlp.down.weight)
    for changed in ((first, second), (second,), (first,)):
        for optimizer, weight in changed:
            optimizer.state[weight]["exp_avg"].view(-1)[5] += 1
        steps(mlp, optimizers, 1)
    said = logs(watch)
    assert [s.get(MOMENTS_CHANGED) for s in said] == [None] * 4 + [2, 1, 1]
    named = [[n.removeprefix(CHANGED) for n in s if n.startswith(CHANGED)] for s in said[4:]]
    assert named == [["exp_avg of up.weight"], ["exp_avg of down.weight"], ["exp_avg of up.weight"]]
    assert not watch.guard.errors


def test_a_device_reports_both_optimizers_though_nothing_of_the_first_changed():
    """There a report comes in each step, whether anything changed or not."""
    names = (MOMENTS_CHANGED, MOMENTS_WHICH, MOMENTS_LOOKED, WEIGHTS_CHANGED, WEIGHTS_WHICH, WEIGHTS_LOOKED)
    first, second = ([torch.tensor(n) for n in numbers] for numbers in ((2, 1, 10, 0, 20, 5), (0, 10, 4, 1, 31, 2)))
    known = {}
    for report in (first, {}, second):
        merge(known, dict(zip(names, report, strict=False)))
    assert [int(known[n]) for n in names] == [2, 1, 14, 1, 31, 7]
    known = {}
    for report in (second, first):
        merge(known, dict(zip(names, report, strict=True)))
    assert [int(known[n]) for n in names] == [2, 1, 14, 1, 31, 7]


@pytest.mark.parametrize("first", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("loads", ["right", "wrong", "nothing"])
def test_moments_of_every_optimizer_are_held_against_the_checkpoint(attach, mlp, first, loads):
    watch, optimizers = attach(mlp), two_optimizers(mlp, first)
    steps(mlp, optimizers, 3)
    saved, weights = watch.state_dict(), copy.deepcopy(mlp.state_dict())
    states = [copy.deepcopy(o.state_dict()) for o in optimizers]
    num = len(saved["contents"]["moments"])
    if loads == "wrong":
        states[1] = doubled(optimizers[1], "exp_avg")
    watch.detach()
    other = type(mlp)()
    going_on, optimizers = attach(other), two_optimizers(other, first)
    going_on.load_state_dict(saved)
    other.load_state_dict(weights)
    if loads != "nothing":
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)
    steps(other, optimizers, 2)
    said = going_on._recorder.facts.get("loaded_moments")
    if loads == "right":
        assert said is None
    elif loads == "wrong":
        names = "down.weight", "down.bias", "lm_head.weight", "lm_head.bias"
        assert said == ", ".join(f"exp_avg of {name}" for name in names) + f" of {num}"
    else:
        assert said == f"none of {num}: the optimizer has none"
    assert not going_on.guard.errors
    going_on.detach()


def zeroed_between(mlp, optimizer):
    for state in optimizer.state.values():
        state["exp_avg_sq"].zero_()


@pytest.mark.parametrize("how", ["between two steps", "in float16", "healthy"])
def test_second_moments_that_are_0_are_counted_with_eps(attach, mlp, train, how):
    watch, optimizer = attach(mlp), torch.optim.AdamW(mlp.parameters(), lr=1e-3)
    if how == "in float16":  # a state that holds nothing below 6e-8
        optimizer.register_step_post_hook(
            lambda o, *_: [s.update(exp_avg_sq=s["exp_avg_sq"].mul_(1e-9).half().float()) for s in o.state.values()]
        )
    train(mlp, 3, optimizer=optimizer)
    if how == "between two steps":
        zeroed_between(mlp, optimizer)
    train(mlp, 2, optimizer=optimizer)
    said = [{k: v for k, v in s.items() if k in (SECOND_ZERO, SECOND_LOOKED, EPS)} for s in logs(watch, "optimizer/")]
    told = [i for i, s in enumerate(said) if s]
    if how == "healthy":
        assert told == []
    else:
        assert told[0] == (3 if how == "between two steps" else 1)
        assert said[told[0]][SECOND_ZERO] == said[told[0]][SECOND_LOOKED] > 200
        assert said[told[0]][EPS] == 1e-8
    assert not watch.guard.errors


def test_how_far_an_update_moves_a_weight_is_known_of_its_elements(attach, mlp, train):
    watch, optimizer = attach(mlp), torch.optim.AdamW(mlp.parameters(), lr=1e-3, weight_decay=0.0)
    standing = watch._scalars.standing
    train(mlp, 1, optimizer=optimizer)
    assert standing.update_of("up.weight") is None, "of one step nothing is known"
    train(mlp, 2, optimizer=optimizer)
    before = mlp.up.weight.detach().clone()
    train(mlp, 1, optimizer=optimizer)
    part = slice(0, 64)
    now = mlp.up.weight.detach().view(-1)[part]
    moved = (now - before.view(-1)[part]).abs().mean() / now.abs().mean()
    assert float(standing.update_of("up.weight")) == pytest.approx(float(moved), rel=1e-5)
    assert standing.update_of("nobody.weight") is None


def test_what_gradients_are_clipped_to_is_recorded_and_a_mere_measure_is_not(attach, mlp):
    watch, optimizer = attach(mlp), torch.optim.SGD(mlp.parameters(), lr=0.1)
    for limit in (1.0, None, float("inf"), 0.5):
        mlp(torch.randn(32, 64)).backward()
        if limit is not None:
            torch.nn.utils.clip_grad_norm_(mlp.parameters(), limit)
        optimizer.step()
        optimizer.zero_grad()
    assert [s.get(CLIP_NORM) for s in logs(watch, CLIP_NORM)] == [1.0, None, None, 0.5]


class Attention(nn.Module):
    """One head; its mask is what the test says."""

    def __init__(self, way):
        super().__init__()
        self.qkv, self.way, self.leak = nn.Linear(32, 96), way, False

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(2 if self.leak else 0)
        if self.way == "is_causal":
            return F.scaled_dot_product_attention(q, k, v, is_causal=not self.leak)
        if self.way == "bool":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        added = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        if self.way == "added":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=added)
        return F.softmax(q @ k.mT / 32**0.5 + added, dim=-1) @ v


class Layer(nn.Module):
    """Attention under the name that probes look for."""

    def __init__(self, way):
        super().__init__()
        self.self_attn = Attention(way)

    def forward(self, x):
        return self.self_attn(x).pow(2).mean()


@pytest.mark.parametrize("way", ["is_causal", "bool", "added", "softmax"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both-ways"])
def test_a_causal_module_that_sees_ahead_is_told_and_one_that_always_did_is_not(attach, way, causal):
    model = Layer(way)
    model.self_attn.leak = not causal
    watch, optimizer = attach(model, every=1), torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(12):
        if step == 9:
            model.self_attn.leak = True
        model(torch.randn(2, 16, 32)).backward()
        optimizer.step()
        optimizer.zero_grad()
    told = [s.get(f"{SEES_AHEAD}self_attn") for s in logs(watch, SEES_AHEAD)]
    assert told == [None] * 9 + [1.0 if causal else None] * 3
    assert not watch.guard.errors
