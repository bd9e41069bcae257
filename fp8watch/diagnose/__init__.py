"""FP8/BF16 comparison of a failing run: would BF16 fail, too?

Thread:     the caller's
"""

from fp8watch.diagnose.compare import compare_bf16
from fp8watch.diagnose.verdict import LayerPair, StepPair, Verdict

__all__ = ["LayerPair", "StepPair", "Verdict", "compare_bf16"]
