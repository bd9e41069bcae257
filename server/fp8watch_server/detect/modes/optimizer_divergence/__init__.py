"""Optimizer diverging: mode 13, optimizer-divergence.

`detector` finds it by weights that grow, `shrinking` by weights or inputs that shrink, `families.loss_jump` by a loss that jumps
right after the LR did, `families.training_setup` by gradients beyond what they were clipped to, `families.optimizer_state` by second
moments that are 0, `families.weight_updates` by gradients that nobody clears, weights that shrink along themselves, and a group's
rate that leaps, `families.attention_logits` by logits that begin to grow when the LR has left its range.
"""

from __future__ import annotations

from fp8watch_server.detect.families.attention_logits import AttentionLogits
from fp8watch_server.detect.families.loss_jump import LossJumps
from fp8watch_server.detect.families.optimizer_state import OptimizerState
from fp8watch_server.detect.families.training_setup import TrainingSetup
from fp8watch_server.detect.families.weight_updates import WeightUpdates
from fp8watch_server.detect.limits import TUNED, threshold
from fp8watch_server.detect.mode import Mode
from fp8watch_server.detect.modes.optimizer_divergence.detector import Divergence
from fp8watch_server.detect.modes.optimizer_divergence.shrinking import Shrinking
from fp8watch_server.detect.modes.optimizer_divergence.words import alternatives, fixes, words

MODE = Mode(
    number=13,
    slug="optimizer-divergence",
    alternatives=(
        ("outlier-growth", "one layer grows, the others do not"),
        ("stale-weight-scale", "scale_ratio of a weight is outside its bounds"),
        ("bad-batch", "loss and gradient norm jumped and came back within 5 steps"),
    ),
    words=words,
    fixes=fixes,
    thresholds=(
        threshold(
            "divergence_rate_octaves",
            0.05,
            "octaves/step",
            0.001,
            8,
            "LR ×30 grows 0.2–0.5, a start from scratch 0.012",
        ),
        threshold("divergence_total_octaves", 0.20, "octaves", 0.01, 16, TUNED),
        threshold(
            "divergence_layers", 0.6, "share", 0.1, 1, "most layers: the optimizer moves all of them, a quantiser one"
        ),
    ),
    detectors=(
        Divergence,
        Shrinking,
        LossJumps,
        TrainingSetup,
        OptimizerState,
        WeightUpdates,
        AttentionLogits,
    ),
    alternatives_of=alternatives,
)
