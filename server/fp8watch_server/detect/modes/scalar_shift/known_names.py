"""Names of logged scalars that mean the same in many trainers, with the band in which they are healthy.

Shapes:     name -> Known or None
Thread:     any; only data

Rollout against training: verl (`rollout_corr/kl`, `k3_kl`, `log_ppl_abs_diff`; `training/rollout_probs_diff_mean`),
NeMo-RL (`token_mult_prob_error`, `gen_kl_error`, `policy_kl_error`, `js_divergence_error`), and names like
`train_rollout_logprob_abs_diff`. Two BF16 engines differ by 1e-4 to 1e-3 in KL and by about 0.01 in the log-probability
of a token; FP8 rollouts that went wrong were reported at a KL of 0.06 and a difference of 0.27, and as a KL that tripled
within 32 steps. NeMo-RL calls a multiplicative error above 1.05 suspect. An update whose RMS, in units of the learning
rate, is above 2.3 runs ahead of a loss spike by some steps (arXiv 2304.13013).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

KL, LOGPROB, PROB_ERROR, UPDATE_RMS, ENTROPY = "kl", "logprob", "prob_error", "update_rms", "entropy"


@dataclass(frozen=True)
class Known:
    """What a name stands for."""

    kind: str
    what: str  # in a sentence
    most: float | None  # above it: a warning, whatever was usual
    least: float | None = None  # below it: a warning, where it was 10 times as much
    floor: float = 0.0  # `times` its usual value counts only above this
    times: float | None = None
    """A warning when it stays this many times above what it was."""


_ROLLOUT = r"(?:rollout|(?<![a-z])(?:gen(?:erat[a-z]*)?(?![a-z])|infer|sampl(?:er|ing))|vllm|sglang|mismatch)"
"""The short ones stand inside other words: agent, divergence, resampling."""
_TABLE: tuple[tuple[re.Pattern[str], Known], ...] = (
    (
        re.compile(r"token_mult_prob_error|mult_prob_error"),
        Known(PROB_ERROR, "the multiplicative error of token probabilities, rollout against training", 1.05),
    ),
    (
        re.compile(rf"{_ROLLOUT}.*(?:\bkl\b|_kl\b|/kl|kl_)|k3_kl|(?:policy|gen)_kl_error|js_divergence_error"),
        Known(KL, "the KL divergence between rollout and training", 0.05, floor=1e-3, times=3.0),
    ),
    (
        re.compile(rf"{_ROLLOUT}.*(?:log_?p(?:rob)?s?|probs?).*(?:diff|err)|log_ppl_abs_diff"),
        Known(LOGPROB, "the difference of log-probabilities, rollout against training", 0.1, floor=0.02, times=3.0),
    ),
    (
        re.compile(r"(?:update_?rms|rms_?update|rms/update|update/rms)"),
        Known(UPDATE_RMS, "the RMS of the update in units of the learning rate", 2.3),
    ),
    (
        re.compile(r"(?:^|[/_.])entropy(?:$|[/_.](?:mean|avg))|approx_entropy|policy_entropy"),
        Known(ENTROPY, "the entropy of the policy", None, least=0.02),
    ),
)
_NEVER = re.compile(r"(?:^|[/_.])(?:std|max|min)(?![a-z0-9])|coef|loss|penalty|thresh|target|beta")
"""Extremes of one token are large in health; coefficients and losses are no measurements of the mismatch."""


def known(name: str) -> Known | None:
    """What a name stands for, whatever its case and prefix; None where it is not in the table."""
    low = name.lower()
    if _NEVER.search(low):
        return None
    return next((what for pattern, what in _TABLE if pattern.search(low)), None)


_PROGRESS = re.compile(
    r"reward|score|acc\b|accuracy|return|success|pass|length|_len\b|time|second|throughput|tok|memory|\bmem|lr\b|learning_rate"
    r"|step|epoch|progress|count|num_|tflops|mfu|ppl|perplexity|temperature|coef|weight_norm|param_norm"
)


def may_grow(name: str) -> bool:
    """Whether growth of this scalar is what training is for, or says nothing of the numerics: no trend is told."""
    return _PROGRESS.search(name.lower()) is not None
