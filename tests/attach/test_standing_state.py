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

from fp8watch.session.standing_state import TURN_STEPS
from fp8watch_agent.training_names import (
    CHANGED,
    CLIP_NORM,
    MOMENTS_CHANGED,
    MOMENTS_LOOKED,
    SEES_AHEAD,
    WEIGHTS_CHANGED,
    WEIGHTS_LOOKED,
)

NAMES = (MOMENTS_CHANGED, MOMENTS_LOOKED, WEIGHTS_CHANGED, WEIGHTS_LOOKED)


def logs(watch, begins=("optimizer/moments", "optimizer/weights", CHANGED)):
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


FOUND = [
    (one_moment, (1, 0), "exp_avg_sq of down.weight"),
    (another_moment, (1, 0), "exp_avg of down.weight"),
    (one_weight, (0, 1), None),
    (loaded_moments, (5, 0), "exp_avg of up.weight"),
    (loaded_all, (5, 5), "exp_avg of up.weight"),
    (loaded_unchanged, None, None),
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
        assert [steps[4][n] for n in NAMES] == [counts[0], 10, counts[1], 5]
        assert [n for n in steps[4] if n.startswith(CHANGED)] == ([CHANGED + first] if first else [])
    assert not watch.guard.errors


def test_an_element_is_found_where_its_turn_has_come(attach, mlp, train):
    watch, optimizer = attach(mlp), torch.optim.AdamW(mlp.parameters(), lr=1e-3)
    train(mlp, TURN_STEPS + 3, optimizer=optimizer)
    optimizer.state[mlp.down.weight]["exp_avg"].view(-1)[5] += 1  # not looked at any more
    train(mlp, 1, optimizer=optimizer)
    optimizer.state[mlp.down.weight]["exp_avg"].view(-1)[64 + 5] += 1
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
            "exp_avg of up.weight, exp_avg of up.bias, exp_avg of down.weight and 3 more of 12",
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
