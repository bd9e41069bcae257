"""A run that loses nothing by being quantised."""

from __future__ import annotations

from typing import Any


def lossless(steps: Any, rows: Any) -> None:
    """For `synthetic.Run.send(change=...)`."""
    for field in ("tile_noise_ratio_sum", "tile_noise_ratio_max", "noise_energy"):
        rows[field] = 0.0
