"""Optimizers that step behind each other of the same backward: an update of several is one step, whoever sits it out."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

import fp8watch
from fp8watch.session.companions import RATE_STAYS, Companions
from fp8watch_agent.record import StepStatus

NUM = 12


def both(i, backward, first, second):
    backward()
    first.step()
    second.step()


def every_other(i, backward, first, second):
    backward()
    first.step()
    if i % 2:
        second.step()


def every_third(i, backward, first, second):
    backward()
    first.step()
    if i % 3 == 2:
        second.step()


def every_other_ahead(i, backward, first, second):
    backward()
    if i % 2:
        second.step()
    first.step()


def in_turns(i, backward, first, second):
    backward()
    for optimizer in (first, second) if i % 2 else (second, first):
        optimizer.step()


def begins_late(i, backward, first, second):
    backward()
    first.step()
    if i >= 5:
        second.step()


def ends_early(i, backward, first, second):
    backward()
    first.step()
    if i < 5:
        second.step()


def two_backwards(i, backward, first, second):
    backward()
    first.step()
    backward()
    second.step()


def made():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    first = torch.optim.SGD(model[0].parameters(), lr=1e-2)
    second = torch.optim.AdamW(model[2].parameters(), lr=1e-3)
    return model, first, second


def trained(watch, model, loop: Callable[..., None], optimizers, num: int = NUM) -> None:
    def backward() -> None:
        model(torch.randn(16, 64)).square().mean().backward()

    for i in range(num):
        loop(i, backward, *optimizers)
    watch.detach()  # a step whose companion sits out ends where training does


def told(watch):
    return [(int(h["step"]), StepStatus(int(h["status"])).name) for h, *_ in watch._recorder.steps]


LOOPS = [both, every_other, every_third, every_other_ahead, in_turns, begins_late, ends_early]


@pytest.mark.parametrize("loop", LOOPS)
def test_an_update_of_several_is_one_step_whoever_sits_it_out(attach, loop) -> None:
    model, *optimizers = made()
    watch = attach(model, recipe="observe", overhead_budget=None)
    trained(watch, model, loop, optimizers)
    assert told(watch) == [(i, "OK") for i in range(NUM)]
    calls = [{int(row["num_calls"]) for row in watch._recorder.step(i)[1].values()} for i in range(NUM)]
    assert calls == [{1}] * NUM
    assert len({float(h["lr"]) for h, *_ in watch._recorder.steps}) == 1, "of whoever is first or last it would jump"


@pytest.mark.parametrize(
    ("each", "closed"),
    [(1, [1, 1, 2, 3, 4, 5, 6, 7]), (2, [1, 2, 2, 3, 4, 5, 6, 7])],
    ids=["always", "every-other"],
)
def test_the_last_of_them_ends_the_step(attach, each, closed) -> None:
    """So that what it does to the weights is of that step, and of none behind it. In its first step nothing is known of it, and one
    that it sits out ends as the next forward begins."""
    model, *optimizers = made()
    watch, found = attach(model, recipe="observe"), []

    def loop(i, backward, first, second):
        backward()
        first.step()
        found.append(watch.summary()["num_steps"])
        if i % each == each - 1:
            second.step()

    trained(watch, model, loop, optimizers, 8)
    assert found == closed


@pytest.mark.parametrize("loop", LOOPS)
def test_of_those_that_attach_was_given_all_are_waited_for_until_they_are_known(attach, loop) -> None:
    model, *optimizers = made()
    watch = attach(model, recipe="observe", optimizer=optimizers)
    trained(watch, model, loop, optimizers)
    waits = loop not in (both, in_turns, ends_early)
    assert watch.summary()["num_steps"] == NUM - waits


@pytest.mark.parametrize("named", [True, False])
def test_two_that_have_a_backward_each_are_waited_for(attach, named) -> None:
    model, *optimizers = made()
    watch = attach(model, recipe="observe", **({"optimizer": optimizers} if named else {}))
    trained(watch, model, two_backwards, optimizers)
    assert watch.summary()["num_steps"] == NUM + (not named)


def test_a_step_in_which_a_scaler_skips_one_of_two_has_ended(attach) -> None:
    model, *optimizers = made()
    watch = attach(model, recipe="observe")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for i in range(6):
        scaler.scale(model(torch.randn(16, 64)).square().mean()).backward()
        if i == 3:
            model[2].weight.grad.fill_(float("inf"))
        if i == 4:
            model[0].weight.grad.fill_(float("inf"))
            model[2].weight.grad.fill_(float("inf"))
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
    assert told(watch) == [(i, "SKIPPED" if i == 4 else "OK") for i in range(6)]


def test_what_is_saved_has_the_number_of_the_step_that_is_still_open(attach, tmp_path) -> None:
    model, *optimizers = made()
    watch = attach(model, recipe="observe")

    def loop(i, backward, first, second):
        every_other(i, backward, first, second)
        if i == 8:
            torch.save(model.state_dict(), tmp_path / "checkpoint.pt")
        if i == 6:
            assert watch.state_dict(contents=False)["step"] == 7

    trained(watch, model, loop, optimizers)
    assert watch.last_good_checkpoint == 8
    assert told(watch) == [(i, "OK") for i in range(NUM)]


def test_a_step_that_is_still_open_keeps_no_watch_alive() -> None:
    def abandoned():
        model, *optimizers = made()
        watch = fp8watch.attach(model, recipe="observe", collector=None)
        for i in range(9):
            every_other(i, lambda: model(torch.randn(16, 64)).square().mean().backward(), *optimizers)
        assert watch._plan.step.on_forward is not None
        return weakref.ref(watch)

    watch = abandoned()
    gc.collect()
    assert watch() is None


def test_the_rate_of_one_that_steps_no_more_is_told_no_longer() -> None:
    _, first, second = made()
    them = Companions()
    for optimizer in (first, second):
        them.meet(optimizer)
    them.follow(second, [], first, ran=False, same=False)
    assert them.all_of([first, second])
    assert them.tells_rate(first)
    assert [them.tells_rate(second) for _ in range(RATE_STAYS + 1)] == [False] * RATE_STAYS + [True]
    assert them.tells_rate(first)
    assert not them.tells_rate(second)
