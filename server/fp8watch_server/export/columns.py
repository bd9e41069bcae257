"""Columns of the exported tables: names, Arrow types, units, and what they say.

Shapes:     Column -> a pyarrow schema whose metadata holds units and formulas
Thread:     any; only data

A number that was not measured is null, never 0. NaN and ±Inf are themselves: Parquet has them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from fp8watch_agent.record import FIELDS, HISTOGRAMS, Measured
from fp8watch_server.db.schema import SCALAR_NAMES
from fp8watch_server.store.fields import SERIES_FIELDS, evaluate
from fp8watch_server.store.records import filled

TEXT = pa.dictionary(pa.int32(), pa.string())
SECONDS = "s since 1970"


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    name: str
    type: pa.DataType
    unit: str
    doc: str


def _of_series(name: str) -> pa.DataType:
    """The dtype in which the API computes a field."""
    field = SERIES_FIELDS[name]
    values, _ = evaluate(field, {column: filled(column, 1) for column in {*field.needs, "measured"}})
    return pa.from_numpy_dtype(np.dtype(values.dtype))


def _evaluated() -> tuple[Column, ...]:
    with np.errstate(all="ignore"):
        return tuple(Column(f.name, _of_series(f.name), f.unit, f.doc) for f in SERIES_FIELDS.values())


COORDINATES = tuple(f for f in FIELDS if f.size > 1 and f.name not in HISTOGRAMS)
BUCKETS = tuple(f for f in FIELDS if f.name in HISTOGRAMS)

_SITE = Column("site", pa.int64(), "id", "the site: the same on all ranks and in all runs")
_STEP = Column("step", pa.int64(), "step", "optimizer step")
_PLACE = (
    Column("module", TEXT, "", "fully qualified name of the module"),
    Column("operand", TEXT, "", "input | weight | grad_output"),
    Column("direction", TEXT, "", "rowwise | columnwise"),
)

STEPS = (
    _STEP,
    Column("attempt", pa.int32(), "", "start of the run that computed it, from 1: the newest"),
    Column("status", pa.string(), "", "ok | skipped | aborted: the worst of its ranks"),
    Column("num_ranks", pa.int32(), "ranks", "ranks whose step is here"),
    Column("time", pa.float64(), SECONDS, "when the last of these ranks ended it, by the clocks of training"),
    *(
        Column(name, pa.float64(), "", "mean over the ranks that gave one; NaN where one is NaN")
        for name in SCALAR_NAMES
    ),
)
LOGGED = (
    Column("name", TEXT, "", "name given to watch.log"),
    _STEP,
    Column("value", pa.float64(), "", "mean over the ranks that gave one; NaN where one is NaN"),
)
SERIES = (
    _SITE,
    *_PLACE,
    _STEP,
    Column("rank", pa.int32(), "", "null: merged over all ranks"),
    Column(
        "full", pa.bool_(), "", "full statistics; else a light record, in which energies, moments and depths are null"
    ),
    *_evaluated(),
    *(Column(f.name, pa.list_(pa.int32()), f.unit, f.doc) for f in COORDINATES),
    *(Column(f.name, pa.list_(pa.int64()), f.unit, f"{f.doc}; counts, right within 4.4 %") for f in BUCKETS),
)
SITES = (
    _SITE,
    *_PLACE,
    Column("gemm", pa.string(), "", "fprop | dgrad | wgrad: the GEMM that reads it"),
    Column("order", pa.int32(), "index", "place in the order of the flow of data"),
    Column("num_rows", pa.int64(), "elements", "of the operand as quantised"),
    Column("num_columns", pa.int64(), "elements", "of the operand as quantised"),
    Column("tile_rows", pa.int32(), "elements", "of a tile"),
    Column("tile_columns", pa.int32(), "elements", "of a tile"),
    Column("format", pa.string(), "", "E4M3 | E5M2 | E2M1"),
    Column("power_2_scale", pa.bool_(), "", "scales are powers of two"),
    Column("eps", pa.float64(), "", "smallest amax that a scale is made from"),
    Column("recipe", pa.string(), "", "how it is quantised"),
    Column("backend", pa.string(), "", "whose kernel quantises it"),
    Column("evidence", pa.string(), "JSON", "group of fields -> exact | derived | absent"),
)
INCIDENTS = (
    *(Column(name, pa.string(), "", "as in the query API") for name in ("id", "mode", "title")),
    Column("severity", pa.string(), "", "info | warning | critical"),
    Column("status", pa.string(), "", "open | acknowledged | resolved"),
    Column("state", pa.string(), "", "what it needs of people"),
    Column("verdict", pa.string(), "", "fp8 | shared | unknown"),
    Column("attempt", pa.int32(), "", "start of the run in which it began"),
    Column("first_step", pa.int64(), "step", ""),
    Column("last_step", pa.int64(), "step", ""),
    Column("num_events", pa.int64(), "events", ""),
    Column("origin", pa.bool_(), "", "no other incident is its cause"),
    Column("ranks", pa.list_(pa.int32()), "", "where it was seen"),
    *(Column(name, pa.string(), "", "where it began") for name in ("module", "gemm", "operand", "direction")),
    Column("tile", pa.list_(pa.int32()), "tile", "(row, column)"),
    Column("element", pa.list_(pa.int32()), "element", "(row, column)"),
    Column("expert", pa.int32(), "index", ""),
    Column("sites", pa.list_(pa.int64()), "id", "the named one first"),
    Column("num_sites", pa.int32(), "sites", ""),
    Column("cause", pa.string(), "", ""),
    *(Column(name, pa.string(), "JSON", "as in the query API") for name in ("evidence", "fix", "alternatives")),
    Column("opened_at", pa.float64(), SECONDS, "by the clock of the collector"),
    Column("resolved_at", pa.float64(), SECONDS, "null: it is not"),
    Column("owner", pa.string(), "", ""),
    Column("closed_as", pa.string(), "", "fixed | false-alarm"),
)
TABLES: Mapping[str, Sequence[Column]] = {
    "steps": STEPS,
    "series": SERIES,
    "logged": LOGGED,
    "incidents": INCIDENTS,
    "sites": SITES,
}


def schema_of(table: str, facts: Mapping[str, Any]) -> pa.Schema:
    """Schema of a table; `facts` of the run go into the metadata of its file.

    Every column carries its unit and what it says as metadata of the Arrow field. The same is once more in the file's
    `fp8watch:columns`, for readers that do not know Arrow's.
    """
    columns = TABLES[table]
    told = {c.name: {"type": str(c.type), "unit": c.unit, "doc": c.doc} for c in columns}
    metadata = {
        "fp8watch:table": table,
        "fp8watch:columns": json.dumps(told, ensure_ascii=False),
        "fp8watch:measured": json.dumps({bit.name: int(bit) for bit in Measured}),
        **{f"fp8watch:{name}": json.dumps(value, ensure_ascii=False) for name, value in facts.items()},
    }
    return pa.schema([pa.field(c.name, c.type, metadata={"unit": c.unit, "doc": c.doc}) for c in columns], metadata)
