"""Loss impact and what-if as text: columns that a terminal and a bug report show.

Thread:     the caller's

A result is a LossImpact or a WhatIf, which import this file to show themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

ONE_BATCH = "One batch at these weights: it does not say how a training would go on."


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Cells in columns, two spaces apart: the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def nats(value: float | None) -> str:
    """Signed, three digits; – where it was not measured."""
    return "–" if value is None else f"{value:+.2e}" if math.isfinite(value) else str(value)


def number(value: float | None, spec: str = ".1f") -> str:
    """– where it was not measured."""
    return "–" if value is None else format(value, spec)


def impact_table(result: Any) -> str:
    """One line a layer, the dearest first."""
    forward = result.measured_total is not None
    backward = any(layer.backward is not None for layer in result.layers)
    timed = any(b is not None and b.measured_wgrad is not None for b in (layer.backward for layer in result.layers))
    head = ["layer", "impact", "spread", *(["measured"] if forward else []), "output error", "rows"]
    if backward:
        head += ["dgrad", *(["measured"] if timed else []), "wgrad", *(["measured"] if timed else [])]
    rows = [head]
    for layer in result.ranked():
        row = [layer.module, nats(layer.impact), number(layer.spread, ".2e")]
        row += [nats(layer.measured)] if forward else []
        row += [f"{layer.output_error:.2%}", str(layer.num_rows)]
        if backward:
            b = layer.backward
            for gemm in ("dgrad", "wgrad"):
                row.append(nats(getattr(b, gemm, None)))
                row += [nats(getattr(b, f"measured_{gemm}", None))] if timed else []
        rows.append(row)
    total = (
        f"{result.recipe}: loss {result.loss:.4f} nats in high precision, spread {result.spread:.2e} of all forwards"
    )
    if forward:
        total += f" ({nats(result.measured_total)} measured with all of them)"
    lines = [
        total,
        "",
        columns(rows),
        "",
        "impact, spread, measured: nats of the loss, this layer's forward in FP8 alone",
    ]
    if result.descent is not None:
        lines.append(
            f"dgrad, wgrad: nats that a step descends less; the step of this batch descends {result.descent:.2e}"
        )
    return "\n".join([*lines, ONE_BATCH])


def what_if_table(result: Any, *, layers: bool = True) -> str:
    """One line a format; then, of each layer, one line a format."""
    rows = [["format", "bits", "SQNR", "tile SQNR", "worst", "underflow", "saturated", "gain − 1", "spread"]]
    for summary in result.summaries():
        rows.append(
            [
                summary.format, str(summary.bits), number(summary.sqnr_db), number(summary.tile_sqnr_db), number(summary.worst_tile_sqnr_db),
                number(summary.underflow, ".2%"), number(summary.saturated, ".2%"), number(summary.gain_error, "+.1e"),
                number(summary.spread, ".2e"),
            ]
        )  # fmt: skip
    lines = [f"loss {result.loss:.4f} nats in high precision, {len(result.modules)} layers", "", columns(rows)]
    if layers:
        for module in result.modules:
            lines += [
                "",
                columns([[module, "input", "weight", "grad", "underflow", "impact", "spread"], *_of(result, module)]),
            ]
    lines += [
        "",
        "SQNR in dB, tile SQNR over 1×128 tiles, worst: of a layer's operand; impact and spread: nats, forward only",
        ONE_BATCH,
        "",
    ]
    return "\n".join([*lines, *(f"{c.name}: {c.how}" for c in result.candidates)])


def _of(result: Any, module: str) -> list[list[str]]:
    rows = []
    for layer in result.of(module):
        operands = [min((s.tile_sqnr_db for s in layer.sites if s.operand == o and s.tile_sqnr_db is not None), default=None)
                    for o in ("input", "weight", "grad_output")]  # fmt: skip
        flushed = max((s.underflow for s in layer.sites if s.underflow is not None), default=None)
        rows.append(
            [
                f"  {layer.format}",
                *map(number, operands),
                number(flushed, ".2%"),
                nats(layer.impact),
                number(layer.spread, ".2e"),
            ]
        )
    return rows
