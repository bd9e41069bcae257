"""CSV responses for spreadsheets and scripts.

Shapes:     the dicts of store.queries -> text/csv, one line a step (or site), a header first
Thread:     query pool

Names come from users: a text cell that a spreadsheet would take for a formula gets a leading apostrophe. Numbers are
written unchanged, non-finite ones as nan, inf and -inf, unmeasured ones as empty cells.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def cell(value: Any) -> Any:
    """One value, safe from formula injection."""
    if isinstance(value, str) and value.startswith(_FORMULA):
        return f"'{value}"
    return value


def write(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Encode rows. Non-finite values must be passed as _Mark."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow([cell(name) for name in header])
    for row in rows:
        writer.writerow([str(v) if isinstance(v, _Mark) else cell(v) for v in row])
    return out.getvalue()


class _Mark(str):
    """nan, inf or -inf: written by us, and no formula."""

    __slots__ = ()


def _marked(values: Sequence[Any], nonfinite: Iterable[Sequence[Any]]) -> list[Any]:
    out = list(values)
    for index, name in nonfinite:
        out[index] = _Mark(name)
    return out


def series(data: dict[str, Any]) -> str:
    """A series or scalar: step, value."""
    values = _marked(data["values"], data["nonfinite"])
    return write(["step", data["field"]], zip(data["steps"], values, strict=True))


def top(data: dict[str, Any]) -> str:
    """The worst sites, one line each."""
    rows = [
        [
            i["site"],
            i["module"],
            i["operand"],
            i["direction"],
            i["step"],
            _Mark(i["nonfinite"]) if i["nonfinite"] else i["value"],
        ]
        for i in data["items"]
    ]
    return write(["site", "module", "operand", "direction", "step", data["field"]], rows)


def heatmap(data: dict[str, Any]) -> str:
    """A heat map, one line per step, one column per site."""
    grid = [list(row) for row in data["values"]]
    for i, j, name in data["nonfinite"]:
        grid[i][j] = _Mark(name)
    names = [f"{s['module']} {s['operand']} {s['direction']}" for s in data["sites"]]

    def rows() -> Iterator[list[Any]]:
        for j, step in enumerate(data["steps"]):
            yield [step, *(row[j] for row in grid)]

    return write(["step", *names], rows())


def histogram(data: dict[str, Any]) -> str:
    """A histogram, one line per step, one column per bucket."""
    return write(
        ["step", *data["buckets"]],
        ([step, *counts] for step, counts in zip(data["steps"], data["counts"], strict=True)),
    )
