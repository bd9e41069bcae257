"""What tests/detect/test_modes.py and others share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from detect.healthy_run import Run

from fp8watch_server.detect.engine import DetectionEngine
from fp8watch_server.detect.finding import Finding

DOWN = "layers.1.mlp.down_proj"


Change = Callable[[np.ndarray, np.ndarray, int], None]


def detect(run: Run, change: Change | None, steps: range = range(60, 70), per_batch: int = 3) -> list[Finding]:
    engine = DetectionEngine(run.facts)
    found: list[Finding] = []
    for first in range(steps.start, steps.stop, per_batch):
        found += engine.observe(run.batch(range(first, min(first + per_batch, steps.stop)), change))
    return found


def modes(found: list[Finding]) -> set[str]:
    return {f.mode for f in found}


def evidence(finding: Finding) -> dict[str, object]:
    return {e.field: e.value for e in finding.evidence}
