"""A collector that restarts goes on as if it had not: the same findings from the same state, and nothing but data in it."""

from __future__ import annotations

import msgspec
import pytest
import zstandard
from detect.everything_set import full_of
from detect.play import play
from detect.scenarios import BY_NAME, Case

from fp8watch_server.detect import state
from fp8watch_server.detect.engine import DetectionEngine
from fp8watch_server.detect.state import VERSION, StateError
from fp8watch_server.detect.thresholds import DEFAULTS, Thresholds


@pytest.mark.parametrize("name", ["frozen-scale", "optimizer-divergence", "chronic-quantization-noise", "nan-in-loss"])
@pytest.mark.parametrize("cut", [10, 100, 150])
def test_an_engine_that_was_read_back_says_what_the_first_would_have(name: str, cut: int) -> None:
    trace = BY_NAME[name].make(1, 1).traces[0]
    batches = list(trace.batches())
    cut //= 8
    one = DetectionEngine(trace.facts)
    for batch in batches[:cut]:
        one.observe(batch)
    two = DetectionEngine.load(one.dump(), trace.facts)
    assert two.delivered_step == one.delivered_step
    for batch in batches[cut:]:
        assert repr(two.observe(batch)) == repr(one.observe(batch))  # NaN is not equal to itself
    assert two.dump() == one.dump()


def test_a_batch_that_was_judged_before_the_restart_is_not_judged_again() -> None:
    trace = BY_NAME["nan-in-loss"].make(1, 1).traces[0]
    batches = list(trace.batches())
    one = DetectionEngine(trace.facts)
    found = [f for batch in batches for f in one.observe(batch)]
    assert found
    two = DetectionEngine.load(one.dump(), trace.facts)
    assert [f for batch in batches for f in two.observe(batch)] == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no state",
        zstandard.compress(b"\xc1"),
        zstandard.compress(msgspec.msgpack.encode([1])),
        zstandard.compress(msgspec.msgpack.encode({"version": 99, "parts": {}})),
        zstandard.compress(
            msgspec.msgpack.encode({"version": VERSION, "parts": {"x": {"!": "object", "c": "Popen", "v": {}}}})
        ),
        zstandard.compress(msgspec.msgpack.encode({"version": VERSION, "parts": {"sites": []}})),
        zstandard.compress(
            msgspec.msgpack.encode(
                {"version": VERSION, "parts": {"x": {"!": "array", "d": "|O", "s": [1], "b": b"12345678"}}}
            )
        ),
    ],
)
def test_what_is_no_state_is_refused(body: bytes) -> None:
    with pytest.raises(StateError):
        DetectionEngine.load(body, {})


def test_equal_states_are_equal_bytes_in_whatever_order_their_sets_were_filled() -> None:
    """8 and 16 share 0's place in a set's table: what came first is first."""
    one, other = set([0, 8, 16]), set([16, 8, 0])  # noqa: C405 - literals that are equal are one constant
    assert list(one) != list(other)
    assert state.dump({"told": one, "of": frozenset(one)}) == state.dump({"told": other, "of": frozenset(other)})


@pytest.mark.parametrize("kind", state._CLASSES.values(), ids=lambda kind: kind.__name__)
def test_each_part_can_be_saved_with_everything_set(kind: type) -> None:
    """What a detector remembers of a rare event is a part of its state as well: one that cannot be saved stops all of them."""
    raw = state.dump({"part": full_of(kind)})
    assert state.dump(state.load(raw)) == raw


def test_a_state_stays_small() -> None:
    trace = BY_NAME["delayed-clip"].make(1, 1).traces[0]
    engine = DetectionEngine(trace.facts)
    play(Case([trace], 0), engine=engine)
    assert len(engine.dump()) < 256 << 10  # 105 sites


def test_an_engine_that_is_read_back_follows_the_rules_of_now() -> None:
    names = ("warmup_steps", "after_lr_warmup_steps", "late_rank_s", "heartbeat_s", "missing_heartbeats")
    rules = Thresholds({name: 1 + 2 * getattr(DEFAULTS, name) for name in names})
    of_before, of_now = (DetectionEngine({}, limit).dump() for limit in (DEFAULTS, rules))
    assert of_before != of_now
    assert DetectionEngine.load(of_before, {}, rules).dump() == DetectionEngine.load(of_now, {}, rules).dump()
