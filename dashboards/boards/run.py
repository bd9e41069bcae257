"""Run: what is wrong with one run, loss and gradient over steps, the worst sites, its ranks and their agents."""

from __future__ import annotations

from typing import Any

from .frame import board, run_variable, span_variables
from .kit import (
    GREEN,
    ORANGE,
    RED,
    RUN,
    SEVERITY,
    SPAN,
    STATUS,
    Sql,
    colored,
    field,
    hidden,
    inner,
    link,
    number,
    over_steps,
    over_time,
    override,
    rows,
    variable,
)  # fmt: skip

UID = "fp8watch-run"
RUN_PAGE = link("The run's page", f"/runs/{variable('run')}")
SITE_PAGE = link("The site's page", f"/runs/{variable('run')}/sites/{field('site')}")
TILE_MAP = link("Its newest tile map", f"/runs/{variable('run')}/sites/{field('site')}/tile-map")
INCIDENT_PAGE = link("The incident: why, and what to change", f"/incidents/{field('id')}")
RUNBOOK = link("Runbook", f"/runbooks/{field('mode')}")


def _of_run(what: str) -> Sql:
    return Sql(f"SELECT {what} FROM grafana.run_now WHERE run_id = {RUN}")


def _scalar(*names: str) -> Sql:
    return Sql(f"SELECT step, {', '.join(names)} FROM grafana.scalars({SPAN})")


INCIDENTS = f"""SELECT severity, status, mode, title, module, operand, first_step, last_step, rank, verdict, fix, id
FROM grafana.incident_detail WHERE run_id = {RUN}
ORDER BY status = 'resolved', array_position(ARRAY['critical', 'warning', 'info'], severity), first_step LIMIT 200"""
ROOM = "tile_sqnr_db - CASE format WHEN 'E5M2' THEN 22 WHEN 'E2M1' THEN 14 ELSE 28 END AS sqnr_room_db"
"""Of a site: its SQNR above the line of its number format, under which `chronic-quantization-noise` begins."""
WORST = f"""SELECT label, last_step, format, tile_sqnr_db, {ROOM}, underflow_ratio, amax_max, scale_inv_min, scale_inv_max, num_nonfinite,
num_sentinel_tiles, num_saturated, site::text AS site FROM grafana.site_now WHERE run_id = {RUN}
ORDER BY num_nonfinite > 0 DESC, num_sentinel_tiles > 0 DESC, tile_sqnr_db ASC NULLS LAST LIMIT 25"""
RANKS = f"""SELECT rank, attempt, host, backend, last_seen_at, ended, overhead_ratio, produced, acknowledged, waiting, dropped,
internal_errors FROM grafana.rank WHERE run_id = {RUN} ORDER BY attempt DESC, rank LIMIT 500"""
LOSS_OVER_TIME = f"""SELECT time, loss FROM grafana.scalars({SPAN}, 1000) WHERE time IS NOT NULL AND $__timeFilter(time)
ORDER BY time"""

INCIDENT_LOOKS = [
    override(
        "severity", mappings=SEVERITY, custom_cellOptions={"type": "color-background", "mode": "basic"}, custom_width=90
    ),
    override("title", links=[INCIDENT_PAGE], custom_minWidth=300),
    override("mode", links=[RUNBOOK]),
    hidden("id"),
]
HEALTH_LOOKS = [
    override("label", links=[SITE_PAGE, TILE_MAP], custom_minWidth=280),
    override("tile_sqnr_db", unit="dB", decimals=1),
    override("sqnr_room_db", unit="dB", decimals=1, **colored((None, RED), (-7, ORANGE), (0, GREEN))),
    override("underflow_ratio", unit="percentunit", **colored((None, GREEN), (0.15, ORANGE), (0.3, RED))),
    override("clip_depth", decimals=3, **colored((None, GREEN), (1.0001, ORANGE), (2, RED))),
    override("num_nonfinite", **colored((None, GREEN), (1, RED))),
    override("num_sentinel_tiles", **colored((None, GREEN), (1, RED))),
    override("amax_max", unit="sci"),
    override("scale_inv_min", unit="sci"),
    override("scale_inv_max", unit="sci"),
    hidden("site"),
]


def dashboard() -> dict[str, Any]:
    """The dashboard."""
    panels = [
        number("Status", "Running, stalled (no data for 90 s) or ended.", _of_run("status"), text=True),
        number("Last step", "Newest optimizer step that arrived.", _of_run("last_step")),
        number("Open incidents", "Not resolved yet.", _of_run("num_open"), bad=1),
        number("Open and critical", "Not resolved yet, of severity critical.", _of_run("num_critical"), bad=1),
        number(
            "Steps with a non-finite loss",
            "Of the span shown: steps whose loss or gradient norm was NaN or Inf.",
            Sql(f"SELECT coalesce(sum(nonfinite_steps), 0) AS steps FROM grafana.scalars({SPAN})"),
            bad=1,
        ),
        number("Sites", "Quantised operands that are watched.", _of_run("num_sites")),
        rows(
            "Incidents",
            "What is wrong, where, and what to change. A title leads to the incident, a mode to its runbook.",
            Sql(INCIDENTS),
            INCIDENT_LOOKS,
            height=7,
        ),
        over_steps(
            "Loss over steps",
            "Mean over ranks; of steps whose ranks have gone (after a day), the loss of one. Red bars: steps with a non-finite loss or "
            "gradient norm, which the line leaves out.",
            _scalar("loss", "nonfinite_steps"),
            marks=["nonfinite_steps"],
        ),
        over_steps(
            "Gradient norm over steps",
            "Largest of the ranks; of steps whose ranks have gone (after a day), of one. Red bars: steps that were skipped or aborted.",
            _scalar("grad_norm", "skipped_steps"),
            log=10,
            marks=["skipped_steps"],
        ),
        over_steps("Learning rate over steps", "As the optimizer had it.", _scalar("lr")),
        over_steps("Loss scale over steps", "Of the gradient scaler; empty without one.", _scalar("loss_scale"), log=2),
        over_time(
            "Loss over time",
            "With the run's incidents marked.",
            [Sql(LOSS_OVER_TIME, over_time=True)],
            width=24,
        ),
        rows(
            "Worst sites now",
            "Newest step of each site, the worst first; counts since the run began. sqnr_room_db: SQNR above the line of the "
            "site's format (28 dB for E4M3, 22 for E5M2, 14 for E2M1). A name leads to the site's page.",
            Sql(WORST),
            [looks for looks in HEALTH_LOOKS if looks[0] != "clip_depth"],
        ),
        rows(
            "Ranks and their agents",
            "Every session: where it ran, what its agent costs, and what it could not deliver.",
            Sql(RANKS),
            [
                override("overhead_ratio", unit="percentunit", **colored((None, GREEN), (0.01, ORANGE), (0.03, RED))),
                override("dropped", **colored((None, GREEN), (1, RED))),
                override("internal_errors", **colored((None, GREEN), (1, ORANGE))),
            ],
        ),
    ]
    for panel in (panels[2], panels[3]):
        panel.override_by_regexp(".*", override("", links=[RUN_PAGE])[1])
    return board(
        UID,
        "fp8watch · Run",
        "One run: what is wrong, loss and gradient, the worst sites, the agents.",
        [run_variable(), *span_variables()],
        panels,
        since="now-24h",
    )


__all__ = ["HEALTH_LOOKS", "INCIDENT_LOOKS", "ROOM", "STATUS", "UID", "dashboard", "inner"]
