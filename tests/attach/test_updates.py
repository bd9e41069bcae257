"""What updates did to weights, gradients that were left or repeated, rates that leap, recomputations that differ."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from attach.stepped import OPTIMIZERS, Deep, adam, steps

from fp8watch.observer.batch_arithmetic import copies
from fp8watch.observer.recompute_values import RecomputeValues
from fp8watch.session import update_turns
from fp8watch.session.gradients_left import GradientsLeft
from fp8watch.session.update_size import Rate, update_times
from fp8watch_agent.batch_names import COPIES
from fp8watch_agent.guard import Guard
from fp8watch_agent.update_names import (
    ASTRAY,
    COARSE,
    COARSE_BITS,
    DECAY,
    GRADIENTS_KEPT,
    GRADIENTS_LEFT,
    OF,
    RATE_PARAMETERS,
    RATE_TIMES,
    RECOMPUTED,
    REPEATED,
    SHRINK,
    STEPPED_AGAIN,
    UPDATE_TIMES,
    UPDATES_LOOKED,
)

NEWS = (
    GRADIENTS_LEFT, GRADIENTS_KEPT, UPDATES_LOOKED, REPEATED, COARSE, COARSE_BITS, SHRINK, DECAY, ASTRAY, RATE_TIMES,
    RATE_PARAMETERS, OF, RECOMPUTED, STEPPED_AGAIN, UPDATE_TIMES,
)  # fmt: skip


@pytest.fixture(autouse=True)
def each_step(monkeypatch, request):
    """A turn takes a larger share of a step than is allowed, in models of this size."""
    if "rest" not in request.node.name:
        monkeypatch.setattr(update_turns, "COST_SHARE", 1e9)


def news(watch):
    return [{k: v for k, v in logs.items() if k.startswith(NEWS)} for *_, logs, _ in watch._recorder.steps]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ordinary_training_says_nothing(attach, name):
    model = Deep(again=True)
    watch = attach(model)
    steps(model, OPTIMIZERS[name](model), 24, micro=2)
    assert news(watch) == [{}] * 24
    assert not watch.guard.errors


@pytest.mark.parametrize("to_none", [True, False], ids=["set to none", "set to 0"])
def test_gradients_that_nobody_clears_are_told_in_each_such_step(attach, to_none):
    model = Deep()
    watch, optimizer = attach(model), adam(model)
    steps(model, optimizer, 4)
    steps(model, optimizer, 3, first=4, clear=False)
    optimizer.zero_grad(set_to_none=to_none)
    steps(model, optimizer, 3, first=7, clear=False, micro=2, before=None, after=lambda _: optimizer.zero_grad(to_none))
    said = [s.get(GRADIENTS_LEFT) for s in news(watch)]
    assert said == [None] * 4 + [1.0] * 3 + [None] * 3
    assert not watch.guard.errors


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_that_is_applied_again_is_told_with_the_step_behind_it(attach, name):
    model = Deep()
    watch, optimizer = attach(model), OPTIMIZERS[name](model)
    steps(model, optimizer, 8, after=lambda step: optimizer.step() if step == 4 else None)
    assert [s.get(STEPPED_AGAIN) for s in news(watch)] == [None] * 5 + [1.0] + [None] * 2
    assert not watch.guard.errors


@pytest.mark.parametrize(
    ("make", "times"),
    [
        (adam, 2.0),
        (adam, 4.0),
        (adam, 0.5),
        (adam, 1.1),
        (OPTIMIZERS["Adam"], 2.0),
        (lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(1e-2), weight_decay=0.1, maximize=True), 2.0),
        (OPTIMIZERS["RMSprop"], 2.0),
    ],
)
def test_weights_that_move_further_than_adam_says_are_told_by_how_much(attach, make, times):
    model = Deep()
    watch, optimizer = attach(model), make(model)
    known = {}

    def before(step):
        known.update({p: p.detach().clone() for p in model.parameters()})

    @torch.no_grad()
    def after(step):
        if step >= 6:
            for p, was in known.items():
                p.add_((times - 1) * (p - was))

    steps(model, optimizer, 16, before=before, after=after)
    said = [s.get(UPDATE_TIMES) for s in news(watch)]
    told = isinstance(optimizer, torch.optim.Adam) and times != 1.1
    assert not any(said[:7])
    assert [s for s in said[7:] if s] == pytest.approx([times] * 4 if told else [], rel=0.02)
    assert not watch.guard.errors


@pytest.mark.parametrize(
    ("times", "noise", "small", "said"),
    [(2.0, 0.0, False, 2.0), (2.0, 2.0, False, 0.0), (2.0, 0.0, True, 0.0), (1.0, 0.0, False, 0.0)],
)
def test_what_a_weight_was_to_move_by_is_adams_step_and_its_decay(times, noise, small, said):
    g = torch.Generator().manual_seed(0)
    was, first, noisy = (torch.randn(4, 512, generator=g) for _ in range(3))
    second, lr = first.square() + torch.rand(4, 512, generator=g), 1e-8 if small else 1e-2
    step = first / (1 - 0.9**3) / ((second / (1 - 0.999**3)).sqrt() + 1e-8)
    meant = -lr * (step + 0.5 * was)
    moved = times * meant + noise * meant.norm() * noisy / noisy.norm()
    got = update_times([Rate(lr, 0.5, 0.9, 0.999, 1e-8)] * 4, was, moved, first, second, torch.full((4,), 3.0))
    assert float(got) == pytest.approx(said, rel=1e-4)


def test_weights_that_do_not_agree_are_no_larger_update():
    was = moved = torch.ones(4, 512)
    factors = torch.tensor([2.0, 3.0, 4.0, 6.0])[:, None]
    first, second = -factors.reciprocal() * was, was  # that is, a step of 1 over the factor
    got = update_times([Rate(1.0, 0.0, 0.0, 0.0, 0.0)] * 4, was, moved, first, second, torch.ones(4))
    assert float(got) == 0.0


def test_an_average_that_is_blended_in_now_and_then_is_no_larger_update(attach):
    model, slow = Deep(), {}
    watch, optimizer = attach(model), adam(model)
    slow.update({p: p.detach().clone() for p in model.parameters()})

    @torch.no_grad()
    def after(step):
        if step % 5 == 4:
            for p, kept in slow.items():
                p.copy_(kept.lerp_(p, 0.5))

    steps(model, optimizer, 24, after=after)
    assert not any(UPDATE_TIMES in s for s in news(watch))


@pytest.mark.parametrize("what", ["other parameters", "cleared", "changed", "another pass"])
def test_a_second_step_that_is_not_on_the_same_gradients_applies_none_again(attach, what):
    model = Deep()
    watch, optimizer = attach(model), adam(model)

    def after(step):
        [group] = optimizer.param_groups
        whole = group["params"]
        if what == "other parameters":  # an engine that steps part after part
            group["params"] = []
        elif what == "cleared":
            optimizer.zero_grad(set_to_none=False)
        elif what == "changed":
            for p in whole:
                p.grad.mul_(0.5)
        else:
            model(torch.randint(64, (4, 16))).backward()
        optimizer.step()
        group["params"] = whole

    steps(model, optimizer, 6, after=after)
    assert not any(STEPPED_AGAIN in s for s in news(watch))
    assert not watch.guard.errors


def test_gradients_that_are_cleared_between_forward_and_backward_were_cleared(attach, mlp, train):
    watch = attach(mlp)
    train(mlp, 6)
    assert news(watch) == [{}] * 6


def test_gradients_that_another_backward_found_are_no_fault_where_they_are_cleared_before_their_own(attach):
    model = Deep()
    watch, optimizer = attach(model), adam(model)
    g = torch.Generator().manual_seed(0)
    for _ in range(6):
        other = model(torch.randint(64, (4, 16), generator=g))
        torch.autograd.grad(other, [model.layers[0].weight])  # a penalty, another network's pass
        optimizer.zero_grad(set_to_none=False)
        model(torch.randint(64, (4, 16), generator=g)).backward()
        optimizer.step()
    assert news(watch) == [{}] * 6


@pytest.mark.parametrize("way", ["assigned", "copied", "copies"])
def test_gradients_that_are_written_over_need_not_be_cleared(attach, way):
    model = Deep()
    watch, params = attach(model), list(model.parameters())
    held = [p.detach().clone().requires_grad_() for p in params] if way == "copies" else params
    optimizer = torch.optim.SGD(held, lr=1e-2)
    for p in held:
        p.grad = torch.zeros_like(p)
    for step in range(8):
        g = torch.Generator().manual_seed(1)
        loss = model(torch.randint(64, (4, 16), generator=g)) * (1 if way == "assigned" else (-1) ** step)
        for p, gradient in zip(held, torch.autograd.grad(loss, params), strict=True):
            if way == "assigned":
                p.grad = gradient
            else:
                p.grad.copy_(gradient)
        optimizer.step()
    assert not any(GRADIENTS_LEFT in s for s in news(watch))
    assert not watch.guard.errors


def test_a_gradient_that_is_that_of_the_step_before_is_named_clipped_or_not(attach):
    model = Deep()
    watch, optimizer = attach(model), adam(model)
    kept = {}

    def stale(step):
        weight = model.layers[2].weight
        if step == 5:
            kept["gradient"] = weight.grad.clone()
        elif step > 5:
            weight.grad.copy_(kept["gradient"])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3 * (1 + step % 3))

    steps(model, optimizer, 12, before=stale)
    said = news(watch)
    assert said[:6] == [{}] * 6
    assert any(s.get(REPEATED) == 1 and s.get(f"{OF}layers.2.weight") == 1 for s in said[6:])
    assert not any(ASTRAY in s or COARSE in s for s in said)


def test_one_batch_again_and_again_at_a_rate_of_0_repeats_all_gradients_and_says_nothing(attach):
    model = Deep()
    watch, optimizer = attach(model), torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(8):
        steps(model, optimizer, 1, first=3)
    assert news(watch) == [{}] * 8


def test_weights_that_the_loss_wants_smaller_are_no_decay(attach, mlp, train, monkeypatch):
    monkeypatch.setattr(update_turns, "SHRUNK_LOOKS", 1)
    watch = attach(mlp)
    train(mlp, 16)  # its loss is its output
    assert not any(SHRINK in s for s in news(watch))


@torch.no_grad()
def rounded(model, dtype):
    for p in model.parameters():
        if p.ndim > 1:
            p.copy_(p.to(dtype))


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 8), (torch.float16, 11)], ids=str)
def test_weights_that_are_rounded_behind_updates_are_told_with_their_bits(attach, dtype, bits):
    model = Deep()
    watch, optimizer = attach(model), adam(model)
    rounded(model, dtype)  # loaded like that: until something has moved that is no news
    steps(model, optimizer, 6)
    steps(model, optimizer, 6, first=6, after=lambda _: rounded(model, dtype))
    said = news(watch)
    assert said[:7] == [{}] * 7
    last = [s for s in said if COARSE in s][-1]
    assert last[COARSE] == last[UPDATES_LOOKED] == 5
    assert last[COARSE_BITS] == bits


@torch.no_grad()
def shrunk(model, share):
    for p in model.parameters():
        if p.ndim > 1:
            p.mul_(1 - share)


def test_weights_that_all_shrink_are_told_beside_their_decay(attach):
    model = Deep()
    watch, optimizer = attach(model), adam(model, weight_decay=0.1)
    steps(model, optimizer, 6)
    steps(model, optimizer, 12, first=6, after=lambda step: step % 3 == 0 and shrunk(model, 0.02))
    steps(model, optimizer, 10, first=18, after=lambda _: shrunk(model, 0.02))
    said = news(watch)
    assert said[:20] == [{}] * 20, "now and then, as averages that are written back"
    found = [s for s in said if SHRINK in s]
    assert found
    assert all(0.015 < s[SHRINK] < 0.025 and s[DECAY] == pytest.approx(1e-4) for s in found)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adafactor"])
def test_updates_of_other_rows_are_named_with_their_tensor(attach, name):
    model = Deep()
    watch, optimizer = attach(model), OPTIMIZERS[name](model)
    before = {}

    @torch.no_grad()
    def keep(step):
        before["table"] = model.table.weight.clone()

    @torch.no_grad()
    def misplace(step):
        change = model.table.weight - before["table"]
        wrong = (torch.arange(64) % 2 == 0)[:, None]
        model.table.weight.copy_(
            before["table"] + torch.where(wrong, 0, change) + torch.where(wrong, change, 0).roll(1, 0)
        )

    steps(model, optimizer, 6)
    steps(model, optimizer, 8, first=6, before=keep, after=misplace)
    said = news(watch)
    assert said[:7] == [{}] * 7
    found = [s for s in said if ASTRAY in s]
    assert len(found) >= 2
    assert all(s[ASTRAY] > 0.04 and s[f"{OF}table.weight"] == 1 for s in found)


class OtherDecay(torch.optim.Optimizer):
    """Lion, with a decay that is not scaled by the learning rate, as some define it."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-3, "weight_decay": 1e-4})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            kept = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
            kept.lerp_(p.grad, 0.1)
            p.mul_(1 - 1e-4).add_(kept.sign(), alpha=-1e-3)


