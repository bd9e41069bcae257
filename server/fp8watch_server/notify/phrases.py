"""Phrases that every channel uses: where an incident is, and what shows it, each in one line.

Shapes:     place and evidence of an incident -> text, not escaped
Thread:     dispatcher; pure
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fp8watch_server.incidents.explain import number


def place_words(place: Mapping[str, Any]) -> str:
    """`layers.1.mlp.down_proj input (fprop), tile (37, 5), element (37, 700), ranks 0–3`."""
    words = []
    if place.get("module"):
        words.append(f"{place['module']} {place.get('operand')} ({place.get('gemm')})")
    for name in ("tile", "element"):
        if place.get(name):
            words.append(f"{name} ({place[name][0]}, {place[name][1]})")
    words.append(_ranks(place.get("ranks") or []))
    return ", ".join(w for w in words if w)


def _ranks(ranks: list[int]) -> str:
    if not ranks:
        return ""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) <= 4:
        return f"ranks {', '.join(map(str, ranks))}"
    return f"{len(ranks)} ranks, {min(ranks)} to {max(ranks)}"


def evidence_line(evidence: Sequence[Mapping[str, Any]], max_items: int = 5) -> str:
    """`num_inf 1 (was 0), num_sentinel_tiles 1 (was 0), loss 2.31`."""
    items = []
    for e in evidence[:max_items]:
        value = _shown(e["value"])
        unit = f" {e['unit']}" if e.get("unit") and e["unit"] not in ("1", "x", "ratio", "elements", "tiles") else ""
        usual = e.get("baseline")
        items.append(f"{e['field']} {value}{unit}" + ("" if usual is None else f" (normal: {_shown(usual)})"))
    return ", ".join(items)


def _shown(value: object) -> str:
    return {"nan": "NaN", "inf": "Inf", "-inf": "-Inf"}.get(value, value) if isinstance(value, str) else number(value)
