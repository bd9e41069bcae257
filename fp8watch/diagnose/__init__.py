"""Diagnosis of a failing run, outside of it: would BF16 fail, which layer must leave FP8, which checkpoint is clean?

Thread:     the caller's
"""

from fp8watch.diagnose.bisection import Bisection, bisect
from fp8watch.diagnose.check_checkpoint import CheckpointReport, check_checkpoint
from fp8watch.diagnose.compare import compare_bf16
from fp8watch.diagnose.verdict import LayerPair, StepPair, Verdict

__all__ = [
    "Bisection",
    "CheckpointReport",
    "LayerPair",
    "StepPair",
    "Verdict",
    "bisect",
    "check_checkpoint",
    "compare_bf16",
]
