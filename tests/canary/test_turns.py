"""Whose turn it is, what that may cost, and that nothing else changes by it."""

from __future__ import annotations

import pytest
import torch
from canary.conftest import Small
from torch import nn
from torch._dynamo.backends.debugging import aot_eager

from fp8watch.observer.canary import FIRST_STEPS, LEAST_SHARE, SHARE, Canary
from fp8watch_agent.record import Measured


@pytest.fixture
def clock():
    """A clock that only the test moves."""
    return [100.0]


def begin(canary, now):
    """As a step begins: asked only where it is due, or its turn is over."""
    if canary.turn or now >= canary.due:
        canary.begin_step(now)


def turns(canary, steps, clock, *, cost_s=0.0, step_s=1.0):
    found = []
    for _ in range(steps):
        begin(canary, clock[0])
        found.append(sorted(canary.turn))
        for first in canary.turn:
            canary.takes(first, "operand")
            canary.spent_s += cost_s
        clock[0] += step_s
    return found


@pytest.mark.parametrize("num", [1, 5, 16, 17, 100])
def test_each_module_has_a_turn_in_the_first_steps(clock, num):
    canary = Canary()
    canary.cover([5 * i for i in range(num)], 5)
    first = [module for turn in turns(canary, FIRST_STEPS, clock, cost_s=10.0) for module in turn]
    assert first == [5 * i for i in range(num)]


def test_then_one_after_the_other_within_its_share_of_the_time(clock):
    canary = Canary()
    canary.cover([5 * i for i in range(4)], 5)
    turns(canary, 4, clock, cost_s=0.006)
    later = turns(canary, 400, clock, cost_s=0.006)
    assert all(len(turn) <= 1 for turn in later)
    shown = [turn[0] for turn in later if turn]
    assert shown[:5] == [0, 5, 10, 15, 0]
    assert 0.4 * SHARE < len(shown) * 0.006 / 400 <= SHARE


def test_what_they_take_is_told_for_the_budget(clock):
    canary = Canary()
    assert canary.taken == 0.0, "no modules, no turns"
    canary.cover([5 * i for i in range(4)], 5)
    turns(canary, 4, clock, cost_s=50.0)
    assert canary.taken == SHARE, "the sweep of the first steps is no turn like others"
    clock[0] += 20000.0
    turns(canary, 100, clock, cost_s=0.006)
    assert 0.4 * SHARE < canary.taken <= SHARE
    canary.follow(40)
    turns(canary, 4, clock, cost_s=50.0)
    assert canary.taken <= SHARE


def test_their_pace_is_told_within_bounds_and_neighbouring_figures_change_nothing(clock):
    canary = Canary()
    canary.cover([5 * i for i in range(4)], 5)
    for told, share in ((1.0, SHARE), (-1.0, LEAST_SHARE), (0.0011, LEAST_SHARE), (0.002, 0.002), (0.0017, 0.002)):
        canary.pace(told)
        assert canary.share == canary.taken == share
    turns(canary, 4, clock)
    later = [turn[0] for turn in turns(canary, 400, clock, cost_s=0.006) if turn]
    assert 0.4 * 0.002 < len(later) * 0.006 / 400 <= 0.0021


def test_what_happens_gives_each_a_turn_again(clock):
    canary = Canary()
    canary.cover([5 * i for i in range(3)], 5)
    turns(canary, 3, clock, cost_s=50.0)
    assert turns(canary, 3, clock) == [[], [], []]
    canary.follow(40)
    assert [t for turn in turns(canary, 3, clock, cost_s=50.0) for t in turn] == [0, 5, 10]
    canary.follow(40)
    assert turns(canary, 3, clock) == [[], [], []]


def test_a_module_that_is_not_called_does_not_keep_the_others_waiting(clock):
    canary = Canary()
    canary.cover([5 * i for i in range(2)], 5)
    seen = []
    for _ in range(6):
        begin(canary, clock[0])
        seen.append(sorted(canary.turn))
    assert seen == [[0], [0], [0], [5], [5], [5]]


def test_each_operand_and_gemm_is_looked_at_once_in_a_turn(train) -> None:
    class Twice(Small):
        def forward(self, x):
            return super().forward(x) + super().forward(x)

    line, _ = train(3, model=Twice())
    rows = [row for rows in line.rows for row in rows.values() if row["measured"] & Measured.QUANTISER]
    assert len(rows) == 14  # the input of `a` has no gradient, so nobody reads its grad_output rowwise
    assert {int(row["num_checked_tiles"]) for row in rows} <= set(range(1, 34))


def test_losses_and_weights_are_those_of_a_run_without_turns(train) -> None:
    """Not the bits of the numbers only: no random number is drawn."""
    made = []
    for share in (1.0, 0.0):
        _, watch = train(12, share=share, before=None if share else no_turns)
        made.append([p.detach().clone() for p in watch._model.parameters()])
        watch.detach()
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


def no_turns(watch):
    watch._plan.canary.firsts, watch._plan.canary.turn = (), frozenset()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch traces its own
def test_under_compile_turns_change_and_nothing_is_compiled_again(train) -> None:
    model, graphs = nn.Sequential(nn.Linear(160, 64), nn.Tanh(), nn.Linear(64, 96), nn.Linear(96, 64)), []
    line, watch = train(0, model=model)

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    run = torch.compile(model, fullgraph=True, backend=backend)
    for _ in range(4):
        run(torch.randn(32, 160)).square().mean().backward()
        watch.step()
    assert len(graphs) == 1
    checked = [
        {line.sites[i].module for i, row in rows.items() if row["measured"] & Measured.QUANTISER} for rows in line.rows
    ]
    multiplied = [
        {line.sites[i].module for i, row in rows.items() if row["measured"] & Measured.GEMM} for rows in line.rows
    ]
    assert checked[:3] == multiplied[:3] == [{"0"}, {"2"}, {"3"}]


def test_nothing_is_looked_at_while_paused_or_left_out(train) -> None:
    line, watch = train(2, before=lambda watch: watch.pause())
    assert not line.rows
    watch.resume()
    line, _ = train(6, sites=["b.*"])
    found = {
        line.sites[i].module for rows in line.rows for i, row in rows.items() if row["measured"] & Measured.QUANTISER
    }
    assert found == {"b"}


def test_an_output_that_is_not_finite_claims_no_error_of_a_gemm(train) -> None:
    """What was not held against a shadow has no error, not an error of 0."""
    model = nn.Sequential(nn.Linear(160, 64))
    line, watch = train(0, model=model, before=no_turns)
    with torch.no_grad():
        model[0].bias[3] = torch.inf
    model(torch.randn(32, 160)).sum().backward()
    watch.step()
    (row,) = [row for row in line.rows[-1].values() if row["num_nonfinite_outputs"]]
    assert row["num_nonfinite_outputs"] == 32
    assert not row["measured"] & Measured.GEMM
    assert row["measured"] & Measured.OUTPUTS
    assert line.said()[0][0] == "kernel-output-fault"
