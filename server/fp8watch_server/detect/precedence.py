"""What each mode is to the others: which explains which, who is asked first, how far a cause reaches.

Shapes:     slug -> slugs
Thread:     any; only data

Muted are findings of the same step, and those that come while the root's incident is open. What is muted is counted in
the root's history and sends no message. A cause comes before its consequence: what began earlier is explained by
nothing that began later (`latest`), whatever their modes. A mode that stands in none of these tables explains nothing,
is explained by nothing, and is asked last.
"""

from __future__ import annotations

ASKED = (
    "optimizer-divergence",
    "silent-data-corruption",
    "delayed-clip",
    "frozen-scale",
    "scale-collapse",
    "attention-logit-growth",
    "expert-outlier",
    "outlier-growth",
    "gradient-underflow",
    "dying-tile",
    "dead-layer",
    "chronic-quantization-noise",
    "recipe-mismatch",
    "bad-batch",
    "scalar-shift",
    "limit-ahead",
)
"""Modes that detectors over the roll-up find, in the order in which a step is judged: the first is told first."""

LEAP = "outlier-leap"
"""The kind of an `outlier-growth` that leaped in one step. Only precedence knows it: it is no mode."""

FALL = "gradient-fall"
"""The kind of a `scalar-shift` that says that all gradients vanished: what it explains, no other shift does."""

FACTOR = "gradient-factor"
"""The kind of a `scalar-shift` that says that the gradient norm stands at a multiple: what moved the forward pass moved it too."""

LOSS_FALL = "loss-fall"
"""The kind of a `bad-batch` that says that the loss is lower: no number that breaks makes a loss better."""

LOADED = "loaded-otherwise"
"""The kind of a `recipe-mismatch` that says that what was loaded is not what was saved: another model goes on."""

WEIGHT_LEAP = "weight-leap"
"""The kind of a `silent-data-corruption` that was told by a weight that leaped: an optimizer that is known to diverge does that too."""

WEIGHT_FIRST = "weight-first"
"""The kind of one in the weight that the step read in which values broke: they did not make it."""

BLIND = "blind"
"""The kind of a `recipe-mismatch` that says what nobody observes, and of what training may do on purpose: it explains nothing."""

HABIT = "by-habit"
"""The kind of information on what a training is given, or has done to its weights since it began: it goes on, and explains nothing."""

ON_THE_WAY = "on-the-way"
"""The kind of what happened to gradients between backward and the optimizer: no operand is wrong, updates are."""

IN_EFFECT = "setting-in-effect"
"""The kind of a `recipe-mismatch` that was found at the codes: it is what other sites' codes are wrong by too."""

NONFINITE_MODES = frozenset(
    {"nan-in-loss", "zero-tile-eps", "inf-laundering", "nan-in-activation", "kernel-output-fault"}
)
"""Modes whose consequence may be NaN everywhere."""

EXACT_MODES = NONFINITE_MODES | {"bad-batch", "recipe-mismatch"}
"""Modes whose first step is known to the step. Of the others it is what crossed a limit first."""

SPREADING = NONFINITE_MODES | {"optimizer-divergence"}
"""Causes after which values break in other places, or in the same step on other ranks."""

GLOBAL_ROOTS = SPREADING | {
    "silent-data-corruption", "cross-rank-disagreement", "recipe-mismatch", "scale-rounding", "quantiser-fault",
}  # fmt: skip
"""Causes whose consequences show anywhere; of the others, in the same module."""

SHOWS_BEHIND = frozenset({LEAP, WEIGHT_LEAP, WEIGHT_FIRST})
"""Kinds of findings that are of one module, and change what all behind it are given: what leaped by octaves."""

SAME_PARENT = frozenset({"attention-logit-growth"})
"""Causes whose consequences show in modules under one parent."""

PRECURSORS = {"zero-tile-eps": "dying-tile"}
"""What comes first and is the same failure: in one module, the incident goes on under the new name."""

SAYS_MORE = frozenset(
    {
        "optimizer-divergence",
        "attention-logit-growth",
        "recipe-mismatch",
        LOADED,
        "outlier-growth",
        "cross-rank-disagreement",
    }
)
"""Modes that tell what writes to weights do: beside one that began with them, that they are written is no news."""

FADING = frozenset({"dying-tile", "dead-layer"})
"""Modes that show both ways at once, and backwards often first, where two small factors meet: within the window of the first of them
the site that comes first in data flow is named."""

SETTLING = frozenset({"silent-data-corruption", WEIGHT_LEAP, WEIGHT_FIRST, "optimizer-divergence", "bad-batch"})
"""Causes after which the baselines around them need longer to settle."""

_STATISTICAL = {
    "expert-outlier",
    "outlier-growth",
    "gradient-underflow",
    "chronic-quantization-noise",
    "dying-tile",
    "dead-layer",
    "bad-batch",
    "scale-collapse",
    "delayed-clip",
    "frozen-scale",
    "scalar-shift",
    "limit-ahead",
}

