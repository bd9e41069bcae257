"""docs/wire.md is enough: what a sender that was written from it sends is taken, and read as it was meant."""

from __future__ import annotations

import ast
import math
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from collector import wire_from_the_page as page
from collector.kit import Serving

from fp8watch_agent.record import FIELDS
from fp8watch_agent.wire import decode_batch, encode_histogram

SITES = [
    ("layers.0.fc1", "input", "rowwise"),
    ("layers.0.fc1", "weight", "rowwise"),
    ("lm_head", "grad_output", "columnwise"),
]
ENERGIES, MOMENTS, DEPTH = 16, 32, 64


@pytest.fixture
def database_kind() -> str:
    return "sqlite"


def made_up(rng: np.random.Generator, measured: int) -> dict[str, Any]:
    """A record with something in every field that it measures, NaN, Inf and negative numbers among them."""
    record: dict[str, Any] = {"measured": measured}
    for f in page.FIELDS.values():
        if f.name == "measured" or (f.bit and not f.bit & measured) or rng.random() < 0.1:
            continue
        if f.how == "histogram":
            counts = np.where(rng.random(f.num_values) < 0.2, rng.integers(0, 1 << 20, f.num_values), 0)
            record[f.name] = [int(c) for c in counts]
        elif "f" in f.dtype:
            value = float(
                np.float32(rng.choice([1.0, -2.5, 3.14159, 1e-30, 0.0, math.nan, math.inf, -math.inf, 448.0]))
            )
            record[f.name] = value * (1 + float(rng.random()) * (f.dtype == "<f8"))
        else:
            values = [int(v) for v in rng.integers(-(1 << 30), 1 << 30, f.num_values)]
            record[f.name] = values if f.num_values > 1 else values[0]
    return record


def batch_of(rng: np.random.Generator, whole: bool) -> page.Batch:
    steps = [{"step": 100 + 3 * i, "status": 0, "present": 1, "time": 1e9 + i, "loss": 2.5 - i} for i in range(6)]
    sites = [page.site_id(*site) for site in SITES]
    records: dict[int, dict[int, dict[str, Any]]] = {}
    for step in steps:
        there = [s for s in sites if whole or rng.random() < 0.7] or sites[:1]
        sampled = [ENERGIES | MOMENTS, DEPTH, 0, 0]
        records[step["step"]] = {s: made_up(rng, 15 | int(rng.choice(sampled))) for s in there}
    used = [s for s in sites if any(s in of_step for of_step in records.values())]
    return page.Batch(steps, used, records)


def test_it_imports_nothing_of_the_product() -> None:
    tree = ast.parse(Path(page.__file__).read_text())
    imported = {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    imported |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    assert not [name for name in imported if name.startswith("fp8watch")]


@pytest.mark.parametrize("seed", range(6))
def test_every_value_is_read_as_it_was_meant(seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch = batch_of(rng, whole=seed % 2 == 0)
    header = {"run": "r", "session": "s", "rank": 0, "seq": seed, "clock": 1.0}
    got = decode_batch(batch.body(header, sparse=(ENERGIES | MOMENTS | DEPTH) * (seed > 1)))
    assert got.header.num_records == len(batch.order) > 4
    assert got.steps["loss"].tolist() == [2.5 - i for i in range(6)]
    columns = {f.name: got.column(f.name) for f in FIELDS}
    for i, (step, site) in enumerate(zip(got.step.tolist(), got.site.tolist(), strict=True)):
        record = batch.records[step][site]
        for f in page.FIELDS.values():
            given, read = record.get(f.name, f.default), columns[f.name][i]
            if f.how == "histogram":
                counts = record.get(f.name, [0] * f.num_values)
                assert encode_histogram(read).tolist() == encode_histogram(np.array(counts)).tolist(), f.name
            elif f.how == "24-bit words":
                assert read == pytest.approx(given, rel=2**-13, nan_ok=True), f.name
            else:
                expected = [given] * f.num_values if not isinstance(given, list) else given
                assert np.array_equal(np.atleast_1d(read), np.array(expected), equal_nan="f" in f.dtype), f.name


def test_a_collector_takes_what_was_written_from_the_page(tmp_path: Path) -> None:
    rng, run, session = np.random.default_rng(9), "by the page", "0123abcd"
    of_run, of_session, of_sites, of_site = page.required_keys()
    assert (of_run, of_session, of_sites) == (set(), {"rank"}, {"session", "sites"})
    sites = [
        {"id": page.site_id(*site), **dict(zip(("module", "operand", "direction"), site, strict=True))}
        | {"gemm": "fprop", "order": i, "shape": [64, 256], "tile": [1, 128], "format": "E4M3"}
        | {"power_2_scale": True, "eps": 0.0}
        for i, site in enumerate(SITES)
    ]
    assert all(set(site) == of_site for site in sites)
    key = {"Fp8watch-Session-Key": "k" * 32}
    with Serving(tmp_path, "--port", "0") as serving, httpx.Client(base_url=serving.url, timeout=20) as client:
        path = "/v1/runs/by%20the%20page"
        answers = [
            client.put(path, json={}),
            client.put(f"{path}/sessions/{session}", json={"rank": 0}, headers=key),
            client.put(f"{path}/sites", json={"session": session, "sites": sites}, headers=key),
        ]
        assert [a.status_code for a in answers] == [200, 200, 200], [a.text for a in answers]
        header = {"run": run, "session": session, "rank": 0, "seq": 0, "health": {"produced": 18.0, "ended": 1.0}}
        batch = batch_of(rng, whole=False)
        headers = {**key, "Content-Type": page.BATCH_TYPE, "Content-Encoding": "zstd"}
        body = batch.body(header, sparse=ENERGIES | MOMENTS | DEPTH)
        for _ in range(2):
            answer = client.post("/v1/batches", content=body, headers=headers)
            assert (answer.status_code, answer.json()) == (200, {"acked": 0, "captures": []})
        header = {k: v for k, v in header.items() if k != "health"} | {"seq": 1}
        body = page.tile_map_body(header, sites[0]["id"], 100, (2, 3), [-8, -7, 0, 1, 2, 3])
        answer = client.post("/v1/tile-maps", content=body, headers={**headers, "Content-Type": page.MAPS_TYPE})
        assert (answer.status_code, answer.json()) == (200, {"acked": 1})
        shown = client.get("/api/v1/runs/by%20the%20page").json()
        assert (shown["last_step"], shown["num_sites"], shown["status"]) == (115, 3, "ended")
        read = client.get(f"/api/v1/runs/by%20the%20page/sites/{sites[0]['id']}/tile-map?step=100").json()
        assert "0.00390625" in str(read)
