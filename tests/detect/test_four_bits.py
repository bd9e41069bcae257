"""A healthy run whose operands are NVFP4 raises nothing: bands of eight bits do not judge it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from detect.play import play
from detect.scenarios import Case
from detect.trace import healthy

from fp8watch_agent.record import Measured


def trace():
    t = healthy(5, 150, power_2_scale=False)
    t.sites = [replace(s, format="E2M1", recipe="nvfp4", tile=(1, 16), power_2_scale=False) for s in t.sites]
    every = np.ones(len(t.sites), dtype=bool)
    t.set_sqnr(every, 20.4 + 0.2 * np.random.default_rng(0).standard_normal((t.num_steps, len(t.sites))))
    c = t.columns
    c["scale_ratio_max"], c["scale_ratio_min"] = (
        np.full_like(c["scale_ratio_max"], 1.06),
        np.full_like(c["scale_ratio_min"], 0.95),
    )
    c["num_underflow"] = (0.11 * c["num_nonzero"]).astype(c["num_underflow"].dtype)
    for name, value in (("signal_energy", 1e8), ("noise_energy", 9e5), ("gain_energy", -7e5)):
        c[name] = np.full(c["num_nonzero"].shape, value)
    c["measured"] = c["measured"] | Measured.GAIN
    return t, every


def test_what_four_bits_lose_at_their_best_is_not_told() -> None:
    t, _ = trace()
    assert [(f.mode, f.step) for f in play(Case([t], 0)) if f.severity != "info"] == []


def test_a_site_far_under_the_band_of_four_bits_is() -> None:
    t, every = trace()
    t.set_sqnr(every, np.full((t.num_steps, len(t.sites)), 9.0))
    assert "chronic-quantization-noise" in {f.mode for f in play(Case([t], 0))}
