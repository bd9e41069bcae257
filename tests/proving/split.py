"""What may choose a threshold, and what scores. By family *and* by fault generator, fixed here before the first score.

A run is `dev` where family and generator both are, `held-out` where neither is, `crossed` otherwise: one of the two has been
seen, so it neither chooses nor scores, and is shown apart. Traps are split by family alone, and their twins too.

`fresh` came later, when the misses of the held-out half had been read: generators and traps whose author had not seen the
detectors, in families made with them and in the held-out ones. In a dev family they are crossed, as are older faults in a
fresh family. `unseen` came when the fresh set had been read too, and is made alike: by an author who had not seen the
detectors, with accepted names, places and FP8-or-not fixed before the first run, in families of its own, in fresh and in
held-out ones. What was tried before is that each fault bites where it says and nowhere before; no incident was read.
`sealed` is made like unseen, after the unseen set had been read, by an author who had not seen the detectors.
`veiled` is made like sealed, after the sealed set had been read, by an author who had seen no detector and no incident.
`concealed` is made like veiled, after the veiled set had been read, and is the newest: the set to believe.
"""

from __future__ import annotations

DEV_FAMILIES = ("accumulate", "diffusion", "gpt", "llama", "moe", "recurrent", "t5")
HELD_OUT_FAMILIES = ("ddp", "delayed", "fp16", "lora", "qwen_moe", "resume", "rl", "ssm", "vit")
FRESH_FAMILIES = ("bert", "mixer", "muon", "towers")
UNSEEN_FAMILIES = ("gemma", "speech", "world")
SEALED_FAMILIES = ("perceiver", "preference", "ranker")
VEILED_FAMILIES = ("codec", "graph")
CONCEALED_FAMILIES = ("distil", "flow", "series", "swin")

DEV_GENERATORS = (
    "activations", "codes", "configuration", "data", "gradients", "nonfinite", "outputs", "planted", "products", "rounding", "weight_cache",
)  # fmt: skip
HELD_OUT_GENERATORS = (
    "attention", "corruption", "dead", "delayed", "learning_rate", "ranks", "resume", "rollouts", "scales", "tiles", "transposed",
)  # fmt: skip
"""Chosen by their names, so that both halves have faults of kernels, of activations, of data or rate, and of storage."""

FRESH_GENERATORS = ("backward", "feeding", "stores", "updates")
FRESH_TRAPS = ("averages-written-back", "clipping-tightened", "packing-begins", "param-group-added", "rate-in-cycles")

UNSEEN_GENERATORS = ("arithmetic", "epilogues", "ranges", "reductions", "samples", "states")
UNSEEN_TRAPS = (
    "batch-ramped", "cooldown-to-zero", "input-masking-begins", "label-smoothing-begins", "little-scored", "unfrozen-late",
)  # fmt: skip

SEALED_GENERATORS = ("chips", "conversions", "gathers", "histories", "partials", "passes", "targets")
SEALED_TRAPS = (
    "moments-decay-otherwise", "penalty-in-the-loss", "pruned-gradually", "rows-given-to-others", "short-last-batch",
)  # fmt: skip

VEILED_GENERATORS = ("buffers", "compression", "groups", "launches", "orders", "packing")
VEILED_TRAPS = ("layers-skipped-at-random", "moments-begun-anew", "sharpness-sought")

CONCEALED_GENERATORS = ("edges", "ledgers", "pairings", "returns", "stashes", "swizzles")
CONCEALED_TRAPS = (
    "gradient-noise-begins", "large-gradients-skipped", "logits-penalised", "queries-and-keys-clipped", "rates-by-depth", "samples-mixed",
)  # fmt: skip

HALVES = ("dev", "held-out", "fresh", "unseen", "sealed", "veiled", "concealed")
NEWER: dict[str, tuple[str, ...]] = {
    "dev": (), "held-out": (), "fresh": ("held-out",), "unseen": ("held-out", "fresh"), "sealed": ("held-out", "fresh", "unseen"),
    "veiled": ("held-out", "fresh", "unseen", "sealed"), "concealed": ("held-out", "fresh", "unseen", "sealed", "veiled"),
}  # fmt: skip
"""Of a change: families of which other halves chose nothing for it."""


def _half(name: str, *lists: tuple[str, ...]) -> str:
    for half, names in zip(HALVES, lists, strict=True):
        if name in names:
            return half
    raise ValueError(f"{name!r} is in no split: add it to one of the lists of split.py, before it is run")


def split_of(family: str, generator: str | None = None, trap: str | None = None) -> str:
    """One of "dev", "held-out", "crossed", "fresh", "unseen", "sealed", "veiled", "concealed".

    Args:
        generator: of the fault, None where there is none.
        trap: its name, None where there is none.

    Raises:
        ValueError: a family or a generator that is in no list.
    """
    of_family = _half(
        family,
        DEV_FAMILIES,
        HELD_OUT_FAMILIES,
        FRESH_FAMILIES,
        UNSEEN_FAMILIES,
        SEALED_FAMILIES,
        VEILED_FAMILIES,
        CONCEALED_FAMILIES,
    )
    of_change = of_family
    if trap in FRESH_TRAPS:
        of_change = "fresh"
    elif trap in UNSEEN_TRAPS:
        of_change = "unseen"
    elif trap in SEALED_TRAPS:
        of_change = "sealed"
    elif trap in VEILED_TRAPS:
        of_change = "veiled"
    elif trap in CONCEALED_TRAPS:
        of_change = "concealed"
    elif generator is not None:
        of_change = _half(
            generator,
            DEV_GENERATORS,
            HELD_OUT_GENERATORS,
            FRESH_GENERATORS,
            UNSEEN_GENERATORS,
            SEALED_GENERATORS,
            VEILED_GENERATORS,
            CONCEALED_GENERATORS,
        )
    if of_change == of_family or of_family in NEWER[of_change]:
        return of_change
    return "crossed"
