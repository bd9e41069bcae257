"""What tests/collector/test_queries.py and others share."""

from __future__ import annotations

import math
from typing import Any

from collector.kit import make_site

UP, DOWN = make_site("layers.0.mlp.up", order=0), make_site("layers.0.mlp.down", order=1)


SITES = [UP, DOWN]


def an_incident(**changes: Any) -> dict[str, Any]:
    row = {"run_id": "run-1", "tenant": "default", "id": "i1", "attempt": 1, "mode": "inf-laundering", "title": "Inf"}
    row |= {
        "severity": "critical",
        "status": "open",
        "verdict": "fp8",
        "first_step": 3,
        "last_step": 5,
        "num_events": 2,
    }
    row |= {"origin": True, "place": {"module": UP.module}, "sites": [UP.id], "num_sites": 1, "cause": "c", "fix": []}
    row |= {"evidence": [{"field": "amax_max", "value": math.inf, "baseline": math.nan}], "alternatives": []}
    return {**row, "fingerprint": "f", "opened_at": 10.0, "resolved_at": None, "updated_at": 10.0, **changes}
