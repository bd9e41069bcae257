"""What tests/quantize/test_statistics.py and others share."""

from __future__ import annotations

from typing import Any

import numpy as np

SUMS = ("signal_energy", "noise_energy", "tile_noise_ratio_sum", "moment2", "moment4", "tile_noise_ratio_max")


def gain_tolerance(sketch: Any) -> Any:
    """Terms of both signs: the error is a share of what they are without them, √(Σx²·Σ(x − x̂)²) at most. Errors that
    are subnormal in units of their tile are none in float32."""
    signal, noise = sketch["signal_energy"], sketch["noise_energy"]
    return 1e-6 * np.sqrt(signal) * np.sqrt(noise) + 1e-30 * signal + 1e-300
