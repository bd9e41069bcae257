"""POST /v1/incidents/{id}/comparison: stores an FP8/BF16 comparison with its incident.

Shapes:     a Verdict as JSON -> one row of incident_event
Thread:     query pool

The training process sends it, so the scope is `ingest`. An incident with an unknown verdict takes the measured one.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from fp8watch_server.api.diagnosis_notes import decoded, note

router = APIRouter(prefix="/v1", tags=["ingest"])

KIND = "comparison"
MAX_LAYERS_KEPT = 64
"""Of the layers the worst are kept: a page is no place for a thousand rows."""

Number = float | Literal["nan", "inf", "-inf"]
Name = Annotated[str, msgspec.Meta(max_length=1024)]


class StepPair(msgspec.Struct):
    """One step in both precisions."""

    step: Annotated[int, msgspec.Meta(ge=0)]
    loss_fp8: Number
    loss_high: Number
    difference: Number


class LayerPair(msgspec.Struct):
    """One Linear in both precisions."""

    module: Name
    output_error: Number
    first_diverging_step: int | None = None
    grad_cosine: Number | None = None
    grad_cosine_min: Number | None = None


class Comparison(msgspec.Struct):
    """What `fp8watch.diagnose.Verdict.as_json` gives."""

    verdict: Literal["fp8", "shared"]
    sentence: Annotated[str, msgspec.Meta(min_length=1, max_length=4000)]
    steps: Annotated[list[StepPair], msgspec.Meta(min_length=1, max_length=1000)]
    layers: Annotated[list[LayerPair], msgspec.Meta(max_length=10000)]
    recipe: Annotated[str, msgspec.Meta(max_length=100)]
    high_precision: Annotated[str, msgspec.Meta(max_length=100)]
    first_diverging_step: int | None = None
    first_diverging_layer: Name | None = None
    try_next: Annotated[list[Annotated[str, msgspec.Meta(max_length=1500)]], msgspec.Meta(max_length=8)] = []


def _error(layer: LayerPair) -> float:
    value = float(layer.output_error)
    return value if value == value else float("inf")


@router.post("/incidents/{incident_id}/comparison")
async def post_comparison(request: Request, incident_id: str) -> Response:
    """Keep a comparison with BF16. The newest one is shown on the incident's page."""
    got = await decoded(request, Comparison, KIND, "fp8watch.diagnose.Verdict.as_json")
    worst = {id(x) for x in sorted(got.layers, key=_error, reverse=True)[:MAX_LAYERS_KEPT]}
    got.layers = [x for x in got.layers if id(x) in worst]  # in the order of execution
    return await note(request, incident_id, KIND, got, got.verdict)
