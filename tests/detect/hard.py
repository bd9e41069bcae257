"""Healthy runs that look ill: each must page nobody."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from detect.trace import Trace, healthy


def _steps(t: Trace, at: int, value: float) -> np.ndarray:
    return np.where(np.arange(t.num_steps) >= at, value, 0.0)


def plain(seed: int, num: int) -> Trace:
    return healthy(seed, num)


def fp32_scales(seed: int, num: int) -> Trace:
    return healthy(seed, num, power_2_scale=False)


def hybrid_delayed(seed: int, num: int) -> Trace:
    return healthy(seed, num, recipe="delayed", hybrid=True)


def rewarmup(seed: int, num: int) -> Trace:
    at = np.arange(num)
    third = num // 3
    lr = 2e-3 * np.minimum(1, (np.where(at < third, at, at - third) + 1) / 40)
    return healthy(seed, num, lr=lr)


def lr_times_2(seed: int, num: int) -> Trace:
    t = healthy(seed, num, lr=np.where(np.arange(num) < num // 2, 1e-3, 2e-3))
    weights = t.mask(operand="weight")
    for j in np.flatnonzero(weights):  # AdamW at twice the LR grows at twice the pace for a while
        mask = np.arange(len(t.sites)) == j
        t.grow(mask, 0.004 * np.clip(np.arange(num) - num // 2, 0, 60))
    return t


def domain_switch(seed: int, num: int) -> Trace:
    rng = np.random.default_rng([seed, 77])
    t, at = healthy(seed, num), num // 2
    t.steps["loss"] += _steps(t, at, 1.4) * np.exp(-np.maximum(np.arange(num) - at, 0) / 40)
    t.steps["grad_norm"][at : at + 6] *= 1.8
    for j in np.flatnonzero(t.mask(operand="input") | t.mask(operand="grad_output")):
        mask = np.arange(len(t.sites)) == j
        t.grow(mask, _steps(t, at, float(rng.normal(0, 0.3 if t.sites[j].operand == "input" else 1.0))))
    return t


def batch_change(seed: int, num: int) -> Trace:
    t, at = healthy(seed, num), num // 2
    for name in (
        "num_elements",
        "num_nonzero",
        "num_underflow",
        "moment4",
        "moment2",
        "tile_noise_ratio_sum",
        "num_tiles",
    ):
        mask = ~t.mask(operand="weight")
        t.columns[name][at:, mask] = t.columns[name][at:, mask] * 2
    t.columns["num_zero_tiles"][at:] *= 2
    t.grow(t.mask(operand="grad_output"), _steps(t, at, -1.0))
    t.steps["loss"][at:] = (
        np.median(t.steps["loss"][at:]) + (t.steps["loss"][at:] - np.median(t.steps["loss"][at:])) * 0.7
    )
    return t


def accumulation(seed: int, num: int) -> Trace:
    t, at = healthy(seed, num), num // 2
    t.grow(t.mask(operand="grad_output"), _steps(t, at, -2.0))
    t.steps["grad_norm"][at:] *= 0.6
    return t


def masked_tokens(seed: int, num: int) -> Trace:
    """Fine-tuning: most gradients are exactly zero, tiles of them too."""
    t, at = healthy(seed, num), num // 2
    grads = t.mask(operand="grad_output")
    c = t.columns
    for name in ("num_nonzero", "num_underflow"):
        c[name][at:, grads] = c[name][at:, grads] // 4
    c["num_zero_tiles"][at:, grads] = (0.75 * c["num_tiles"][at:, grads]).astype(int)
    c["tile_noise_ratio_sum"][at:, grads] *= 0.25
    t.grow(grads, _steps(t, at, 1.5))
    t.steps["loss"][at:] += 0.5
    return t


def frozen_layers(seed: int, num: int) -> Trace:
    """Half of the layers get no gradients any more, and their weights stand still."""
    t, at = healthy(seed, num), num // 2
    for layer in ("layers.0.", "layers.1."):
        mask = np.array([s.module.startswith(layer) for s in t.sites])
        weights = mask & t.mask(operand="weight")
        for name in ("amax_max", "amax_min_nonzero", "scale_inv_max", "scale_inv_min"):
            t.columns[name][at:, weights] = t.columns[name][at, weights]
        t.columns["measured"][at:, mask & t.mask(operand="grad_output")] = 0
    return t


def starved_experts(seed: int, num: int) -> Trace:
    """Experts that get no tokens for a few steps, now and then."""
    rng = np.random.default_rng([seed, 78])
    t = healthy(seed, num)
    c = t.columns
    for kind in ("layers.0.mlp.up_proj", "layers.2.mlp.down_proj"):
        mask = t.mask(kind) & ~t.mask(operand="weight")
        for at in rng.integers(60, num, max(1, num // 40)):
            span = slice(int(at), int(at) + int(rng.integers(1, 4)))
            for name in (
                "num_elements",
                "num_nonzero",
                "num_underflow",
                "amax_max",
                "num_tiles",
                "num_zero_tiles",
                "tile_noise_ratio_sum",
            ):
                c[name][span, mask] = 0
            c["amax_min_nonzero"][span, mask] = np.inf
            c["scale_ratio_max"][span, mask], c["scale_ratio_min"][span, mask] = 0, np.inf
    return t


def sharp_attention(seed: int, num: int) -> Trace:
    """As recorded: single tokens' gradients of query, key and value fade to the last denormal; across tokens nothing does."""
    rng = np.random.default_rng([seed, 79])
    t = healthy(seed, num)
    floor = np.interp(np.arange(num), [0, num // 3, num], [-30, -110, -145])
    for kind in ("attention.q_proj", "attention.k_proj", "attention.v_proj"):
        for j in np.flatnonzero(t.mask(kind, "grad_output", "rowwise")):
            wander = np.cumsum(rng.normal(0, 3, num))
            t.columns["amax_min_nonzero"][:, j] = np.exp2(np.clip(floor + wander + rng.normal(0, 6, num), -149, -25))
            faded = np.arange(len(t.sites)) == j
            t.set_sqnr(faded, t.sqnr(faded)[:, 0] - np.interp(np.arange(num), [num // 2, num], [0, 9]))
    return t


HARD: dict[str, Callable[[int, int], Trace]] = {
    "blockwise": plain,
    "FP32 scales": fp32_scales,
    "delayed, hybrid": hybrid_delayed,
    "LR re-warm-up": rewarmup,
    "LR ×2": lr_times_2,
    "domain switch": domain_switch,
    "batch ×2": batch_change,
    "gradient accumulation": accumulation,
    "masked tokens": masked_tokens,
    "frozen layers": frozen_layers,
    "starved experts": starved_experts,
    "sharp attention": sharp_attention,
}
