"""POST /v1/incidents/{id}/bisection: stores with an incident which layers must leave FP8 for its failure to go.

Shapes:     a Bisection as JSON -> one row of incident_event
Thread:     query pool

An incident with an unknown verdict takes the one that was found: fp8 or shared. What was not reproduced decides nothing.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from fp8watch_server.api.diagnosis_notes import decoded, note

router = APIRouter(prefix="/v1", tags=["ingest"])

KIND = "bisection"
MAX_NAMES = 10_000
NAMES_KEPT = 8
"""Of what a trial left in high precision; the number of all is kept beside them."""

Name = Annotated[str, msgspec.Meta(max_length=1024)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class Trial(msgspec.Struct):
    """One training, with some names in high precision."""

    leave: Annotated[list[Name], msgspec.Meta(max_length=MAX_NAMES)]
    failed: bool
    said: Annotated[str, msgspec.Meta(max_length=2000)]
    seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    num_left: Count = 0


class Bisection(msgspec.Struct):
    """What `fp8watch.diagnose.Bisection.as_json` gives."""

    verdict: Literal["fp8", "shared", "not-reproduced"]
    sentence: Annotated[str, msgspec.Meta(min_length=1, max_length=4000)]
    culprits: Annotated[list[Name], msgspec.Meta(max_length=256)]
    trials: Annotated[list[Trial], msgspec.Meta(min_length=1, max_length=1000)]
    modules: Annotated[list[Name], msgspec.Meta(max_length=MAX_NAMES)] = []
    num_modules: Count = 0


@router.post("/incidents/{incident_id}/bisection")
async def post_bisection(request: Request, incident_id: str) -> Response:
    """Keep a bisection. The newest one is shown on the incident's page."""
    got = await decoded(request, Bisection, KIND, "fp8watch.diagnose.Bisection.as_json")
    got.num_modules, got.modules = len(got.modules), []
    for trial in got.trials:
        trial.num_left, trial.leave = len(trial.leave), trial.leave[:NAMES_KEPT]
    return await note(request, incident_id, KIND, got, got.verdict if got.verdict != "not-reproduced" else None)
