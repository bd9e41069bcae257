"""Scales that ranks share: as their sessions declare it, or as it was learned along the mesh."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from detect.merged import merged
from detect.play import causes, play
from detect.scenarios import DOWN, STEPS, Case, _replicas
from detect.trace import Trace

from fp8watch_agent.amax_group import AMAX_RANKS_FACT, encode_ranks
from fp8watch_server.detect.engine import DetectionEngine
from fp8watch_server.detect.finding import Finding
from fp8watch_server.detect.sessions import SessionFacts
from fp8watch_server.incidents.explain import explain

AT = 120
Groups = list[list[int]]
WORLD: Groups = [[0, 1, 2, 3]]
TP: Groups = [[0, 1], [2, 3]]
DP: Groups = [[0, 2], [1, 3]]
ALONE: Groups = [[0], [1], [2], [3]]
MESH = [{"dp": r // 2, "tp": r % 2} for r in range(4)]


def ranks_that_share(groups_at: Callable[[int], Groups], seed: int = 3, recipe: str = "delayed") -> list[Trace]:
    """Four ranks with data of their own, whose scales come from the amax of their group in each step."""
    ranks = _replicas(seed, 4, recipe=recipe)
    amax = np.stack([t.columns["amax_max"] for t in ranks])
    shared = amax.copy()
    for step in range(STEPS):
        for group in groups_at(step):
            shared[group, step] = amax[group, step].max(axis=0)
    for trace, own, seen in zip(ranks, shared, amax, strict=True):
        ratios = [trace.columns[name].copy() for name in ("scale_ratio_max", "tile_noise_ratio_sum")]
        trace.columns["amax_max"] = own
        trace.delayed(history=1)
        trace.columns["amax_max"] = seen
        trace.columns["scale_ratio_max"], trace.columns["tile_noise_ratio_sum"] = ratios
    return ranks


def sessions(ranks: list[Trace], over: Groups | None = None, *, mesh: bool = True) -> list[SessionFacts]:
    facts = (
        [{} for _ in ranks]
        if over is None
        else [{AMAX_RANKS_FACT: encode_ranks(g)} for r in range(4) for g in over if r in g]
    )
    return [
        SessionFacts(session=t.session, rank=t.rank, world_size=4, mesh=m if mesh else {}, facts=f)
        for t, m, f in zip(ranks, MESH, facts, strict=True)
    ]  # fmt: skip


def disagree(ranks: list[Trace], known: list[SessionFacts]) -> list[Finding]:
    return [f for f in causes(play(Case(ranks, 0, [known]))) if f.mode == "cross-rank-disagreement"]


def test_ranks_of_one_group_must_agree_from_the_first_step_on() -> None:
    ranks = ranks_that_share(lambda step: ALONE)
    [found] = disagree(ranks, sessions(ranks, WORLD, mesh=False))
    assert (found.severity, found.step <= 1) == ("critical", True)
    assert found.extra["num_ranks"] == 4
    cause = explain(found, ranks[0].facts).cause
    assert "must be the same on 4 ranks, and is not" in cause
    assert "the process group of its ranks, 0-3, is to reduce amax, and did not" in cause


@pytest.mark.parametrize("declared", [WORLD, TP])
def test_scales_that_are_reduced_as_declared_are_silent(declared: Groups) -> None:
    ranks = ranks_that_share(lambda step: declared)
    assert disagree(ranks, sessions(ranks, declared)) == []


def test_a_group_that_leaves_tensor_parallel_ranks_apart_is_named_with_its_ranks_and_the_axis() -> None:
    ranks = ranks_that_share(lambda step: DP)
    [found] = disagree(ranks, sessions(ranks, DP))
    assert found.extra["blamed"] == ["tp"]
    words = explain(found, ranks[0].facts)
    assert (
        "amax is reduced over ranks 0,2 alone, and others hold parts of the same tensor. It differs along tp."
        in words.cause
    )


def test_a_group_is_held_against_delayed_scales_alone() -> None:
    ranks = ranks_that_share(lambda step: ALONE, recipe="current")
    assert disagree(ranks, sessions(ranks, WORLD)) == []


@pytest.mark.parametrize(("groups", "axis"), [(WORLD, ""), (TP, "tp"), (DP, "dp")])
def test_what_ranks_had_in_common_along_an_axis_they_must_keep(groups: Groups, axis: str) -> None:
    ranks = ranks_that_share(lambda step: groups if step < AT else ALONE)
    [found] = disagree(ranks, sessions(ranks))
    assert AT <= found.step <= AT + 1
    assert found.extra["learned"] == axis
    assert found.extra["num_ranks"] == (4 if axis == "" else 2)
    cause = explain(found, ranks[0].facts).cause
    assert f"was the same on {found.extra['num_ranks']} ranks in 8 samples or more, and is not" in cause


@pytest.mark.parametrize("mesh", [True, False])
def test_ranks_that_never_shared_their_amax_are_not_compared(mesh: bool) -> None:
    ranks = ranks_that_share(lambda step: ALONE)
    assert disagree(ranks, sessions(ranks, mesh=mesh)) == []


def test_of_a_stage_of_a_pipeline_those_ranks_are_compared_that_hold_the_site() -> None:
    ranks = ranks_that_share(lambda step: WORLD)
    site = ranks[0].one(DOWN.replace("1", "0"), "input")
    for trace in ranks[2:]:
        trace.columns["measured"][:, site] = 0
    ranks[1].columns["scale_inv_max"][AT:, site] *= 1.5
    ranks[1].columns["scale_inv_min"][AT:, site] *= 1.5
    [found] = disagree(ranks, sessions(ranks, mesh=False))
    assert (found.step, found.extra["num_ranks"]) == (AT, 2)


def test_a_rank_that_is_not_there_teaches_nothing() -> None:
    """Two ranks that share amax by chance of who is there are not held to it with the others."""
    ranks = ranks_that_share(lambda step: [[0, 1], [2], [3]])
    for trace in ranks[2:]:
        trace.columns["measured"][5:60] = 0
    assert disagree(ranks, sessions(ranks, mesh=False)) == []


def test_rows_of_several_steps_are_not_compared_between_ranks() -> None:
    """Of a large fleet what says nothing new shares a record, and each rank's ends at another step."""
    ranks = [merged(t) for t in ranks_that_share(lambda step: WORLD)]
    assert disagree(ranks, sessions(ranks, WORLD)) == []


