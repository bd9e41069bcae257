"""Example responses for the OpenAPI description.

Thread:     any; only data
"""

from __future__ import annotations

from typing import Any

_SITE = {"site": 7722284667010904, "module": "layers.0.mlp.up", "operand": "input", "direction": "rowwise"}
RUN: dict[str, Any] = {
    "id": "llama-7b-fp8",
    "name": "llama 7B, blockwise",
    "status": "running",
    "attempt": 1,
    "created_at": 1763700000.0,
    "last_seen_at": 1763703600.0,
    "last_step": 4211,
    "recipe": "blockwise",
    "backend": "triton",
    "world_size": 8,
    "num_sites": 160,
    "num_open_incidents": 1,
    "num_unseen_incidents": 0,
}
SESSION: dict[str, Any] = {
    "session": "5f0c1d2e3b4a59687786a5b4c3d2e1f0",
    "rank": 0,
    "attempt": 1,
    "host": "node-17",
    "pid": 4242,
    "ended": False,
    "last_seen_at": 1763703600.0,
    "health": {"produced": 673600.0, "acknowledged": 673600.0, "dropped": 0.0, "overhead_ratio": 0.004},
}
SITE: dict[str, Any] = {
    "id": 7722284667010904,
    "module": "layers.0.mlp.up",
    "operand": "input",
    "direction": "rowwise",
    "gemm": "fprop",
    "order": 4,
    "shape": [8192, 4096],
    "tile": [1, 128],
    "format": "E4M3",
    "power_2_scale": True,
    "eps": 0.0,
    "recipe": "blockwise",
    "backend": "triton",
    "evidence": {"counts": "exact"},
}
SERIES: dict[str, Any] = {
    "site": 7722284667010904,
    "field": "amax_max",
    "unit": "x",
    "steps": [4208, 4209, 4210, 4211],
    "values": [2.5, 2.75, None, None],
    "nonfinite": [[3, "inf"]],
    "stride": 1,
}
SCALAR: dict[str, Any] = {**SERIES, "site": None, "field": "loss", "unit": "", "values": [2.31, 2.3, 2.29, None]}
TOP: dict[str, Any] = {
    "field": "underflow_ratio",
    "unit": "ratio",
    "items": [{**_SITE, "step": 4199, "value": 0.031, "nonfinite": None}],
    "next": None,
}
HEATMAP: dict[str, Any] = {
    "field": "tile_sqnr_db",
    "unit": "dB",
    "sites": [{**_SITE, "id": 7722284667010904}],
    "steps": [4096, 4128, 4160, 4192],
    "values": [[31.5, 31.4, None, 29.9]],
    "nonfinite": [[0, 2, "nan"]],
    "stride": 32,
}
HISTOGRAM: dict[str, Any] = {
    "site": 7722284667010904,
    "field": "amax_hist",
    "steps": [4210, 4211],
    "buckets": ["0", "2^-1", "2^0"],
    "counts": [[0, 120, 8072], [0, 131, 8061]],
    "stride": 1,
}
TILE_MAP: dict[str, Any] = {
    "site": 7722284667010904,
    "step": 4211,
    "rank": 3,
    "ranks": [3],
    "shape": [1, 2],
    "row0": 0,
    "cut": None,
    "amax": [2.5, None],
    "scale_inv": [0.0078125, 1.0],
    "flags": [0, 6],
    "num_nonfinite": [0, 1],
    "num_underflow": [2, 0],
    "nonfinite": [[1, "inf"]],
    "nonfinite_scale_inv": [],
    "steps_available": [4210, 4211],
}
INCIDENT: dict[str, Any] = {
    "id": "0b8f6f0e6f5c4f0b9a56a2a1f0d3c4e5",
    "run_id": "llama-7b-fp8",
    "mode": "inf-laundering",
    "title": "Inf in the input of layers.0.mlp.up became a finite 448",
    "severity": "critical",
    "status": "open",
    "verdict": "fp8",
    "first_step": 4211,
    "last_step": 4211,
    "num_events": 1,
    "url": "/incidents/0b8f6f0e6f5c4f0b9a56a2a1f0d3c4e5",
    "runbook_url": "/runbooks/inf-laundering",
}
CHECKPOINT: dict[str, Any] = {
    "attempt": 1,
    "step": 4250,
    "state": "poisoned",
    "since": 4211,
    "incident": "0b8f6f0e6f5c4f0b9a56a2a1f0d3c4e5",
    "title": "Inf in the input of layers.0.mlp.up became a finite 448",
}


def listed(item: dict[str, Any]) -> dict[str, Any]:
    """A page of a list."""
    return {"items": [item], "next": None}


def answers(
    example: dict[str, Any], *, csv: str | None = None, cached: bool = False
) -> dict[int | str, dict[str, Any]]:
    """Value for FastAPI's `responses`: the answer and the errors."""
    content: dict[str, Any] = {"application/json": {"example": example}}
    if csv is not None:
        content["text/csv"] = {"example": csv}
    problem = {"application/problem+json": {"example": PROBLEM}}
    found: dict[int | str, dict[str, Any]] = {200: {"description": "The answer", "content": content}}
    if cached:
        found[304] = {"description": "As it was: If-None-Match names the ETag that it still has"}
    found[404] = {"description": "No such run, site or incident", "content": problem}
    found[422] = {"description": "A question that makes no sense", "content": problem}
    found[503] = {"description": "The database cannot be used; Retry-After says when to ask again", "content": problem}
    return found


PROBLEM: dict[str, Any] = {
    "type": "about:blank",
    "title": "Not Found",
    "status": 404,
    "detail": "there is no run 'llama'",
    "rule": "the run must have been registered",
    "remedy": "list them: GET /api/v1/runs",
}
