"""Attention logits growing: mode 12, attention-logit-growth.

Two find it: `families.attention_logits` where logits are logged, `families.outlier` by weights of q and k.
"""

from __future__ import annotations

from fp8watch_server.detect.families.attention_logits import AttentionLogits
from fp8watch_server.detect.families.outlier import Outliers
from fp8watch_server.detect.limits import SPEC, TUNED, threshold
from fp8watch_server.detect.mode import Mode
from fp8watch_server.detect.modes.attention_logit_growth.words import fixes, words

MODE = Mode(
    number=12,
    slug="attention-logit-growth",
    alternatives=(
        ("outlier-growth", "only one of q and k grows, or another layer"),
        ("optimizer-divergence", "the weights of most layers grow with it"),
    ),
    words=words,
    fixes=fixes,
    thresholds=(
        threshold("attention_logit_warning", 100, "logit", 1, 1e9, SPEC),
        threshold("attention_logit_critical", 1e4, "logit", 1, 1e9, SPEC),
        threshold("attention_logit_rate_octaves", 0.03, "octaves/step", 0.001, 4, TUNED),
        threshold("attention_logit_floor", 20, "logit", 0.1, 1e9, "below it growth is the model finding its feet"),
    ),
    detectors=(
        AttentionLogits,
        Outliers,
    ),
)
