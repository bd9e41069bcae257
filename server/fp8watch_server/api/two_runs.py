"""GET /api/v1/compare: two runs, or two ranks, side by side.

Shapes:     two ids and a range of steps -> the sentence, facts that differ, loss difference and map, as compare.answer has them
Thread:     query pool
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from fp8watch_server.api import examples
from fp8watch_server.api.examples import answers
from fp8watch_server.api.routes import FromStep, Rank, ToStep, require_run
from fp8watch_server.compare.answer import MAP_COLUMNS, compare
from fp8watch_server.compare.sides import Side
from fp8watch_server.http.databases import connect_to_run
from fp8watch_server.http.errors import JsonResponse

router = APIRouter(prefix="/api/v1", tags=["query"])

RunId = Annotated[str, Query(min_length=1, max_length=1024)]

EXAMPLE: dict[str, Any] = {
    "a": {"id": "llama-7b-bf16", "name": "llama 7B, BF16", "recipe": "observe", "rank": None},
    "b": {"id": "llama-7b-fp8", "name": "llama 7B, blockwise", "recipe": "blockwise", "rank": None},
    "sentence": "They part at step 812, first in layers.17.mlp.down_proj input. The losses part from step 815 on.",
    "parting": {
        "step": 812,
        "by": "amax",
        "sites": [{k: examples.SITE[k] for k in ("id", "module", "operand", "direction", "gemm")}],
        "seen_at": 812,
        "loss_step": 815,
        "identical_steps": 0,
        "differs_at": None,
        "differs_in": [],
        "weights_differ": 0,
    },
    "common": {"steps": 1000, "first_step": 0, "last_step": 999, "sites": 160},
    "facts": [{"fact": "recipe", "a": "observe", "b": "blockwise", "follows": False}],
    "not_looked_at": ["steps that only the first has: 24"],
    "only_a": [],
    "only_b": [],
    "loss": {
        "steps": [811, 812],
        "stride": 1,
        "a": {"values": [2.31, 2.3], "nonfinite": []},
        "b": {"values": [2.31, 2.42], "nonfinite": []},
        "difference": {"values": [0.0004, 0.12], "nonfinite": []},
        "band": {"values": [0.03, 0.03], "nonfinite": []},
    },
    "map": {"sites": [], "steps": [], "stride": 1, "values": [], "marks": []},
}


@router.get("/compare", responses=answers(EXAMPLE))
def get_comparison(
    request: Request,
    a: RunId,
    b: RunId,
    rank_a: Rank = None,
    rank_b: Rank = None,
    from_: FromStep = None,
    to: ToStep = None,
    points: Annotated[int, Query(ge=1, le=1000)] = MAP_COLUMNS,
) -> Response:
    """Where two runs part, in one sentence, and how they differ; ranks of one run are compared alike."""
    with connect_to_run(request, a) as of_a, connect_to_run(request, b) as of_b:
        require_run(of_a, a)
        require_run(of_b, b)
        return JsonResponse(compare(of_a, Side(a, rank_a), Side(b, rank_b), from_, to, points, conn_b=of_b))
