"""Gradients that several processes give, and what their optimizers get: told where they do not add up, silent elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
from detect.folded import Folded, fold
from detect.play import play
from detect.scenarios import STEPS, Case, _replicas
from detect.trace import Trace

from fp8watch_agent.update_names import GRADIENT_GIVEN, GRADIENT_GOT, GRADIENT_OF, GROUP, SKETCH_NUMBERS
from fp8watch_server.detect.modes.silent_data_corruption.gradient_sums import judge
from fp8watch_server.incidents.explain import explain

AT, TURNS = 120, range(1, STEPS, 4)
NUM = 4


def ranks_with(
    change, *, num: int = NUM, rounding: float = 1e-3, last_stops: bool = False, names: int = 3, in_parts: bool = False
) -> list[Trace]:
    """Ranks that say sketches of a few parameters in turn; `change(step, given, got)` returns what they got, in place or anew. `in_parts`: only
    one of them in each turn says what it got."""
    rng = np.random.default_rng(7)
    ranks = _replicas(5, num)
    module = next(f.module for f in ranks[0].facts.values() if f.operand == "weight")
    parameters = [f"{module}.weight", *(f"elsewhere.{k}.bias" for k in range(names - 1))]
    for t in ranks:
        t.absent_logs = True
    for turn, step in enumerate(TURNS):
        name = parameters[turn % names]
        given = rng.normal(0, 1, (num, SKETCH_NUMBERS)) + rng.normal(0, 1, SKETCH_NUMBERS)
        got = np.tile(given.sum(axis=0) / num * rng.uniform(0.1, 1), (num, 1))
        got = change(step, given, got * (1 + rng.normal(0, rounding, SKETCH_NUMBERS)))
        for r, t in enumerate(ranks):
            if last_stops and step >= AT and r == num - 1:
                continue
            told = {GRADIENT_OF + name: float(num)}
            told |= {f"{GRADIENT_GIVEN}{k}": given[r, k] for k in range(SKETCH_NUMBERS)}
            if not in_parts or turn % num == r:
                told |= {f"{GRADIENT_GOT}{k}": got[r, k] for k in range(SKETCH_NUMBERS)}
            for key, value in told.items():
                t.logs.setdefault(key, np.full(STEPS, np.nan))[step] = value
    return ranks


def incidents(ranks: list[Trace]) -> list[Folded]:
    return fold(play(Case(ranks, AT)), ranks[0].facts)


def as_it_is(_step, _given, got):
    return got


def since(change):
    return lambda step, given, got: change(given, got) if step >= AT else got


def one_is_other(_given, got):
    got[2] = np.arange(SKETCH_NUMBERS) - 3.0
    return got


BREAKS = {
    "missing": (lambda given, got: got * 0 + given[[0, 1, 3]].sum(axis=0), "The gradient of rank 2 is missing in the sum over 4 processes since step 121"),
    "twice": (lambda given, got: got * 0 + given.sum(axis=0) + given[2], "The gradient of rank 2 is counted twice in the sum over 4 processes since step 121"),
    "one": (one_is_other, "The optimizer of rank 2 gets another gradient than those of the other processes since step 121"),
    "own": (lambda given, got: given * 0.5, "Gradients are not added up over 4 processes since step 121: each steps with its own"),
    "apart": (lambda given, got: got + np.arange(SKETCH_NUMBERS), "Gradients of 4 processes do not add up to what their optimizers get, since step 121"),
}  # fmt: skip


@pytest.mark.parametrize("how", BREAKS)
def test_what_does_not_add_up_is_told_with_its_process(how: str) -> None:
    change, title = BREAKS[how]
    ranks = ranks_with(since(change))
    [incident] = [i for i in incidents(ranks) if i.first.mode == "silent-data-corruption"]
    first = incident.first
    assert (first.severity, first.onset, first.extra["how"]) == ("warning", 121, how)
    assert first.step == (121 if how in ("missing", "twice", "one") else 125), (
        "what names nobody is told at its second look"
    )
    assert incident.last_step > STEPS - 10, "it goes on"
    said = explain(first, ranks[0].facts)
    assert said.title == title
    assert "FP8 is not the cause" in said.cause
    assert "communication hook" in said.fix[0]["text"]
    if how in ("missing", "twice", "one"):
        assert first.rank == 2


def test_of_processes_that_share_some_gradients_the_one_that_is_missing_is_told_with_the_parameters_own_name() -> None:
    """As of one part of a weight beside tensor parallelism, whose other part is right."""
    rng = np.random.default_rng(7)
    ranks = _replicas(5, NUM)
    weight = next(f.module for f in ranks[0].facts.values() if f.operand == "weight") + ".weight"
    for t in ranks:
        t.absent_logs = True
    for step in TURNS:
        given = rng.normal(0, 1, (NUM, SKETCH_NUMBERS)) + rng.normal(0, 1, SKETCH_NUMBERS)
        for group in ((0, 2), (1, 3)):
            for rank in group:
                got = given[1] if step >= AT and group[0] else given[list(group)].sum(axis=0)
                told = {f"{GRADIENT_OF}{weight}{GROUP}{group[0]}": 2.0}
                told |= {f"{GRADIENT_GIVEN}{k}": given[rank, k] for k in range(SKETCH_NUMBERS)}
                told |= {f"{GRADIENT_GOT}{k}": got[k] for k in range(SKETCH_NUMBERS)}
                for key, value in told.items():
                    ranks[rank].logs.setdefault(key, np.full(STEPS, np.nan))[step] = value
    [incident] = [i for i in incidents(ranks) if i.first.mode == "silent-data-corruption"]
    first, said = incident.first, explain(incident.named, ranks[0].facts)
    assert (first.onset, first.rank, first.extra["num"]) == (121, 3, 1)
    assert said.title == "The gradient of rank 3 is missing in the sum over 2 processes since step 121"
    assert f"a linear sketch of {weight}, of what" in said.cause
    assert first.site is not None, "its place is the weight"


PARTS = {
    "missing": (0, 2, "The gradient of rank 2 is missing in the sum over 4 processes since step 121"),
    "own": (0, 2, "The optimizer of rank 2 gets its own gradient since step 121, not the sum over 4 processes"),
    "apart": (4, None, "Gradients of 4 processes do not add up to what their optimizers get, since step 121"),
}


@pytest.mark.parametrize("how", PARTS)
def test_of_a_sum_that_is_kept_in_parts_who_holds_one_says_what_it_got(how: str) -> None:
    change, (later, rank, title) = BREAKS[how][0], PARTS[how]
    ranks = ranks_with(since(change), in_parts=True)
    first, *more = [i.first for i in incidents(ranks) if i.first.mode == "silent-data-corruption"]
    assert not more
    assert (first.step, first.onset, first.severity, first.extra["holders"]) == (
        121 + later,
        121,
        "warning",
        [3 if later else 2],
    )
    said = explain(first, ranks[0].facts)
    assert said.title == title
    assert f"(the rows that rank {3 if later else 2} holds)" in said.cause
    if rank is not None:
        assert first.rank == rank


def test_where_one_parameter_after_the_other_is_wrong_at_its_first_look_that_is_news() -> None:
    ranks = ranks_with(since(BREAKS["missing"][0]), names=1000)
    [incident] = [i for i in incidents(ranks) if i.first.mode == "silent-data-corruption"]
    assert (incident.first.onset, incident.first.step, incident.last_step) == (
        121,
        129,
        TURNS[-1] - (TURNS[-1] - 129) % 8,
    )
    said = explain(incident.first, ranks[0].facts)
    assert said.title == BREAKS["missing"][1]
    assert "at earlier looks those of 28 others were not" in said.cause


def test_parts_that_one_process_alone_gets_wrong_are_seen_again_in_its_next_turn() -> None:
    def change(step, given, got):
        got[2] = np.arange(SKETCH_NUMBERS) - 3.0
        return got

    ranks = ranks_with(since(lambda given, got: change(0, given, got)), in_parts=True)
    [incident] = [i for i in incidents(ranks) if i.first.mode == "silent-data-corruption"]
    assert (incident.first.onset, incident.first.step, incident.first.extra["holders"]) == (121, 121 + 4 * NUM, [2])


@pytest.mark.parametrize(
    "ranks",
    [
        lambda: ranks_with(as_it_is),
        lambda: ranks_with(lambda step, given, got: got + 3.0),
        lambda: ranks_with(as_it_is, last_stops=True),
        lambda: ranks_with(lambda step, given, got: got + 3.0 if step == 121 else got),
        lambda: ranks_with(as_it_is, rounding=0.02),
        lambda: ranks_with(lambda step, given, got: got + 3.0 if step > 20 else got),
        lambda: ranks_with(lambda step, given, got: got + 3.0 if step % 32 == 17 else got, names=1000),
        lambda: ranks_with(lambda step, given, got: got + 3.0 if step in (121, 125) else got, names=1000),
        lambda: ranks_with(lambda step, given, got: got + 3.0 if step > 120 or step % 28 == 1 else got, names=1000),
        lambda: ranks_with(as_it_is, in_parts=True),
        lambda: ranks_with(as_it_is, rounding=0.02, in_parts=True),
    ],
    ids=[
        "adds-up",
        "never-did",
        "one-says-nothing-more",
        "once",
        "rounds-more",
        "too-early",
        "some-never",
        "two-in-a-row",
        "too-many-never",
        "parts",
        "parts-round-more",
    ],
)
def test_what_is_no_sum_or_not_known_is_silent(ranks) -> None:
    assert [i for i in incidents(ranks()) if i.first.mode == "silent-data-corruption"] == []


def test_a_rank_is_named_only_where_no_other_fits() -> None:
    rng = np.random.default_rng(1)
    given = rng.normal(0, 1, (4, SKETCH_NUMBERS))
    given[3] = given[2]  # the same data on two: who is missing cannot be told
    got = np.tile(given[:3].sum(axis=0), (4, 1))
    verdict = judge((0, 1, 2, 3), given, got)
    assert verdict is not None
    assert (verdict.how, verdict.ranks) == ("apart", ())
    lost = judge((0, 1, 2, 3), given, got * 0)
    assert lost is not None
    assert lost.apart == 1
    assert judge((0, 1), given[:2] * 0, given[:2]) is None
