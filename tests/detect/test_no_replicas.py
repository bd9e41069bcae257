"""Ranks that get no gradients of each other are no replicas: said once, as information. Those that did once must go on to agree."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from detect.folded import Folded, fold
from detect.play import play
from detect.scenarios import OUT, Case, _replicas

from fp8watch_agent.record import Measured
from fp8watch_agent.update_names import GRADIENT_GIVEN, GRADIENT_GOT, GRADIENT_OF, SKETCH_NUMBERS
from fp8watch_server.detect.engine import DetectionEngine
from fp8watch_server.detect.families.gradient_sketches import GradientParts, Sketches, parts_of
from fp8watch_server.detect.sessions import SessionFacts
from fp8watch_server.incidents.explain import explain

AT, EVERY = 120, 10


def trained(
    parts: list[list[int]], *, alone_from: int = 0, alone_to: int = 10**6, averaged: int = EVERY, weights_from: int = 1, mesh: bool = True, looked: bool = True
) -> Case:  # fmt: skip
    """Ranks that hash each weight once in 32 steps, all in the first, and say sketches of a gradient in every fourth.

    Args:
        parts: ranks whose gradients are added up, before `alone_from` and from `alone_to` on those of all.
        averaged: steps between averages, behind which all weights are equal; 0: never.
        weights_from: step from which weights of parts differ.
        mesh: sessions say that all are data-parallel.
        looked: gradients are.
    """
    num = sum(map(len, parts))
    ranks, rng = _replicas(5, num), np.random.default_rng(3)
    steps = np.arange(ranks[0].num_steps)
    weights = np.flatnonzero(ranks[0].mask(operand="weight"))
    apart = (steps >= weights_from) & (steps < alone_to) & ((steps % averaged != 0) if averaged else True)
    for t in ranks:
        mine = next(k for k, part in enumerate(parts) if t.rank in part)
        c = t.columns
        c["weight_hash"] = np.zeros((len(steps), len(t.sites)), dtype=np.int64)
        t.absent_logs = True
        for k, j in enumerate(weights):
            at = (steps % 32 == k * 32 // len(weights)) | (steps == 0)
            c["weight_hash"][:, j] = steps * 977 + k + np.where(apart, mine << 20, 0)
            c["measured"][at, j] |= int(Measured.HASH)
    for step in range(1, len(steps), 4) if looked else ():
        given = rng.normal(0, 1, (num, SKETCH_NUMBERS)) + rng.normal(0, 1, SKETCH_NUMBERS)
        for t in ranks:
            mine = next(part for part in parts if t.rank in part) if alone_from <= step < alone_to else list(range(num))
            told = {f"{GRADIENT_OF}a.{step % 3}": float(num)}
            told |= {f"{GRADIENT_GIVEN}{k}": given[t.rank, k] for k in range(SKETCH_NUMBERS)}
            told |= {f"{GRADIENT_GOT}{k}": given[mine, k].mean() for k in range(SKETCH_NUMBERS)}
            for key, value in told.items():
                t.logs.setdefault(key, np.full(len(steps), np.nan))[step] = value
    sessions = [
        SessionFacts(session=t.session, rank=t.rank, world_size=num, mesh={"dp": t.rank} if mesh else {}) for t in ranks
    ]
    return Case(ranks, 0, [sessions])


def told(case: Case) -> list[Folded]:
    return [i for i in fold(play(case), case.traces[0].facts) if i.mode == "silent-data-corruption"]


def changed(case: Case, rank: int, *, from_step: int = AT, every: bool = False) -> Case:
    """One weight of a rank is changed, or all are."""
    t = case.traces[rank]
    hit = np.flatnonzero(t.mask(operand="weight")) if every else [t.one(OUT, "weight")]
    t.columns["weight_hash"][from_step:, hit] ^= 1 << 17
    return case


ALONE = [[0], [1]]
PAIRS = [[0, 1], [2, 3]]


@pytest.mark.parametrize("mesh", [True, False])
@pytest.mark.parametrize(
    ("parts", "averaged"), [(ALONE, EVERY), (ALONE, 0), ([[0], [1], [2]], EVERY), (PAIRS, EVERY), (ALONE, 2)]
)
def test_ranks_that_get_no_gradients_of_each_other_are_one_information(parts, averaged, mesh) -> None:
    case = trained(parts, averaged=averaged, mesh=mesh)
    [found] = told(case)
    assert (found.severity, found.first.extra["kind"]) == ("info", "no-replicas")
    assert len([f for f in play(case) if f.extra.get("kind") == "no-replicas"]) == 1
    words = explain(found.first, case.traces[0].facts)
    assert f"train {len(parts)} sets of weights" in words.title
    assert "local SGD" in words.cause
    assert "nothing" in words.fix[0]["text"]
    by = {e.field: e for e in found.first.evidence}
    assert by["gradients_apart"].value > 0.1
    assert by["gradients_apart"].since_step == 1
    assert by["parts"].value == len(parts)


@pytest.mark.parametrize("mesh", [True, False])
@pytest.mark.parametrize("every", [True, False], ids=["all weights", "one weight"])
def test_ranks_that_shared_gradients_must_agree(mesh, every) -> None:
    case = changed(trained([[0, 1]], weights_from=10**6, mesh=mesh), 1, every=every)
    found = told(case)[0]
    assert (found.severity, found.first.extra["by_hash"]) == ("critical", True)
    assert found.first.step >= AT


def test_ranks_that_share_gradients_no_more_are_no_local_training() -> None:
    found = told(trained(ALONE, alone_from=8, averaged=0, weights_from=8))
    assert "critical" in {i.severity for i in found if i.first.extra.get("by_hash")}


def test_ranks_that_share_gradients_at_last_must_agree_from_then_on() -> None:
    """As where local steps warm up a training of replicas."""
    case = changed(trained(ALONE, alone_to=32, averaged=0), 1, every=True)
    found = [f for f in play(case) if f.severity == "critical"]
    assert found[0].extra["by_hash"]
    assert found[0].step >= AT


def test_weights_that_differ_where_no_gradient_was_looked_at_are_told_as_ever() -> None:
    assert told(trained(ALONE, looked=False))[0].severity == "critical"


def test_a_weight_that_differs_within_a_part_is_told_with_the_rank_and_the_steps() -> None:
    found = [f for f in play(changed(trained([[0, 1, 2], [3, 4, 5]]), 4)) if f.severity == "critical"]
    assert found[0].extra["odd_ranks"] == [4]
    assert found[0].extra["num_replicas"] == 3
    assert 0 < found[0].extra["last_agreed"] < AT <= found[0].step


def test_weights_that_something_else_keeps_equal_must_agree() -> None:
    """An optimizer that shares updates, and not gradients."""
    for from_step in (AT, 10):  # so early that it is not known yet
        found = [
            f
            for f in play(changed(trained(ALONE, weights_from=10**6), 1, from_step=from_step))
            if f.severity == "critical"
        ]
        assert found[0].extra["by_hash"]
        assert found[0].extra["last_agreed"] < from_step


@pytest.mark.parametrize("from_step", [40, AT])
def test_weights_that_something_else_kept_equal_and_does_no_more_stay_told(from_step: int) -> None:
    case = changed(trained(ALONE, weights_from=10**6), 1, from_step=from_step, every=True)
    found = [f for f in play(case) if f.mode == "silent-data-corruption"]
    assert {f.severity for f in found} == {"critical"}
    assert found[-1].step > case.traces[0].num_steps - 8, "it goes on"


def silent_at_first(case: Case, looks: int) -> Case:
    """The first gradients that are looked at are 0 on one rank, as of an embedding's rows that it has no token of."""
    for k in range(SKETCH_NUMBERS):
        for what in (GRADIENT_GIVEN, GRADIENT_GOT):
            case.traces[1].logs[f"{what}{k}"][: 1 + 4 * looks] *= 0.0
    return case


