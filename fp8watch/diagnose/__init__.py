"""Questions that a run answers by doing it again: is it FP8?

Upstream:   fp8watch._attach     Downstream: fp8watch_server.comparison
Thread:     the caller's
"""

from .compare import compare_bf16
from .verdict import LayerPair, StepPair, Verdict

__all__ = ["LayerPair", "StepPair", "Verdict", "compare_bf16"]
