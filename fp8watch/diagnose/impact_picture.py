"""Pictures of a loss impact and a what-if: SVG written by hand, so that nothing has to be installed for it.

Thread:     the caller's

A result is a LossImpact or a WhatIf, which import this file to show themselves.

Colours are light enough for dark text in every cell; text is the viewer's own font; nothing is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from fp8watch.diagnose.impact_tables import ONE_BATCH, nats

CELL_W, CELL_H, CHAR_W = 62, 22, 7
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
    parts = [_text(8, 18, "What each format costs, layer by layer: spread of the loss impact, nats", bold=True)]
    for j, name in enumerate(formats):
        x = left + CELL_W * j + CELL_W // 2
        parts.append(f'<text x="{x}" y="{top - 8}" transform="rotate(-35 {x} {top - 8})">{escape(name)}</text>')
    for i, module in enumerate(result.modules):
        y = top + CELL_H * i
        parts.append(_text(left - 8, y + 15, module, anchor="end"))
        for j, name in enumerate(formats):
            value = known.get((module, name))
            parts.append(_cell(left + CELL_W * j, y, value, low, high))
    parts.append(_text(8, height - 12, ONE_BATCH))
    return _svg(width, height, parts)


def impact_picture(result: Any) -> str:
    """Layers down, the dearest first: a bar of the spread, a mark at the impact's size, its sign in figures."""
    layers = result.ranked()
    largest = max((max(layer.spread, abs(layer.impact)) for layer in layers), default=0.0) or 1.0
    left = CHAR_W * max((len(layer.module) for layer in layers), default=10) + 16
    long, top = 360, 34
    height = top + CELL_H * len(layers) + 44
    parts = [_text(8, 18, f"What FP8 costs, layer by layer: {result.recipe}, nats of the loss", bold=True)]
    for i, layer in enumerate(layers):
        y = top + CELL_H * i
        parts.append(_text(left - 8, y + 15, layer.module, anchor="end"))
        bar = max(1.0, long * layer.spread / largest)
        parts.append(f'<rect x="{left}" y="{y + 3}" width="{bar:.1f}" height="{CELL_H - 8}" fill="#f4a582"/>')
        for value, colour in ((layer.impact, "#08306b"), (layer.measured, "#1a7f37")):
            if value is not None and math.isfinite(value):
                x = left + long * min(abs(value) / largest, 1.0)
                parts.append(f'<rect x="{x - 1.5:.1f}" y="{y + 1}" width="3" height="{CELL_H - 4}" fill="{colour}"/>')
        parts.append(_text(left + long + 12, y + 15, nats(layer.impact)))
    legend = "bar: spread; dark mark: |impact|, to first order; green mark: |measured|; figures: impact"
    parts += [_text(8, height - 24, legend), _text(8, height - 8, ONE_BATCH)]
    return _svg(left + long + 100, height, parts)


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


def _text(x: float, y: float, text: str, anchor: str = "start", *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'


def _svg(width: int, height: int, parts: Sequence[str]) -> str:
    style = "text{font:12px sans-serif;fill:#1b1f24}.small{font-size:11px}"
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img">',
            f"<style>{style}</style>",
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            *parts,
            "</svg>",
        )
    ) + "\n"  # fmt: skip
