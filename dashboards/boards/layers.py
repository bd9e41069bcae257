"""Layers: which sites of a run are in trouble, how all of them are distributed, and one site over steps."""

from __future__ import annotations

from typing import Any

from .frame import board, choice, query_variable, run_variable, span_variables
from .kit import (
    GREEN,
    ORANGE,
    RED,
    RUN,
    SPAN,
    Sql,
    cells,
    histogram_over_steps,
    inner,
    over_steps,
    override,
    rows,
    variable,
)
from .run import HEALTH_LOOKS, ROOM, SITE_PAGE, TILE_MAP

UID = "fp8watch-layers"
OPERANDS = {"every operand": "all", "input": "input", "weight": "weight", "grad_output": "grad_output"}
SITES = (
    f"SELECT label AS __text, site::text AS __value FROM grafana.site WHERE run_id = {RUN} ORDER BY flow_order, label"
)

SITE = "coalesce(nullif(${site:sqlstring}, ''), '0')::bigint"
HEALTH = f"""SELECT h.label, first_bad_step, num_nonfinite, num_sentinel_tiles, num_saturated, format, tile_sqnr_db, {ROOM},
underflow_ratio, clip_depth, amax_max, scale_inv_min, scale_inv_max, h.site::text AS site FROM grafana.site_health({SPAN}) h
JOIN grafana.site s ON s.run_id = {RUN} AND s.site = h.site WHERE ${{operand:sqlstring}} IN ('all', h.operand)
ORDER BY num_nonfinite DESC NULLS LAST, num_sentinel_tiles DESC NULLS LAST, sqnr_room_db NULLS LAST, s.flow_order LIMIT 500"""
ROOM_OVER_TIME = f"""SELECT time, metric, {ROOM.replace("tile_sqnr_db", "value", 1).replace("sqnr_room_db", "value")}
FROM grafana.worst_over_time({SPAN}, 'tile_sqnr_db') JOIN grafana.site s ON s.run_id = {RUN} AND s.label = metric
ORDER BY time, s.flow_order"""
OCTAVES = f"SELECT * FROM grafana.octaves({SPAN}, ${{operand:sqlstring}})"


def _worst(name: str) -> Sql:
    return Sql(f"SELECT time, metric, value FROM grafana.worst_over_time({SPAN}, '{name}')", over_time=True)


def _of_site(*names: str) -> Sql:
    """One wide frame with the steps on X."""
    run, _, rest = SPAN.partition(", ")
    return Sql(f"SELECT step, {', '.join(names)} FROM grafana.site_series({run}, {SITE}, {rest})")


def _gain_of_site() -> Sql:
    run, _, rest = SPAN.partition(", ")
    return Sql(f"SELECT step, gain_error FROM grafana.gain_series({run}, {SITE}, {rest})")


def dashboard() -> dict[str, Any]:
    """The dashboard."""
    here = inner("Show it below", UID, f"var-run={variable('run')}&var-site=${{__data.fields.site:percentencode}}")
    looks = [override("label", links=[here, SITE_PAGE, TILE_MAP], custom_minWidth=280), *HEALTH_LOOKS[1:]]
    sites = query_variable("site", "Site", SITES)
    panels = [
        rows(
            "Health of all sites",
            "The worst of the span shown, the sickest first: non-finite elements, tiles without a scale, then SQNR above the line of "
            "the site's format (28 dB for E4M3, 22 for E5M2, 14 for E2M1).",
            Sql(HEALTH),
            looks,
            height=11,
        ),
        cells(
            "Tile SQNR of the worst sites over time",
            "The 30 sites with the lowest SQNR, in dB above the line of their format: 28 dB for E4M3, 22 for E5M2, 14 for E2M1.",
            Sql(ROOM_OVER_TIME, over_time=True),
            unit="dB",
            steps=[(None, RED), (-7, ORANGE), (0, GREEN)],
        ),
        cells(
            "Non-finite elements of the worst sites over time",
            "The 30 sites with the most NaN and Inf before the cast.",
            _worst("num_nonfinite"),
            unit="short",
            steps=[(None, GREEN), (1, RED)],
        ),
        histogram_over_steps(
            "Largest amax of the sites over steps",
            "How many records fall into which two octaves; the ends are open, NaN and Inf are at the top.",
            Sql(OCTAVES),
        ),
        over_steps(
            "amax and scale_inv of the site",
            "Extremes over its tiles.",
            _of_site("amax_max", "scale_inv_min", "scale_inv_max"),
            log=2,
            unit="sci",
        ),
        over_steps(
            "Tile SQNR of the site", "Mean over its tiles; lower is worse.", _of_site("tile_sqnr_db"), unit="dB"
        ),
        over_steps(
            "Underflow of the site", "Non-zero elements that became 0.", _of_site("underflow_ratio"), unit="percentunit"
        ),
        over_steps(
            "Gain error of the site",
            "β = Σ x·x̂ / Σ x² − 1: what quantising adds to the operand's size. Noise averages out, β does not: healthy "
            "operands of many elements stay within ±0.5 %.",
            _gain_of_site(),
            unit="percentunit",
        ),
        over_steps("Clip depth of the site", "Largest amax·scale/FP8_MAX; above 1 is clipped.", _of_site("clip_depth")),
        over_steps(
            "Counts of the site",
            "Clipped elements; in red non-finite elements and tiles whose amax is Inf.",
            _of_site("num_saturated", "num_nonfinite", "num_sentinel_tiles"),
            marks=["num_nonfinite", "num_sentinel_tiles"],
        ),
    ]
    return board(
        UID,
        "fp8watch · Layers",
        "The sites of one run: the sickest, all of them as a distribution, and one over steps.",
        [run_variable(), *span_variables("500 steps"), choice("operand", "Operand", OPERANDS, "every operand"), sites],
        panels,
        since="now-24h",
        refresh="5m",  # its panels read every site: thousands of sites over thousands of steps take seconds
    )