@pytest.mark.parametrize("by", [1, 10], ids=["by ones", "by tens"])
@pytest.mark.parametrize("looks", [1, 3])
def test_a_first_look_that_tells_nothing_makes_no_page(looks: int, by: int) -> None:
    case = silent_at_first(trained(ALONE), looks)
    for t in case.traces:
        t.steps["step"] *= by
    [found] = told(case)
    assert (found.severity, found.first.extra["kind"]) == ("info", "no-replicas")


def test_where_no_look_ever_tells_weights_that_differ_are_told_all_the_same() -> None:
    [found] = told(silent_at_first(trained(ALONE), 1000))
    assert (found.severity, found.first.step) == ("critical", 18)


def test_ranks_that_are_no_replicas_in_the_next_attempt_either_are_told_again() -> None:
    first, again = trained(ALONE), trained(ALONE)
    engine = DetectionEngine(first.traces[0].facts)
    for t in again.traces:
        t.steps["step"] += t.num_steps
        t.session = f"{t.session[:-4]}ab{t.session[-2:]}"
    again.sessions = [
        [replace(s, session=t.session, attempt=1) for s, t in zip(again.sessions[0], again.traces, strict=True)]
    ]
    for case in (first, again):
        found = [f for f in play(case, engine=engine) if f.mode == "silent-data-corruption"]
        assert [f.extra["kind"] for f in found] == ["no-replicas"]


