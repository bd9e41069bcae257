"""Columns that each SQL query of the dashboards gives, in their order: what panels, links and colours are built on."""

from __future__ import annotations

OPTIONS = ["__text", "__value"]
EVENTS = ["time", "text", "tags"]
LONG = ["time", "metric", "value"]
SITE = ["format", "tile_sqnr_db", "sqnr_room_db", "underflow_ratio", "clip_depth", "amax_max"]

COLUMNS: dict[str, list[str]] = {
    "run: Status A": ["status"],
    "run: Last step A": ["last_step"],
    "run: Open incidents A": ["num_open"],
    "run: Open and critical A": ["num_critical"],
    "run: Steps with a non-finite loss A": ["steps"],
    "run: Sites A": ["num_sites"],
    "run: Incidents A": [
        *(
            "severity",
            "status",
            "mode",
            "title",
            "module",
            "operand",
            "first_step",
            "last_step",
            "rank",
            "verdict",
            "fix",
        ),
        "id",
    ],
    "run: Loss over steps A": ["step", "loss", "nonfinite_steps"],
    "run: Gradient norm over steps A": ["step", "grad_norm", "skipped_steps"],
    "run: Learning rate over steps A": ["step", "lr"],
    "run: Loss scale over steps A": ["step", "loss_scale"],
    "run: Loss over time A": ["time", "loss"],
    "run: Worst sites now A": [
        *(
            "label",
            "last_step",
            "format",
            "tile_sqnr_db",
            "sqnr_room_db",
            "underflow_ratio",
            "amax_max",
            "scale_inv_min",
        ),
        *("scale_inv_max", "num_nonfinite", "num_sentinel_tiles", "num_saturated", "site"),
    ],
    "run: Ranks and their agents A": [
        *("rank", "attempt", "host", "backend", "last_seen_at", "ended", "overhead_ratio", "produced", "acknowledged"),
        *("waiting", "dropped", "internal_errors"),
    ],
    "run: variable run": OPTIONS,
    "run: variable collector": ["public_url"],
    "run: annotation Incidents": EVENTS,
    "layers: Health of all sites A": [
        *("label", "first_bad_step", "num_nonfinite", "num_sentinel_tiles", "num_saturated", *SITE, "scale_inv_min"),
        *("scale_inv_max", "site"),
    ],
    "layers: Tile SQNR of the worst sites over time A": LONG,
    "layers: Non-finite elements of the worst sites over time A": LONG,
    "layers: Largest amax of the sites over steps A": ["step", *(f"2^{k}" for k in range(-40, 25, 2))],
    "layers: amax and scale_inv of the site A": ["step", "amax_max", "scale_inv_min", "scale_inv_max"],
    "layers: Tile SQNR of the site A": ["step", "tile_sqnr_db"],
    "layers: Underflow of the site A": ["step", "underflow_ratio"],
    "layers: Gain error of the site A": ["step", "gain_error"],
    "layers: Clip depth of the site A": ["step", "clip_depth"],
    "layers: Counts of the site A": ["step", "num_saturated", "num_nonfinite", "num_sentinel_tiles"],
    "layers: variable run": OPTIONS,
    "layers: variable site": OPTIONS,
    "layers: variable collector": ["public_url"],
    "layers: annotation Incidents": EVENTS,
    "incidents: Open and critical A": ["incidents"],
    "incidents: Open A": ["incidents"],
    "incidents: Acknowledged A": ["incidents"],
    "incidents: In the time range A": ["incidents"],
    "incidents: Incidents A": [
        *("severity", "status", "time", "run", "mode", "title", "module", "gemm", "operand", "direction", "first_step"),
        *("last_step", "rank", "tile_row", "tile_column", "num_sites", "verdict", "fix", "id", "run_id", "site"),
    ],
    "incidents: By failure mode A": ["mode", "incidents"],
    "incidents: Over time A": ["time", "metric", "incidents"],
    "incidents: variable run": OPTIONS,
    "incidents: variable collector": ["public_url"],
    "fleet: Running A": ["runs"],
    "fleet: Stalled A": ["runs"],
    "fleet: In trouble A": ["runs"],
    "fleet: Runs A": [
        *(
            "status",
            "run",
            "last_step",
            "num_critical",
            "num_open",
            "num_incidents",
            "num_sites",
            "world_size",
            "attempt",
        ),
        *("recipe", "backend", "created_at", "last_seen_at", "run_id"),
    ],
    "fleet: Incidents that began A": ["time", "metric", "incidents"],
    "fleet: variable collector": ["public_url"],
    "fleet: annotation Incidents": EVENTS,
    "collector: variable collector": ["public_url"],
}
EMPTY = {("run: Ranks and their agents A", "overhead_ratio")}
"""Columns without a value in the run of the tests: its agent measures no overhead where no budget is set."""