def test_a_new_session_learns_anew() -> None:
    ranks = ranks_that_share(lambda step: WORLD if step < AT else ALONE)
    engine = DetectionEngine(ranks[0].facts)
    engine.add_sessions(sessions(ranks))
    found: list[Finding] = []
    for k, trace in enumerate(zip(*(t.batches(8) for t in ranks), strict=True)):
        if k * 8 == AT:
            again = [
                SessionFacts(session=f"{1:030x}{t.rank:02x}", rank=t.rank, world_size=4, mesh=m)
                for t, m in zip(ranks, MESH, strict=True)
            ]
            engine.add_sessions(again)
        for batch in trace:
            found += engine.observe(batch)
    assert [f for f in found if f.mode == "cross-rank-disagreement"] == []


def test_learned_scales_survive_a_restart_of_the_collector() -> None:
    ranks = ranks_that_share(lambda step: TP if step < AT else ALONE)
    engine = DetectionEngine(ranks[0].facts)
    engine.add_sessions(sessions(ranks))
    found: list[Finding] = []
    for k, batches in enumerate(zip(*(t.batches(8) for t in ranks), strict=True)):
        if k * 8 == AT - 8:
            engine = DetectionEngine.load(engine.dump(), ranks[0].facts)
        for batch in batches:
            found += engine.observe(batch)
    assert {f.extra["learned"] for f in found if f.mode == "cross-rank-disagreement"} == {"tp"}


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (range(8), "0-7"), ([2, 0, 1], "0-2"), ([0, 2, 4, 6], "0-6/2"), ([0, 2], "0,2"), ([3], "3"), ([0, 3, 4, 5], "0,3-5"),
    ],
)  # fmt: skip
def test_ranks_of_a_group_are_one_short_line(ranks: list[int], said: str) -> None:
    assert encode_ranks(ranks) == said


def test_a_long_line_of_ranks_is_cut_and_still_its_own() -> None:
    some = [r * r for r in range(200)]
    one, other = encode_ranks(some), encode_ranks([*some[:-1], 50_000])
    assert one != other
    assert max(len(one), len(other)) <= 200
    assert "(200 ranks, " in one
