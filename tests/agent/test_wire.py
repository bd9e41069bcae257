"""What is packed comes out again, in a tenth of the bytes; what older agents send is read as ever."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
import zstandard
from agent.freeze import FROZEN, described, sample
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.agents import make_ids, make_maps, make_rows, make_step

from fp8watch_agent import wire
from fp8watch_agent.column_words import SUM_BITS, round_sums, widen_sums
from fp8watch_agent.envelope import MAX_COLUMNS, WireError, open_map
from fp8watch_agent.record import FIELD_BY_NAME, FIELDS, HISTOGRAMS, ROW, Measured, empty_rows
from fp8watch_server.load.stream import LoadPlan, RankStream

SUM_ERROR = 2.0 ** -(SUM_BITS - 11)


def batch_of(rows, num_steps, ids=None):
    """A batch whose steps have the same sites, unless `ids` says otherwise."""
    each = len(rows) // num_steps
    steps = np.array([make_step(s) for s in range(3, 3 + num_steps)])
    ids = np.tile(make_ids(each), num_steps) if ids is None else ids
    header = wire.Header(
        run="r", session="s", rank=0, seq=0, step0=3, num_steps=num_steps, num_records=len(rows), health={}
    )
    return header, (steps, np.repeat(steps["step"], each), ids, rows)


def assert_same(got, rows):
    for f in FIELDS:
        column, want = got.column(f.name), rows[f.name]
        if f.name in HISTOGRAMS:
            np.testing.assert_array_equal(column, wire.decode_histogram(wire.encode_histogram(want)), f.name)
        elif f.dtype == "<f8":
            np.testing.assert_array_equal(column, widen_sums(round_sums(want)), f.name)
        else:
            assert column.tobytes() == np.ascontiguousarray(want).tobytes(), f.name
            assert column.dtype == want.dtype


def described_default(name: str, num_records: int) -> str:
    f = FIELD_BY_NAME[name]
    return np.full((num_records, f.size), f.default, f.dtype).tobytes().hex()


@pytest.mark.parametrize("version", [1, 2, 3])
def test_the_bytes_of_every_version_say_what_they_said(version):
    body = (FROZEN / f"batch-{version}").read_bytes()
    frozen = json.loads((FROZEN / f"batch-{version}.json").read_text())
    said = json.loads(json.dumps(described(body)))
    for name in said["columns"].keys() - frozen["columns"].keys():  # later fields: nobody measured them
        assert said["columns"].pop(name) == described_default(name, len(said["keys"]["step"]))
    assert said == frozen


def test_frozen_tile_maps_are_read():
    got = wire.decode_tile_maps((FROZEN / "maps-1").read_bytes())
    for m, want in zip(got.maps, make_maps(2), strict=True):
        assert m.scale_inv.tobytes() == want.scale_inv.tobytes()
        assert m.amax.tobytes() == want.amax.tobytes()


@pytest.mark.parametrize("version", [2, 3])
def test_later_versions_say_what_the_first_said_but_for_rounded_sums(version):
    old, new = (wire.decode_batch((FROZEN / f"batch-{v}").read_bytes()) for v in (1, version))
    for f in FIELDS:
        if f.dtype == "<f8":
            np.testing.assert_allclose(new.column(f.name), old.column(f.name), rtol=SUM_ERROR, atol=0)
        else:
            assert new.column(f.name).tobytes() == old.column(f.name).tobytes(), f.name


def test_an_unknown_version_is_refused_by_name():
    header, arrays = sample()
    raw = msgspec.msgpack.decode(wire.decompress(wire.encode_batch(header, *arrays)))
    raw["header"]["version"] = 4
    body = zstandard.ZstdCompressor().compress(msgspec.msgpack.encode(raw))
    with pytest.raises(wire.UnsupportedVersion, match="version 4"):
        wire.decode_batch(body)


@given(seed=st.integers(0, 1 << 32), num_steps=st.integers(1, 5), each=st.integers(0, 12), mixed=st.booleans())
@settings(max_examples=60, deadline=None)
def test_any_bits_come_back(seed, num_steps, each, mixed):
    rng = np.random.default_rng(seed)
    n = num_steps * each
    rows = np.frombuffer(rng.bytes(n * ROW.itemsize), ROW).copy() if seed % 2 else empty_rows(n)
    for f in FIELDS:
        if f.name in HISTOGRAMS:
            rows[f.name] = rng.integers(0, 1 << int(rng.integers(1, 31)), rows[f.name].shape)
        elif rng.random() < 0.3:
            rows[f.name] = f.default
        elif n and rng.random() < 0.3:
            rows[f.name] = rows[f.name][0]
    ids = rng.integers(0, 5, n).astype(np.uint64) if mixed else None
    header, arrays = batch_of(rows, num_steps, ids)
    got = wire.decode_batch(wire.encode_batch(header, *arrays))
    assert_same(got, rows)
    assert got.step.tolist() == arrays[1].tolist()
    assert got.site.tolist() == arrays[2].tolist()


@given(seed=st.integers(0, 1 << 32), num_steps=st.integers(1, 6), num_sites=st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_steps_that_lack_sites_and_samples_that_rotate_come_back(seed, num_steps, num_sites):
    rng = np.random.default_rng(seed)
    there = rng.random((num_steps, num_sites)) < rng.choice([0.2, 0.7, 1.0])
    there[:, 0] |= ~there.any(axis=1)
    number = np.broadcast_to(np.arange(num_sites), there.shape)[there]
    rows = np.frombuffer(rng.bytes(len(number) * ROW.itemsize), ROW).copy()
    for f in FIELDS:
        if f.name in HISTOGRAMS:
            rows[f.name] = rng.integers(0, 1 << int(rng.integers(1, 31)), rows[f.name].shape)
    rows["measured"] = rng.integers(0, 1 << 9, len(rows))
    for f in FIELDS:
        if f.name != "measured":
            rows[f.name][(rows["measured"] & int(f.group)) == 0] = f.default
    steps = np.array([make_step(s) for s in range(3, 3 + num_steps)])
    arrays = (steps, np.repeat(steps["step"], there.sum(axis=1)), make_ids(num_sites)[number], rows)
    header, _ = batch_of(make_rows(1), 1)
    header = msgspec.structs.replace(header, num_steps=num_steps, num_records=len(rows))
    got = wire.decode_batch(wire.encode_batch(header, *arrays))
    if there.all(axis=1).any():
        assert got.header.per_step == num_sites, "the order of sites is that of a step that has all"
    assert got.site.tolist() == arrays[2].tolist()
    assert got.step.tolist() == arrays[1].tolist()
    assert_same(got, rows)


@given(st.lists(st.floats(width=64), min_size=1, max_size=50))
@example(list(np.array([0x7FFF_FFFF_FFFF_FFFF, 0xFFFF_FFFF_FFFF_FFFF, 0x7FEF_FFFF_FFFF_FFFF], "<u8").view("<f8")))
@settings(max_examples=200, deadline=None)
def test_a_sum_keeps_its_class_its_sign_and_twelve_bits(values):
    x = np.array(values)
    got = widen_sums(round_sums(x))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(x))
    np.testing.assert_array_equal(np.isinf(got), np.isinf(x))
    normal = np.isfinite(x) & (np.abs(x) >= np.finfo(np.float64).tiny)
    np.testing.assert_allclose(got[normal], x[normal], rtol=2 * SUM_ERROR, atol=0)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(x))
    np.testing.assert_array_equal(round_sums(got), round_sums(x), "rounded twice is rounded once")


def test_a_wrong_length_names_its_column():
    header, arrays = batch_of(make_rows(6), 2)
    raw = msgspec.msgpack.decode(wire.decompress(wire.encode_batch(header, *arrays)))
    for part in ("columns", "constants"):
        for name in raw[part]:
            broken = {**raw, part: {**raw[part], name: raw[part][name] + b"\0"}}
            with pytest.raises(wire.WireError) as e:
                wire.decode_batch(msgspec.msgpack.encode(broken), compressed=False)
            assert e.value.column == name


def test_records_of_a_made_up_fleet_take_forty_bytes():
    plan = LoadPlan(num_ranks=1, num_sites=160, num_steps=16, steps_per_batch=8, seed=0, run="run")
    bodies = list(RankStream(plan, 0))
    assert sum(len(b.data) for b in bodies) / sum(b.num_records for b in bodies) < 41


def test_light_records_of_a_real_training_take_sixteen_bytes():
    """Eight steps of 457 sites of a model in float32: amax and scale ratios have all their bits."""
    batch = wire.decode_batch((FROZEN / "light-3").read_bytes())
    body = wire.encode_batch(batch.header, batch.steps, batch.step, batch.site, wire.rows_of(batch))
    assert len(body) / len(batch.step) < 16


def test_a_field_of_few_records_takes_bytes_for_those_alone():
    rows = make_rows(640)
    sampled = np.arange(640) % 16 == 3
    every, some, none = rows.copy(), rows.copy(), rows.copy()
    for f in FIELDS:
        if f.group & (Measured.ENERGIES | Measured.MOMENTS | Measured.DEPTH):
            some[f.name][~sampled] = none[f.name][:] = f.default
    groups = int(Measured.ENERGIES | Measured.MOMENTS | Measured.DEPTH)
    some["measured"][~sampled] &= ~groups
    none["measured"] &= ~groups

    def size(given):
        header, arrays = batch_of(given, 8)
        return len(wire.encode_batch(header, *arrays))

    assert size(some) - size(none) < (size(every) - size(none)) / 8


def test_what_was_not_measured_takes_nothing():
    rows = make_rows(600)
    light = rows.copy()
    for f in FIELDS:
        if f.group.name in ("ENERGIES", "MOMENTS", "DEPTH", "GEMM", "HASH"):
            light[f.name] = f.default
    header, arrays = batch_of(light, 1)
    sent = wire.decode_batch(wire.encode_batch(header, *arrays)).sent
    assert not {f.name for f in FIELDS if f.group.name in ("ENERGIES", "MOMENTS", "DEPTH", "GEMM", "HASH")} & set(sent)


def test_a_map_of_too_many_columns_is_refused_before_it_is_opened() -> None:
    def raw(count: int) -> msgspec.Raw:
        return msgspec.Raw(msgspec.msgpack.encode({f"c{i}": b"" for i in range(count)}))

    assert len(open_map("columns", raw(MAX_COLUMNS))) == MAX_COLUMNS
    for count in (MAX_COLUMNS + 1, 1 << 17):  # heads of two lengths
        with pytest.raises(WireError, match=f"{count} columns; at most {MAX_COLUMNS}"):
            open_map("columns", raw(count))
