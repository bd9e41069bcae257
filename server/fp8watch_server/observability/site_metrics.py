"""What /metrics says of the layers of each run: totals of what broke, and values of the newest step.

Upstream:   fp8watch_server.store.totals (table site_total)
Downstream: fp8watch_server.observability.metrics
Shapes:     rows of site_total -> metric families by run, layer and operand, within a budget of series
Thread:     query pool

`layer` is the module; of the two directions of an operand, which hold the same elements, the worse one is exported. What
depends on the number format has it as a label: how much noise is healthy differs by 14 dB.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from sqlalchemy.engine import Connection

from fp8watch_server.db import schema as t
from fp8watch_server.observability.series_budget import SeriesBudget, worse
from fp8watch_server.store.fields import SERIES_FIELDS

COUNTERS = {
    "num_nonfinite": ("fp8watch_nonfinite_elements", "NaN and Inf before the cast"),
    "num_saturated": ("fp8watch_saturated_elements", "Elements that were clipped"),
    "num_sentinel_tiles": ("fp8watch_sentinel_tiles", "Tiles whose amax is Inf, so that their scale was forced to 1"),
}
GAUGES = {
    "underflow_ratio": ("fp8watch_underflow_ratio", "Non-zero elements that became 0, newest step"),
    "amax_max": ("fp8watch_amax_max", "Largest tile amax, newest step"),
    "scale_inv_max": ("fp8watch_scale_inv_max", "Largest scale_inv of a tile, newest step"),
    "scale_inv_min": ("fp8watch_scale_inv_min", "Smallest scale_inv of a tile, newest step"),
    "tile_sqnr_db": ("fp8watch_tile_sqnr_db", "SQNR of the tiles in dB, newest step"),
}
OF_FORMAT = ("underflow_ratio", "tile_sqnr_db")
"""Gauges with the label `format`."""


def sites(conn: Connection, run_ids: list[str], budget: SeriesBudget) -> Iterable[Metric]:
    labels = ["run", "layer", "operand"]
    counters = {f: CounterMetricFamily(name, text, labels=labels) for f, (name, text) in COUNTERS.items()}
    gauges = {
        f: GaugeMetricFamily(name, text, labels=[*labels, "format"] if f in OF_FORMAT else labels)
        for f, (name, text) in GAUGES.items()
    }
    s, total = t.site.c, t.site_total.c
    same_site = sa.and_(s.run_id == total.run_id, s.tenant == total.tenant, s.site == total.site)
    for i, run_id in enumerate(run_ids):
        if budget.left < len(COUNTERS):  # no layer fits any more
            of_rest = (s.run_id.in_(run_ids[i:]), s.tenant == t.DEFAULT_TENANT)
            layers = sa.select(s.run_id, s.module, s.operand).join(t.site_total, same_site).where(*of_rest).distinct()
            num_layers = conn.execute(sa.select(sa.func.count()).select_from(layers.subquery())).scalar_one()
            budget.dropped += num_layers * (len(COUNTERS) + len(GAUGES))
            break
        rows = conn.execute(
            sa.select(s.module, s.operand, s.format, t.site_total)
            .join(t.site_total, same_site)
            .where(s.run_id == run_id, s.tenant == t.DEFAULT_TENANT)
            .order_by(s.flow_order)
        )
        found: dict[tuple[str, str], dict[tuple[str, ...], float]] = {}
        for row in rows:
            values = found.setdefault((row.module, row.operand), {})
            for name in COUNTERS:
                values[(name,)] = max(values.get((name,), 0.0), float(getattr(row, name)))
            for name, value in row.newest.items():
                if name in GAUGES:
                    key = (name, row.format) if name in OF_FORMAT else (name,)
                    values[key] = worse(values.get(key), float(value), SERIES_FIELDS[name].worst)
        for (module, operand), values in found.items():
            if not budget.take(len(values)):
                continue
            for (name, *of_format), number in values.items():
                family: Any = counters.get(name) or gauges[name]
                family.add_metric([run_id, module, operand, *of_format], number)
    yield from counters.values()
    yield from gauges.values()