EXPLAINS: dict[str, frozenset[str]] = {
    **{mode: frozenset(_STATISTICAL | {"optimizer-divergence", "silent-data-corruption"}) for mode in NONFINITE_MODES},
    # finite outputs that are wrong, as rows that nobody wrote, break what comes behind them
    "kernel-output-fault": frozenset(
        _STATISTICAL | {"optimizer-divergence", "silent-data-corruption", "nan-in-activation", "nan-in-loss"}
    ),
    "quantiser-fault": frozenset(_STATISTICAL | {"optimizer-divergence", "nan-in-loss", "nan-in-activation"}),
    "stale-weight-scale": frozenset(
        {"chronic-quantization-noise", "outlier-growth", "bad-batch", "optimizer-divergence"}
    ),
    "scale-rounding": frozenset({"chronic-quantization-noise", "gradient-underflow", "delayed-clip", "bad-batch"}),
    "recipe-mismatch": frozenset(
        {"chronic-quantization-noise", "gradient-underflow", "delayed-clip", "outlier-growth"}
    ),
    LOADED: frozenset(_STATISTICAL | {"optimizer-divergence", "attention-logit-growth", "silent-data-corruption"}),
    ON_THE_WAY: frozenset({"bad-batch", "scalar-shift", "optimizer-divergence"}),
    IN_EFFECT: frozenset(
        _STATISTICAL | {"optimizer-divergence", "nan-in-loss", "nan-in-activation", "quantiser-fault"}
    ),
    "cross-rank-disagreement": frozenset(
        {
            "delayed-clip",
            "frozen-scale",
            "chronic-quantization-noise",
            "gradient-underflow",
            "scale-collapse",
            "bad-batch",
        }
    ),
    "silent-data-corruption": frozenset(
        _STATISTICAL | {"optimizer-divergence", "attention-logit-growth", "nan-in-loss", "nan-in-activation"}
    ),
    WEIGHT_LEAP: frozenset(
        _STATISTICAL | {"optimizer-divergence", "attention-logit-growth", "nan-in-loss", "nan-in-activation"}
    ),
    WEIGHT_FIRST: frozenset(
        _STATISTICAL | NONFINITE_MODES | {"optimizer-divergence", "attention-logit-growth", "accumulator-precision"}
    ),
    "optimizer-divergence": frozenset(_STATISTICAL | {"attention-logit-growth", "nan-in-loss", "nan-in-activation"}),
    "frozen-scale": frozenset({"delayed-clip", "chronic-quantization-noise", "gradient-underflow", "outlier-growth"}),
    "delayed-clip": frozenset({"chronic-quantization-noise", "outlier-growth", "gradient-underflow", "scale-collapse"}),
    "scale-collapse": frozenset({"chronic-quantization-noise", "gradient-underflow", "outlier-growth"}),
    "attention-logit-growth": frozenset({"outlier-growth", "gradient-underflow", "chronic-quantization-noise"}),
    "expert-outlier": frozenset(
        {"outlier-growth", "chronic-quantization-noise", "gradient-underflow", "dying-tile", "bad-batch"}
    ),
    "outlier-growth": frozenset({"chronic-quantization-noise"}),
    LEAP: frozenset(
        {"chronic-quantization-noise", "bad-batch", "gradient-underflow", "dead-layer", "attention-logit-growth"}
    ),
    "gradient-underflow": frozenset({"chronic-quantization-noise", "dying-tile"}),
    "dead-layer": frozenset({"dying-tile", "gradient-underflow", "chronic-quantization-noise"}),
    "dying-tile": frozenset({"chronic-quantization-noise"}),
    "bad-batch": frozenset({"outlier-growth"}),
    FALL: frozenset(
        {
            "dead-layer",
            "dying-tile",
            "gradient-underflow",
            "chronic-quantization-noise",
            "scale-collapse",
            "frozen-scale",
            "scalar-shift",
            "bad-batch",
        }
    ),
}


EXPLAINS_THERE: dict[str, frozenset[str]] = {
    # logits are made of what these projections give: one whose operand is clipped teaches the others
    "frozen-scale": frozenset({"attention-logit-growth"}),
    "delayed-clip": frozenset({"attention-logit-growth"}),
    # a scale of the past falls where the amax that it follows rises
    "outlier-growth": frozenset({"scale-collapse"}),
    "attention-logit-growth": frozenset({"scale-collapse"}),
}
"""Causes and consequences only where both have a place, and it is the same: elsewhere each is a failure of its own."""

WINDOW_STEPS = 6
"""Observed steps by which the onset of a slow mode is uncertain."""


def explains(root: str, other: str) -> bool:
    """Whether an incident of kind `root` accounts for one of kind `other`."""
    if (
        other == LEAP
    ):  # neither a batch nor logits make one site leap by six octaves: what leaped made the loss jump, or them
        return root not in ("bad-batch", "attention-logit-growth") and "outlier-growth" in EXPLAINS.get(root, ())
    if other == FACTOR and root in (LEAP, "bad-batch"):
        return True
    if other == LOSS_FALL:
        return root == FALL
    if other == WEIGHT_LEAP:
        return root == "optimizer-divergence" or "silent-data-corruption" in EXPLAINS.get(root, ())
    if other in (FALL, FACTOR):
        return root != other and "scalar-shift" in EXPLAINS.get(root, ())
    return other in EXPLAINS.get(root, ())


def explains_there(root: str, other: str) -> bool:
    """Whether an incident of kind `root` accounts for one of kind `other` at its own place, and nowhere else."""
    return other in EXPLAINS_THERE.get(root, ())


def latest(kind: str, onset: int, window: int) -> int:
    """The step after which something of this kind, first seen at `onset`, cannot have begun."""
    return onset + (0 if kind in EXACT_MODES else window)


def asked_at(slug: str) -> int:
    """Place of a mode in the order of asking."""
    return ASKED.index(slug) if slug in ASKED else len(ASKED)
