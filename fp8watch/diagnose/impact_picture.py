"""Pictures of a loss impact and a what-if.

Thread:     the caller's

A result is a LossImpact or a WhatIf, which import this file to show themselves.

Colours are light enough for dark text in every cell.
"""

from __future__ import annotations

import math
from html import escape
from typing import Any

from fp8watch.diagnose.impact_tables import ONE_BATCH, nats
from fp8watch.diagnose.svg import CELL_H, CELL_W, CHAR_W, svg, text

_PALE, _DEEP = (255, 247, 236), (239, 101, 72)


def what_if_picture(result: Any) -> str:
    """Layers down, formats across; each cell is the spread of the forward's loss impact in nats."""
    known = {(layer.module, layer.format): layer.spread for layer in result.layers}
    formats = [c.name for c in result.candidates]
    values = [v for v in known.values() if v is not None and 0 < v < math.inf]
    low, high = (math.log10(min(values)), math.log10(max(values))) if values else (0.0, 1.0)
    left = CHAR_W * max(len(m) for m in result.modules) + 16
    top = 40 + max(len(f) for f in formats) * 5
    width = left + CELL_W * len(formats) + 60
    height = top + CELL_H * len(result.modules) + 40
    parts = [text(8, 18, "What each format costs, layer by layer: spread of the loss impact, nats", bold=True)]
    for j, name in enumerate(formats):
        x = left + CELL_W * j + CELL_W // 2
        parts.append(f'<text x="{x}" y="{top - 8}" transform="rotate(-35 {x} {top - 8})">{escape(name)}</text>')
    for i, module in enumerate(result.modules):
        y = top + CELL_H * i
        parts.append(text(left - 8, y + 15, module, anchor="end"))
        for j, name in enumerate(formats):
            value = known.get((module, name))
            parts.append(_cell(left + CELL_W * j, y, value, low, high))
    parts.append(text(8, height - 12, ONE_BATCH))
    return svg(width, height, parts)


def impact_picture(result: Any) -> str:
    """Layers down, the dearest first: a bar of the spread, a mark at the impact's size, its sign in figures."""
    layers = result.ranked()
    largest = max((max(layer.spread, abs(layer.impact)) for layer in layers), default=0.0) or 1.0
    left = CHAR_W * max((len(layer.module) for layer in layers), default=10) + 16
    long, top = 360, 34
    height = top + CELL_H * len(layers) + 44
    parts = [text(8, 18, f"What FP8 costs, layer by layer: {result.recipe}, nats of the loss", bold=True)]
    for i, layer in enumerate(layers):
        y = top + CELL_H * i
        parts.append(text(left - 8, y + 15, layer.module, anchor="end"))
        bar = max(1.0, long * layer.spread / largest)
        parts.append(f'<rect x="{left}" y="{y + 3}" width="{bar:.1f}" height="{CELL_H - 8}" fill="#f4a582"/>')
        for value, colour in ((layer.impact, "#08306b"), (layer.measured, "#1a7f37")):
            if value is not None and math.isfinite(value):
                x = left + long * min(abs(value) / largest, 1.0)
                parts.append(f'<rect x="{x - 1.5:.1f}" y="{y + 1}" width="3" height="{CELL_H - 4}" fill="{colour}"/>')
        parts.append(text(left + long + 12, y + 15, nats(layer.impact)))
    legend = "bar: spread; dark mark: |impact|, to first order; green mark: |measured|; figures: impact"
    parts += [text(8, height - 24, legend), text(8, height - 8, ONE_BATCH)]
    return svg(left + long + 100, height, parts)


def _cell(x: int, y: int, value: float | None, low: float, high: float) -> str:
    label = "–" if value is None else f"{value:.0e}" if math.isfinite(value) else str(value)
    share = (
        0.0
        if value is None or value <= 0
        else 1.0
        if math.isinf(value)
        else (math.log10(value) - low) / max(high - low, 1e-9)
    )
    colour = ",".join(str(round(a + (b - a) * share)) for a, b in zip(_PALE, _DEEP, strict=True))
    return (
        f'<rect x="{x}" y="{y}" width="{CELL_W - 2}" height="{CELL_H - 2}" fill="rgb({colour})"/>'
        f'<text x="{x + CELL_W // 2 - 1}" y="{y + 14}" text-anchor="middle" class="small">{label}</text>'
    )
