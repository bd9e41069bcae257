"""Whose Transformer Engine this is: what can be set, and how, is another matter in LoongForge's than in NVIDIA's own.

Thread:     any

NVIDIA's Transformer Engine reads no variable of a single operand; LoongForge's, a patched 2.9, does. Told by the text of the
module that holds the recipes, and by the trainer that is imported.
"""

from __future__ import annotations

import sys
from pathlib import Path

STOCK, LOONGFORGE = "transformer_engine", "loongforge"
"""Names of the backend of a site whose operand it quantised."""


def transformer_engine() -> str:
    """The Transformer Engine that is imported; NVIDIA's own where nothing else is told."""
    if "loongforge" in sys.modules:
        return LOONGFORGE
    file = getattr(sys.modules.get("transformer_engine.common.recipe"), "__file__", None)
    try:
        text = Path(file).read_text(encoding="utf-8") if file else ""
    except (OSError, UnicodeDecodeError):
        text = ""
    return LOONGFORGE if "FP8_QUANT_FWD_INP_AMAX_EPS" in text else STOCK


def assignment(qparams: str, power_2_scale: bool, eps: float, recipe: str = "recipe") -> str:
    """The line that sets what a quantiser of NVIDIA's own Transformer Engine reads."""
    return f"{recipe}.{qparams} = QParams(power_2_scale={power_2_scale}, amax_epsilon={eps:g})"
