"""Light records in order are rounded inside their bounds; whatever is wrong, and every full record, keeps every bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from store.kit import SITES, UP, Feed

from fp8watch_agent.column_words import expected_scale_inv
from fp8watch_agent.record import Measured
from fp8watch_server.detect.families.invariant import TOLERANCE
from fp8watch_server.pipeline.replay import replay
from fp8watch_server.store import queries
from fp8watch_server.store.fields import SERIES_FIELDS
from fp8watch_server.store.light_rounding import WITHIN, WRONG, round_light, round_ratio, round_smallest

LIGHT = int(Measured.COUNTS | Measured.AMAX | Measured.SCALE | Measured.RATIO)
AMAX_WITHIN = WITHIN["amax_min_nonzero"]
NO_ROOM = np.float32(np.inf)
Floats = npt.NDArray[np.float32]
ODD = np.array(
    [0, -0.0, np.inf, -np.inf, np.nan, -1, -0.7, 1e-45, 1.1e-38, 0.5, 1, 1 + 2.0**-23, 448, 3.4028235e38, 0.3],
    np.float32,
)


def between(low: float, high: float) -> Floats:
    """Every float32 from `low` to below `high`."""
    first, last = np.array([low, high], np.float32).view(np.uint32).tolist()
    return np.arange(first, last, dtype=np.uint32).view(np.float32)


def words(values: Floats) -> npt.NDArray[np.uint32]:
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


def test_every_ratio_within_the_invariant_stays_within_it() -> None:
    ratios = between(0.5, 1)
    rounded = round_ratio(ratios)
    assert rounded[0] == 0.5, "what is on a bound stays there"
    ratios, rounded = ratios[1:], rounded[1:]
    assert rounded.dtype == np.float32
    assert rounded.min() > 0.5
    assert rounded.max() == 1.0
    assert (np.abs(rounded.astype(float) - ratios) <= WITHIN["scale_ratio_min"] * ratios.astype(float)).all()
    assert (np.diff(rounded) >= 0).all(), "so the largest of several ranks is the same, whichever is taken first"
    assert np.array_equal(words(round_ratio(rounded)), words(rounded))
    assert len(np.unique(rounded)) <= 258


def test_a_ratio_outside_keeps_every_bit() -> None:
    rng = np.random.default_rng(0)
    outside = np.concatenate([ODD, rng.integers(0, 1 << 32, 1 << 20, dtype=np.uint32).view(np.float32)])
    outside = outside[~((outside > 0.5) & (outside < 1))]
    assert np.array_equal(words(round_ratio(outside)), words(outside))


def test_the_smallest_amax_keeps_its_side_of_where_its_scale_changes() -> None:
    for exponent in (-126, 8, 127):
        amax = np.ldexp(between(1, 2), exponent).astype(np.float32)
        rounded = round_smallest(amax, np.full_like(amax, np.finfo(np.float32).max))
        assert np.isfinite(rounded).all()
        assert np.array_equal(expected_scale_inv(words(rounded)), expected_scale_inv(words(amax)))
        for turn in (1.5, 1.75):
            assert np.array_equal(rounded > np.ldexp(turn, exponent), amax > np.ldexp(turn, exponent))
        error = np.abs(rounded.astype(float) - amax)
        assert (error <= AMAX_WITHIN * amax.astype(float)).all()
        assert (np.diff(rounded) >= 0).all()
        assert np.array_equal(words(round_smallest(rounded, np.full_like(amax, NO_ROOM))), words(rounded))
        coarse = words(amax) & 0xFFFF == 0
        assert np.array_equal(rounded[coarse], amax[coarse]), "a bfloat16 is not changed"


def test_the_smallest_amax_is_never_above_the_largest() -> None:
    rng = np.random.default_rng(1)
    amax = np.concatenate([between(1.7499, 1.7511), between(1.4999, 1.5011), np.exp2(rng.normal(0, 9, 1 << 18))])
    amax = amax.astype(np.float32)
    ulps = rng.integers(0, 3000, len(amax), dtype=np.uint32)
    largest = (words(amax) + np.where(rng.random(len(amax)) < 0.3, 0, ulps).astype(np.uint32)).view(np.float32)
    rounded = round_smallest(amax, largest)
    assert (rounded <= largest).all()
    assert (np.abs(rounded.astype(float) - amax) <= AMAX_WITHIN * amax.astype(float)).all()
    assert np.array_equal(words(round_smallest(rounded, largest)), words(rounded))
    assert np.array_equal(expected_scale_inv(words(rounded)), expected_scale_inv(words(amax)))


def test_what_is_no_normal_amax_keeps_every_bit() -> None:
    rng = np.random.default_rng(2)
    amax = np.concatenate([ODD, rng.integers(0, 1 << 32, 1 << 20, dtype=np.uint32).view(np.float32)])
    normal = np.isfinite(amax) & (amax >= np.finfo(np.float32).smallest_normal)
    same = round_smallest(amax, np.full_like(amax, NO_ROOM))
    assert np.array_equal(words(same[~normal]), words(amax[~normal]))
    positive = amax[amax > 0]
    for largest in (np.nextafter(positive, np.float32(0)), np.full_like(positive, np.nan)):
        assert np.array_equal(words(round_smallest(positive, largest)), words(positive)), "no record has such extremes"


def some(n: int, rng: np.random.Generator) -> dict[str, Any]:
    """Records in order, as float32 has them."""
    amax = np.exp2(rng.normal(-3, 4, n)).astype(np.float32)
    ratios = np.sort(rng.uniform(0.5, 1, (n, 2)).astype(np.float32), axis=1)
    ratios[:, 0] = np.maximum(ratios[:, 0], np.nextafter(np.float32(0.5), np.float32(1)))
    return {
        "amax_min_nonzero": amax,
        "amax_max": (amax * np.exp2(rng.exponential(2, n)).astype(np.float32)).astype(np.float32),
        "scale_ratio_min": ratios[:, 0].copy(),
        "scale_ratio_max": ratios[:, 1].copy(),
    }


@pytest.mark.parametrize("name", [*WRONG, "measured"])
def test_a_record_that_counts_anything_wrong_or_is_full_keeps_every_bit(name: str) -> None:
    rng = np.random.default_rng(3)
    sent = {**some(64, rng), "measured": np.full(64, LIGHT, np.int32)}
    odd = rng.random(64) < 0.5
    sent[name] = np.where(odd, LIGHT | Measured.ENERGIES, LIGHT) if name == "measured" else odd.astype(np.int64) * 3
    rounded = dict(sent)
    round_light(rounded, sent, slice(None))
    for of in WITHIN:
        assert np.array_equal(words(rounded[of][odd]), words(sent[of][odd])), of
        assert (words(rounded[of][~odd]) != words(sent[of][~odd])).mean() > 0.9, of
    assert np.array_equal(rounded["amax_max"], sent["amax_max"])


def exact_or_rounded(feed: Feed, field: str, **given: Any) -> list[float]:
    with feed.engine.connect() as conn:
        return list(queries.series(conn, "run-1", UP.id, field, points=1000, **given)["values"])


def sent_to(feed: Feed, rank: int, rng: np.random.Generator, full: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """300 steps of three sites by one rank, in order; of those of `full` [300] full records."""
    agent, sent = feed.agent(rank=rank), some(900, rng)
    for first in range(0, 300, 50):
        part = slice(3 * first, 3 * first + 150)
        measured = np.where(np.repeat(full[first : first + 50], 3), LIGHT | int(Measured.ENERGIES), LIGHT)
        fields = {name: values[part] for name, values in sent.items()} | {"measured": measured}
        feed.send(agent, list(range(first, first + 50)), fields=fields)
    return sent


def test_answers_say_that_they_are_rounded_and_are_the_same_before_and_after_compaction(feed: Feed) -> None:
    rng = np.random.default_rng(4)
    full = rng.random(300) < 0.25
    sent = sent_to(feed, 0, rng, full)
    before = {name: exact_or_rounded(feed, name) for name in WITHIN}
    for name, within in WITHIN.items():
        values, of_up = np.array(before[name]), sent[name][::3].astype(float)
        assert np.array_equal(values[full], of_up[full]), "a full record keeps every bit"
        assert (values[~full] != of_up[~full]).mean() > 0.9
        assert (np.abs(values - of_up) <= within * of_up).all()
    assert np.array_equal(exact_or_rounded(feed, "amax_max"), sent["amax_max"][::3])
    whole = feed.records()
    feed.compact()
    assert {name: exact_or_rounded(feed, name) for name in WITHIN} == before, "some in sheets, some hot"
    feed.compact(everything=True)
    assert {name: exact_or_rounded(feed, name) for name in WITHIN} == before
    assert feed.records() == whole
    with feed.engine.connect() as conn:
        several = queries.several_series(conn, "run-1", UP.id, list(SERIES_FIELDS))
        for name, got in several.items():
            within = {**WITHIN, "clip_depth": WITHIN["scale_ratio_max"]}.get(name)
            assert got.get("rounded_within") == within, name
            assert (f"within 2^{np.log2(within):.0f} " in SERIES_FIELDS[name].doc) if within else True
        of_sites = queries.heatmap(conn, "run-1", "clip_depth"), queries.top(conn, "run-1", "clip_depth")
        assert {got["rounded_within"] for got in of_sites} == {2.0**-9}


def test_ranks_merge_to_the_same_in_any_order(feed: Feed) -> None:
    """Of several ranks the extreme of what is kept is what is kept of the extreme."""
    rng = np.random.default_rng(5)
    none = np.zeros(300, bool)
    both = [sent_to(feed, rank, rng, none) for rank in (1, 0)]
    hot = {name: exact_or_rounded(feed, name) for name in WITHIN}
    for name, extreme in (("scale_ratio_min", np.minimum), ("scale_ratio_max", np.maximum)):
        assert np.array_equal(hot[name], round_ratio(extreme(*(sent[name] for sent in both)))[::3])
    feed.compact(everything=True)
    assert {name: exact_or_rounded(feed, name) for name in WITHIN} == hot


def test_a_replay_of_sheets_finds_what_the_batches_said_and_nothing_else(feed: Feed) -> None:
    """What is broken is exact, and what is just inside its bound does not fall out of it."""
    agent = feed.agent()
    just_inside, above = np.nextafter(np.float32(0.5), np.float32(1)), np.float32(1 + TOLERANCE / 2)
    low = np.full(48, just_inside)
    high = np.resize(np.array([1, np.nextafter(np.float32(1), np.float32(0)), above], np.float32), 48)
    broken = np.zeros(48, np.int64)
    low[40], broken[40] = np.float32(0.4991), 3
    fields = {"scale_ratio_min": low, "scale_ratio_max": high, "num_off_scale_tiles": broken, "measured": LIGHT}
    feed.send(agent, list(range(48)), [UP], fields=fields)

    def found() -> list[tuple[Any, ...]]:
        with feed.engine.connect() as conn:
            return [(i["mode"], i["first_step"], i["evidence"]) for i in replay(conn, "run-1").incidents]

    before = found()
    assert [(mode, step) for mode, step, _ in before] == [("scale-rounding", 40)]
    assert float(np.float32(0.4991)) in [e["value"] for e in before[0][2]]
    feed.compact(everything=True)
    assert found() == before


def test_sites_of_one_batch_are_rounded_each_by_its_own_record(feed: Feed) -> None:
    rng = np.random.default_rng(6)
    agent, sent = feed.agent(), some(3, rng)
    wrong = np.array([0, 2, 0])
    feed.send(agent, [7], fields={**sent, "num_saturated": wrong, "measured": LIGHT})
    for site, i in zip(SITES, range(3), strict=True):
        with feed.engine.connect() as conn:
            got = queries.series(conn, "run-1", site.id, "amax_min_nonzero")["values"]
        assert (got == [float(sent["amax_min_nonzero"][i])]) == bool(wrong[i])
