"""What may choose a threshold, and what scores. By family *and* by fault generator, fixed here before the first score.

A run is `dev` where family and generator both are, `held-out` where neither is, `crossed` otherwise: one of the two has been
seen, so it neither chooses nor scores, and is shown apart. Traps are split by family alone, and their twins too.
"""

from __future__ import annotations

DEV_FAMILIES = ("accumulate", "diffusion", "gpt", "llama", "moe", "recurrent", "t5")
HELD_OUT_FAMILIES = ("ddp", "delayed", "fp16", "lora", "qwen_moe", "resume", "rl", "ssm", "vit")


DEV_GENERATORS = (
    "activations", "codes", "configuration", "data", "gradients", "nonfinite", "outputs", "planted", "products", "rounding", "weight_cache",
)  # fmt: skip
HELD_OUT_GENERATORS = (
    "attention", "corruption", "dead", "delayed", "learning_rate", "ranks", "resume", "rollouts", "scales", "tiles", "transposed",
)  # fmt: skip
"""Chosen by their names, so that both halves have faults of kernels, of activations, of data or rate, and of storage."""


def _is_held_out(name: str, dev: tuple[str, ...], held_out: tuple[str, ...]) -> bool:
    if name not in dev + held_out:
        raise ValueError(f"{name!r} is in no split: add it to one of the lists of split.py, before it is run")
    return name in held_out


def split_of(family: str, generator: str | None = None) -> str:
    """One of "dev", "held-out", "crossed".

    Raises:
        ValueError: a family or a generator that is in no list.
    """
    family_held_out = _is_held_out(family, DEV_FAMILIES, HELD_OUT_FAMILIES)
    if generator is not None and _is_held_out(generator, DEV_GENERATORS, HELD_OUT_GENERATORS) != family_held_out:
        return "crossed"
    return "held-out" if family_held_out else "dev"
