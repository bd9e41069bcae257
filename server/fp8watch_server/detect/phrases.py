"""Phrases that titles and causes are made of: numbers as people write them, places, since when.

Shapes:     (Finding, facts) -> text
Thread:     any; pure functions
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fp8watch_server.detect.finding import Finding, SiteFacts


def number(value: Any) -> str:
    """A number as people write it: 4 digits, no 1e+00."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "none" if value is None else str(value)
    if isinstance(value, int):
        return str(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Inf" if value > 0 else "-Inf"
    return f"{value:.4g}"


def site_words(facts: SiteFacts | None) -> str:
    """`layers.1.mlp.down_proj input (fprop)`."""
    return f"{facts.module} {facts.operand} ({facts.gemm})" if facts else "the loss"


def rank_words(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0 and 1`; of more than eight the first eight."""
    named = [str(r) for r in ranks[:8]]
    if len(named) < 2:
        return f"rank {', '.join(named)}"
    if len(ranks) > 8:
        return f"ranks {', '.join(named)} and {len(ranks) - 8} more"
    return f"ranks {', '.join(named[:-1])} and {named[-1]}"


def tile_words(finding: Finding) -> str:
    """`, tile (37, 1)`, or nothing; of experts with the number of the expert before it."""
    return expert_words(finding) + (
        f", tile ({finding.tile[0]}, {finding.tile[1]})" if finding.tile is not None else ""
    )


def expert_words(finding: Finding) -> str:
    """`, expert 17`, or nothing."""
    expert = finding.extra.get("expert")
    return f", expert {expert}" if expert is not None else ""


def element_words(finding: Finding) -> str:
    """` at element (5, 7)`, or nothing; of experts in rows of the expert: ` at element (5, 7) of expert 17`."""
    if finding.element is None:
        return ""
    row, expert = finding.extra.get("expert_row"), finding.extra.get("expert")
    if row is None or expert is None:
        return f" at element ({finding.element[0]}, {finding.element[1]})"
    return f" at element ({row}, {finding.element[1]}) of expert {expert}"


def channels(finding: Finding, facts: SiteFacts | None) -> str:
    """The channel that was seen to hold the largest element, else those of the named tile: `channels 128 to 255`, or nothing."""
    if finding.extra.get("channel") is not None:
        return f"channel {finding.extra['channel']}"
    if finding.tile is None or facts is None or facts.tile[1] >= facts.shape[1]:
        return ""
    first = finding.tile[1] * facts.tile[1]
    last = min(first + facts.tile[1], facts.shape[1]) - 1
    return f"channel {first}" if first == last else f"channels {first} to {last}"


def evidence(finding: Finding, name: str) -> Any:
    """Value of a piece of evidence, None where it is not there."""
    return next((e.value for e in finding.evidence if e.field == name), None)


def baseline(finding: Finding, name: str) -> Any:
    """Baseline of a piece of evidence."""
    return next((e.baseline for e in finding.evidence if e.field == name), None)


def since(finding: Finding) -> str:
    """`since step 120`, or nothing."""
    steps = [e.since_step for e in finding.evidence if e.since_step is not None]
    return f" since step {min(steps)}" if steps and min(steps) < finding.step else ""


def ratio(finding: Finding) -> str:
    """`scale_ratio 1.13`: the end of its range that is outside of its bounds."""
    low, high = finding.extra.get("ratio_min"), finding.extra.get("ratio_max")
    above = high is not None and high > 1 + 2.0**-20
    return f"scale_ratio {number(high if above else low)}"