@pytest.mark.parametrize("make", [adam, lambda m: OtherDecay(m.parameters())], ids=["AdamW", "other decay"])
@pytest.mark.parametrize("num_named", [0, 2], ids=["no row is named", "few rows are named"])
def test_rows_that_no_token_names_move_by_decay_and_its_rounding_alone(attach, make, num_named):
    model = Deep()
    model.table = torch.nn.Embedding(64 if num_named else 128, 64)
    rows = torch.arange(64) % num_named if num_named else torch.arange(64)
    look_up = model.table.forward
    if not num_named:  # a half of it, as one process holds it: the tokens are in the other one
        other = torch.randn(64, 64)
        model.table.forward = lambda tokens: other[tokens] + 0 * model.table.weight.sum()
    else:
        model.table.forward = lambda tokens: look_up(rows[tokens])
    watch = attach(model)
    steps(model, make(model), 24)
    assert news(watch) == [{}] * 24
    assert not watch.guard.errors


def test_averages_that_become_the_weights_are_no_misplaced_update(attach):
    model = Deep()
    watch, optimizer = attach(model), adam(model)
    average = copy.deepcopy(dict(model.named_parameters()))

    @torch.no_grad()
    def swap(step):
        for name, p in model.named_parameters():
            average[name].lerp_(p, 0.2)
            if step % 4 == 3:
                p.copy_(average[name])

    steps(model, optimizer, 24, after=swap)
    assert not any(ASTRAY in s or COARSE in s for s in news(watch))


