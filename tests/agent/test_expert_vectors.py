"""Vectors over experts cross the ring and the wire as they are, and bodies without them are as before."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from support.agents import make_session

from fp8watch_agent import wire
from fp8watch_agent.batch import BatchBuilder, Kind, Parcel, rekeyed, split
from fp8watch_agent.expert_vectors import VECTOR, ExpertVector
from fp8watch_agent.record import ROW, STEP
from fp8watch_agent.ring_file import BODY_OFFSET, STEP_BYTES, parse_frame


def vector(*amax: float, tokens: int = 3) -> np.ndarray:
    made = np.zeros(len(amax), dtype=VECTOR)
    made["amax"], made["num_tokens"] = amax, tokens
    return made


def body(vectors: list[ExpertVector], steps: int = 3) -> bytes:
    head = np.zeros(steps, dtype=STEP)
    head["step"] = 10 + np.arange(steps)
    header = wire.Header(run="r", session="s", rank=0, seq=1, step0=10, num_steps=steps, num_records=steps)
    return wire.encode_batch(
        header, head, head["step"], np.full(steps, 7, np.uint64), np.zeros(steps, ROW), experts=vectors
    )


SENT = [ExpertVector(10, 7, vector(1.0, float("inf"), 0.0)), ExpertVector(12, 7, vector(float("nan"), 2.5, tokens=0))]


def same(got: list[ExpertVector], sent: list[ExpertVector]) -> bool:
    return [(v.step, v.site, v.experts.tobytes()) for v in got] == [(v.step, v.site, v.experts.tobytes()) for v in sent]


def test_vectors_come_back_bit_for_bit_and_a_body_without_has_no_word_of_them() -> None:
    assert same(wire.decode_batch(body(SENT)).experts, SENT)
    assert b"experts" not in wire.decompress(body([]))
    assert wire.decode_batch(body([])).experts == []


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("step", np.array([9, 9], "<u4").tobytes(), "experts.step"),
        ("num_experts", np.array([1 << 30, 2], "<u4").tobytes(), "experts.num_experts"),
        ("num_experts", np.array([0, 5], "<u4").tobytes(), "experts.num_experts"),
        ("amax", b"\0" * 7, "experts.amax"),
        ("site", None, "experts.site"),
    ],
)
def test_a_bad_column_refuses_the_batch_and_is_named(key: str, value: bytes | None, named: str) -> None:
    raw = msgspec.msgpack.decode(wire.decompress(body(SENT)))
    raw["experts"].pop(key)
    if value is not None:
        raw["experts"][key] = value
    with pytest.raises(wire.WireError, match=named):
        wire.decode_batch(msgspec.msgpack.encode(raw), compressed=False)


def test_halves_of_a_batch_that_is_too_large_and_another_key_keep_them() -> None:
    parcel = Parcel(Kind.BATCH, 1, body(SENT), 3)
    halves = split(parcel)
    assert halves is not None
    assert same([v for half in halves for v in wire.decode_batch(half.body).experts], SENT)
    again = rekeyed(parcel)
    assert again is not None
    assert same(wire.decode_batch(again.body).experts, SENT)
    one = Parcel(Kind.BATCH, 1, body([SENT[0]], steps=1), 1)
    assert split(one) is None


def test_a_frame_of_before_is_read_and_one_with_experts_fills_a_batch() -> None:
    head = np.zeros(1, dtype=STEP)
    head["step"] = 10
    frames = []
    for extra in ((({"kl": 1.0}), "b"), ({"kl": 1.0}, "b", {7: SENT[0].experts.tobytes()})):
        packed = msgspec.msgpack.encode(extra)
        raw = b"\0" * BODY_OFFSET + head.tobytes().ljust(STEP_BYTES, b"\0") + packed
        frames.append(parse_frame(raw, 0, 0, 0, len(packed)))
    assert [f.logs for f in frames] == [{"kl": 1.0}] * 2
    assert frames[0].experts == {}
    assert frames[1].num_extra_bytes < frames[0].num_extra_bytes + 16
    builder = BatchBuilder(make_session(), 100)
    builder.add(frames[1])
    assert same(wire.decode_batch(builder.build(1, 0.0, {}).body).experts, [SENT[0]])
