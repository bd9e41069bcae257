"""What is looked ahead for: quantities with a limit that means something, and the sites they are told of.

Shapes:     frozen data
Thread:     any; only data
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fp8watch_server.detect.families.attention_logits import LOG
from fp8watch_server.detect.finding import Evidence, Finding
from fp8watch_server.detect.phrases import number


@dataclass(frozen=True)
class Quantity:
    """One of them."""

    field: str
    label: str
    unit: str
    shown: Callable[[float], str]
    means: str
    """What is so from the limit on."""


UNDERFLOW = Quantity(
    "underflow_ratio", "Underflow", "share", lambda v: f"{100 * v:.3g} %", "the limit of chronic-quantization-noise"
)
CLIP_DEPTH = Quantity("clip_depth", "Clip depth", "ratio", number, "from where the largest values are clipped")
LOGITS = Quantity(LOG, "The largest attention logit", "logit", number, "where softmax is one-hot")
BY_FIELD = {q.field: q for q in (UNDERFLOW, CLIP_DEPTH, LOGITS)}

CLIPS_ABOVE = 1.0
"""amax over what the scale can carry. A scale of this tensor, or of this tile, fits every amax: it has no such limit."""


def flushes(operand: str, number_format: str) -> bool:
    """Whether the limit of underflow is one of such a site. Four bits flush a tenth to 0 at their best, and a
    probe has no format."""
    return operand in ("input", "weight") and number_format not in ("E2M1", "")


def carries(recipe: str) -> bool:
    """Whether the scale of such a site is older than its tensor, so that amax may grow out of it."""
    return recipe == "delayed"


def told(finding: Finding) -> tuple[Quantity, Evidence] | None:
    """What a finding is about, and its value with the limit as its baseline."""
    by_field = {e.field: e for e in finding.evidence}
    return next(((q, by_field[q.field]) for q in BY_FIELD.values() if q.field in by_field), None)