def test_a_group_whose_rate_leaps_beside_the_others_is_named_and_a_schedule_of_all_is_not(attach):
    model = Deep()
    watch = attach(model)
    groups = [
        {"params": [model.table.weight]},
        {"params": [p for n, p in model.named_parameters() if n != "table.weight"]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)

    def all_of_them(step):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 if step % 8 else 1e-4

    steps(model, optimizer, 20, before=all_of_them)
    optimizer.param_groups[0]["lr"] *= 8
    steps(model, optimizer, 4, first=20)
    said = news(watch)
    assert [RATE_TIMES in s for s in said] == [False] * 20 + [True] + [False] * 3
    assert said[20][RATE_TIMES] == pytest.approx(8)
    assert (said[20][RATE_PARAMETERS], said[20][f"{OF}table.weight"]) == (1, 1)


def test_a_group_that_is_unfrozen_did_not_leap(attach):
    model = Deep()
    watch = attach(model)
    optimizer = torch.optim.AdamW(
        [{"params": [model.table.weight], "lr": 0.0}, {"params": list(model.layers.parameters())}], lr=1e-3
    )
    steps(model, optimizer, 20)
    optimizer.param_groups[0]["lr"] = 1e-3
    steps(model, optimizer, 3, first=20)
    assert not any(RATE_TIMES in s for s in news(watch))
    assert not watch.guard.errors


def test_a_recomputation_of_other_values_is_named(attach):
    model = Deep(again=True)
    watch, optimizer = attach(model), adam(model)
    steps(model, optimizer, 4, micro=2)
    model.spoil = True
    steps(model, optimizer, 4, first=4, micro=2)
    said = news(watch)
    assert said[:4] == [{}] * 4
    for found in said[4:]:
        assert set(found) == {f"{RECOMPUTED}layers.{i}.input" for i in range(2)}
        assert all(0.1 < off < 2 for off in found.values())
    assert not watch.guard.errors


def test_a_pipeline_runs_several_first_passes_before_the_first_comes_back(attach):
    model = Deep(again=True)
    watch, optimizer = attach(model), adam(model)
    for step in range(4):
        optimizer.zero_grad()
        g = torch.Generator().manual_seed(step)
        losses = [model(torch.randint(64, (4, 16), generator=g)) for _ in range(3)]
        for loss in losses:
            loss.backward()
        optimizer.step()
    assert news(watch) == [{}] * 4


def test_watching_updates_changes_no_number_and_leaves_nothing_behind(attach):
    ends = []
    for watched in (True, False):
        model = Deep(again=True)
        watch, optimizer = attach(model, recipe="observe") if watched else None, adam(model)
        steps(model, optimizer, 6, micro=2)
        if watch is not None:
            watch.detach()
            assert not model.layers[0].weight._backward_hooks
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adafactor"])
def test_nothing_waits_for_a_device(name):
    model = Deep().to("meta")  # what asks one of its tensors for its value raises
    optimizer = OPTIMIZERS[name](model)
    turns, left, values = (
        update_turns.UpdateTurns(model),
        GradientsLeft(model, Guard()),
        RecomputeValues(turn=frozenset([0])),
    )
    turns.follow(optimizer, looks=True)
    for p in model.parameters():
        p.grad = torch.empty_like(p)
        key = torch.empty_like(p, requires_grad=False)
        if name == "AdamW":
            optimizer.state[p] = {"exp_avg": key, "exp_avg_sq": key}
    found = {}
    for _ in range(4):
        found |= turns.before(optimizer) | left.before(optimizer)
        left.after(optimizer, looks=True)
        left.backward_begins()
        left.backward_begins()
    values.keep(0, torch.empty(8, 64, device="meta"))
    values.again(0, torch.empty(8, 64, device="meta"))
    found |= values.take() | {COPIES: copies([torch.empty(8, 16, dtype=torch.int64, device="meta")])}
    assert {REPEATED, COARSE, SHRINK, ASTRAY, GRADIENTS_LEFT, f"{RECOMPUTED}0", COPIES} <= set(found)
    assert all(v.is_meta for k, v in found.items() if k not in (UPDATES_LOOKED, DECAY, GRADIENTS_KEPT))


def test_turns_rest_for_as_long_as_they_cost(monkeypatch):
    model, clock, at, now = Deep(), iter(range(10**6)), [], [0]
    turns, optimizer = update_turns.UpdateTurns(model), adam(Deep())
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    turns.follow(optimizer, looks=True)
    monkeypatch.setattr(update_turns, "perf_counter", lambda: next(clock))  # all that is done takes a second
    begun = turns._begun
    monkeypatch.setattr(turns, "_begun", lambda *args: at.append(now[0]) or begun(*args))
    for now[0] in range(200):
        turns.before(optimizer)
        for _ in range(90):
            next(clock)  # a step, ninety
    apart = {b - a for a, b in pairwise(at)}
    assert len(apart) == 1
    assert 2 / (90 * apart.pop()) < 1.5 * update_turns.COST_SHARE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_that_are_near_the_last_ones_in_their_largest_elements_are_no_repetition(dtype):
    torch.manual_seed(0)
    last, other = torch.randn(2, 3, update_turns.SAMPLE)
    last[0, :4] = 100.0  # rows of the most frequent tokens
    now = other.clone()
    now[0] = 0.1 * other[0]
    now[0, :4] = 90.0
    now[1] = 0.3 * last[1]
    last, now = (x.to(dtype).float() for x in (last, now))
    assert update_turns._repeated(last, now, torch.finfo(dtype).eps).tolist() == [False, True, False]
