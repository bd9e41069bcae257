"""Diagnosis of a failing run, outside of it: would BF16 fail, what FP8 costs layer by layer, what other formats would do,
what moments and collectives in fewer bits would do, which layer must leave FP8, which checkpoint is clean?

Thread:     the caller's
"""

from fp8watch.diagnose.bisection import Bisection, bisect
from fp8watch.diagnose.calibrate import Calibration, calibrate
from fp8watch.diagnose.candidates import CANDIDATES, Candidate
from fp8watch.diagnose.check_checkpoint import CheckpointReport, check_checkpoint
from fp8watch.diagnose.collectives import CollectivesWhatIf, collectives_what_if
from fp8watch.diagnose.compare import compare_bf16
from fp8watch.diagnose.loss_impact import LayerImpact, LossImpact, loss_impact
from fp8watch.diagnose.moments import MomentFormat, MomentsWhatIf, moments_what_if
from fp8watch.diagnose.verdict import LayerPair, StepPair, Verdict
from fp8watch.diagnose.what_if import WhatIf, what_if

__all__ = [
    "CANDIDATES",
    "Bisection",
    "Calibration",
    "Candidate",
    "CheckpointReport",
    "CollectivesWhatIf",
    "LayerImpact",
    "LayerPair",
    "LossImpact",
    "MomentFormat",
    "MomentsWhatIf",
    "StepPair",
    "Verdict",
    "WhatIf",
    "bisect",
    "calibrate",
    "check_checkpoint",
    "collectives_what_if",
    "compare_bf16",
    "loss_impact",
    "moments_what_if",
    "what_if",
]