def test_which_rank_is_named_does_not_hang_on_who_came_first() -> None:
    case = trained(PAIRS)
    case.traces.reverse()
    assert told(case)[0].first.rank == told(trained(PAIRS))[0].first.rank == 2


def sketches(got, given=None) -> Sketches:
    given = np.random.default_rng(1).normal(0, 1, (4, SKETCH_NUMBERS)) if given is None else given
    return Sketches((0, 1, 2, 3), given, got(given), (0, 1, 2, 3))


def own(given):
    return 0.5 * given


def of_pairs(given):
    return np.repeat([given[:2].sum(axis=0), given[2:].sum(axis=0)], 2, axis=0)


def shared(given):
    return np.tile(given.mean(axis=0), (4, 1))


def one_alone(given):
    return np.stack([given[:3].sum(axis=0)] * 3 + [given[3]])


def broken(given):
    got = given.copy()
    got[2] += np.random.default_rng(2).normal(0, 1, SKETCH_NUMBERS)
    return got


@pytest.mark.parametrize(
    ("got", "parts"),
    [
        (own, [[0], [1], [2], [3]]),
        (of_pairs, [[0, 1], [2, 3]]),
        (shared, [[0, 1, 2, 3]]),
        (one_alone, []),
        (broken, []),
    ],
)
def test_who_got_whose_gradients(got, parts) -> None:
    assert parts_of(sketches(got)) == parts


def test_gradients_that_are_alike_or_0_do_not_tell_whose_they_are() -> None:
    alike = np.outer([1.0, 2.0, -3.0, 0.5], np.random.default_rng(1).normal(0, 1, SKETCH_NUMBERS))
    given = np.random.default_rng(1).normal(0, 1, (4, SKETCH_NUMBERS))
    assert parts_of(sketches(own, alike)) == []
    assert parts_of(sketches(own, given * [[1.0], [0.0], [1.0], [1.0]])) == []
    assert parts_of(sketches(lambda g: 0 * g, given)) == []
    assert parts_of(Sketches((0, 1, 2, 3), given, given[:1], (0,))) == []


def test_a_rank_that_is_not_known_and_a_new_session_are_of_one_part() -> None:
    parts = GradientParts()
    parts._part, parts.num_looks = {0: 0, 1: 1}, 1
    assert parts.split([0, 1]) == [[0], [1]]
    assert parts.split([0, 1, 2]) == [[0, 1, 2]]
    parts.forget()
    assert parts.split([0, 1]) == [[0, 1]]
