"""Why a run fails, and what to change: FP8 beside BF16, what FP8 costs layer by layer, what other formats would do.

Thread:     the caller's
"""

from fp8watch.diagnose.calibrate import Calibration, calibrate
from fp8watch.diagnose.candidates import CANDIDATES, Candidate
from fp8watch.diagnose.compare import compare_bf16
from fp8watch.diagnose.loss_impact import LayerImpact, LossImpact, loss_impact
from fp8watch.diagnose.verdict import LayerPair, StepPair, Verdict
from fp8watch.diagnose.what_if import WhatIf, what_if

__all__ = [
    "CANDIDATES",
    "Calibration",
    "Candidate",
    "LayerImpact",
    "LayerPair",
    "LossImpact",
    "StepPair",
    "Verdict",
    "WhatIf",
    "calibrate",
    "compare_bf16",
    "loss_impact",
    "what_if",
]
