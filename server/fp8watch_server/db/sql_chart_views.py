"""SQL functions for Grafana's charts on PostgreSQL: wide, down-sampled, one query per function.

Shapes:     SQL; on PostgreSQL only
Thread:     `fp8watch migrate`, start of the collector

Beside the views of store.views, in the same schema. A span of steps is named by its end and its length: `until_step`
NULL is the newest step. `points` is how many buckets it is cut into; a bucket shows its worst value, and NaN is worse
than any number; counts are summed. Of a step that was taken twice, the newer attempt counts.
"""

from __future__ import annotations

from sqlalchemy.engine import Connection

from fp8watch_server.db import schema as t
from fp8watch_server.db.sql_views import FIELDS, SCHEMA

DEFAULT_URL = "http://127.0.0.1:8420"
STALLED_AFTER_S = 90  # as store.queries says it
SMALLEST_IS_WORST = ("scale_inv_min", "tile_sqnr_db")
OCTAVES = range(-40, 25, 2)
"""Exponents of the columns of `octaves`: each counts two octaves, the first and the last also everything beyond."""

_SPAN = "of_run text, until_step bigint, num_steps bigint"


def octave_column(exponent: int) -> str:
    """Name of a column of `octaves`."""
    return f"2^{exponent}"


def _bucket(name: str) -> str:
    if name in t.BLOCK_COUNTS:
        return f"sum(v.{name})::double precision AS {name}"
    end = "min" if name in SMALLEST_IS_WORST else "max"
    return f"(CASE WHEN bool_or(v.{name} = 'NaN') THEN 'NaN' ELSE {end}(v.{name}) END)::double precision AS {name}"


def _of_block(name: str) -> str:
    """Worst of a field over `v`, the rows of one block and bucket: PostgreSQL sorts NaN above any number."""
    if name in t.BLOCK_COUNTS:
        return f"CASE WHEN b.{name} IS NULL THEN 0 ELSE sum(v.{name}) END AS {name}"
    if name in SMALLEST_IS_WORST:
        return f"CASE WHEN max(v.{name}) = 'NaN' THEN 'NaN' ELSE min(v.{name}) END AS {name}"
    return f"max(v.{name}) AS {name}"


def _counted(place: int, exponent: int) -> str:
    return f'sum(o.num) FILTER (WHERE o.octave = {place})::bigint AS "{octave_column(exponent)}"'


_BOUNDS = ", ".join(f"power(2::double precision, {k})" for k in OCTAVES[1:])
_OCTAVE = f"width_bucket(v.amax_max::double precision, ARRAY[{_BOUNDS}])"
_WIDE = ", ".join(_bucket(f) for f in FIELDS)
_WIDE_COLUMNS = ", ".join(f"{f} double precision" for f in FIELDS)
_SMALLEST = ", ".join(f"'{f}'" for f in SMALLEST_IS_WORST)
_ARRAYS = ", ".join(f"b.{f}" for f in FIELDS)
_NAMES = ", ".join(FIELDS)
_PICK_ARRAY = " ".join(f"WHEN '{f}' THEN b.{f}::double precision[]" for f in FIELDS)
_COUNTS = ", ".join(f"'{f}'" for f in t.BLOCK_COUNTS)
_STEP = "coalesce(v.step, b.first_step + (v.i - 1) * b.step_gap)"
_BLOCKS = f"""{SCHEMA}.span(of_run, until_step, num_steps, {{points}}) s
JOIN {SCHEMA}.shown_block b ON b.run_id = of_run AND b.step0 BETWEEN s.low - 255 AND s.high"""
# Only the requested arrays of a block are unnested, and its rows are put into buckets before those of other
# blocks join: sorting and joining handle one row per block and bucket, not one per record.
_OF_SPAN = "v.run_id = of_run AND v.step0 BETWEEN s.low - 255 AND s.high AND v.step BETWEEN s.low AND s.high"
_NEWEST = ", ".join(
    f"(t.newest ->> '{name}')::double precision AS {name}"
    for name in t.BLOCK_ARRAYS
    if name != "clip_depth"  # is not among the totals
)
_OCTAVE_COLUMNS = ", ".join(f'"{octave_column(k)}" bigint' for k in OCTAVES)
_OCTAVE_ZEROS = ", ".join(f'coalesce(c."{octave_column(k)}", 0)' for k in OCTAVES)

VIEWS = {
    "collector": f"""
SELECT coalesce((SELECT value FROM fact WHERE name = 'public_url'), '{DEFAULT_URL}') AS public_url""",
    "run_now": f"""
SELECT r.run_id, r.name, r.recipe, r.backend, r.world_size, r.attempt, r.last_step,
       to_timestamp(r.created_at) AS created_at, to_timestamp(r.last_seen_at) AS last_seen_at,
       CASE WHEN NOT alive.any AND alive.known THEN 'ended'
            WHEN extract(epoch FROM now()) - r.last_seen_at > {STALLED_AFTER_S} THEN 'stalled'
            ELSE 'running' END AS status,
       (SELECT count(*) FROM site s WHERE s.run_id = r.run_id AND s.tenant = r.tenant) AS num_sites,
       i.num_open, i.num_critical, i.num_incidents
FROM run r
CROSS JOIN LATERAL (
    SELECT count(*) > 0 AS known, coalesce(bool_or(newest.ended IS FALSE), false) AS any FROM (
        SELECT DISTINCT ON (s.rank) s.ended FROM session s
        WHERE s.run_id = r.run_id AND s.tenant = r.tenant ORDER BY s.rank, s.attempt DESC) newest) alive
CROSS JOIN LATERAL (
    SELECT count(*) AS num_incidents, count(*) FILTER (WHERE n.status <> 'resolved') AS num_open,
           count(*) FILTER (WHERE n.status <> 'resolved' AND n.severity = 'critical') AS num_critical
    FROM incident n WHERE n.run_id = r.run_id AND n.tenant = r.tenant) i""",
    "shown_block": f"""
SELECT b.run_id, b.site, b.step0, b.first_step, b.step_gap, b.steps, {_ARRAYS}
FROM cell c JOIN block b ON b.run_id = c.run_id AND b.tenant = c.tenant AND b.step0 = c.step0
    AND b.attempt = c.shown_attempt AND b.rank = c.shown_rank""",
    "site_now": f"""
SELECT s.run_id, s.site, s.module, s.operand, s.direction, s.gemm, s.flow_order, s.format, s.backend,
       s.module || ' ' || s.operand || ' ' || s.direction AS label, t.last_step,
       t.num_nonfinite, t.num_saturated, t.num_sentinel_tiles, {_NEWEST}
FROM site s JOIN site_total t ON t.run_id = s.run_id AND t.tenant = s.tenant AND t.site = s.site""",
    "rank": """
SELECT s.run_id, s.session, s.rank, s.attempt, s.host, s.recipe, s.backend, s.ended,
       to_timestamp(s.started_at) AS started_at, to_timestamp(s.last_seen_at) AS last_seen_at,
       (s.health ->> 'produced')::double precision AS produced,
       (s.health ->> 'acknowledged')::double precision AS acknowledged,
       (s.health ->> 'queued')::double precision + (s.health ->> 'spooled')::double precision AS waiting,
       (SELECT coalesce(sum(e.value::double precision), 0) FROM jsonb_each_text(CASE WHEN jsonb_typeof(s.health) = 'object' THEN s.health END) e
        WHERE e.key LIKE 'dropped\\_%' AND e.key NOT LIKE 'dropped\\_maps\\_%') AS dropped,
       (s.health ->> 'internal_errors')::double precision AS internal_errors,
       (s.health ->> 'overhead_ratio')::double precision AS overhead_ratio
FROM session s""",
    "incident_detail": """
SELECT i.run_id, r.name AS run, i.id, i.attempt, i.mode, i.title, i.severity, i.status, i.verdict,
       i.first_step, i.last_step, i.num_events, i.num_sites, (i.sites ->> 0)::bigint AS site,
       i.place ->> 'module' AS module, i.place ->> 'gemm' AS gemm, i.place ->> 'operand' AS operand,
       i.place ->> 'direction' AS direction, (i.place -> 'ranks' ->> 0)::integer AS rank,
       (i.place -> 'tile' ->> 0)::bigint AS tile_row, (i.place -> 'tile' ->> 1)::bigint AS tile_column,
       i.cause, (SELECT string_agg(f ->> 'text', ' · ') FROM jsonb_array_elements(CASE WHEN jsonb_typeof(i.fix) = 'array' THEN i.fix END) f) AS fix,
       coalesce(to_timestamp((
           SELECT min(c.time) FROM scalar c WHERE c.run_id = i.run_id AND c.tenant = i.tenant
           AND c.step = i.first_step AND c.attempt = i.attempt)), to_timestamp(i.opened_at)) AS time,
       to_timestamp(i.opened_at) AS opened_at, to_timestamp(i.resolved_at) AS resolved_at
FROM incident i JOIN run r ON r.run_id = i.run_id AND r.tenant = i.tenant""",
}

FUNCTIONS = {
    f"span({_SPAN}, points integer)": f"""
RETURNS TABLE (low bigint, high bigint, width bigint) LANGUAGE sql STABLE PARALLEL SAFE AS $$
SELECT e.low, e.high, greatest(1, ceil((e.high - e.low + 1)::numeric / greatest(points, 1)))::bigint
FROM (SELECT greatest(0, h.high - greatest(num_steps, 1) + 1) AS low, h.high FROM (
          SELECT coalesce(until_step, r.last_step) AS high FROM {SCHEMA}.run r WHERE r.run_id = of_run) h) e
WHERE e.high >= 0
$$""",
    f"scalars({_SPAN}, points integer DEFAULT 500)": f"""
RETURNS TABLE (step bigint, "time" timestamptz, loss double precision, grad_norm double precision,
               lr double precision, loss_scale double precision, nonfinite_steps bigint, skipped_steps bigint)
LANGUAGE sql STABLE PARALLEL SAFE AS $$
WITH s AS (SELECT * FROM {SCHEMA}.span(of_run, until_step, num_steps, points)),
taken AS (
    SELECT c.*, max(c.attempt) OVER (PARTITION BY c.step) AS newest
    FROM s JOIN {SCHEMA}.scalar c ON c.run_id = of_run AND c.step BETWEEN s.low AND s.high),
whole AS (
    SELECT c.step, min(c.time) AS "time", avg(c.loss) AS loss, max(c.grad_norm) AS grad_norm, max(c.lr) AS lr,
           min(c.loss_scale) AS loss_scale, bool_or(c.loss_class > 0 OR c.grad_norm_class > 0) AS nonfinite,
           bool_or(c.status <> 0) AS skipped
    FROM taken c WHERE c.attempt = c.newest GROUP BY c.step)
SELECT w.step / s.width * s.width, min(w.time), avg(w.loss), max(w.grad_norm), max(w.lr), min(w.loss_scale),
       count(*) FILTER (WHERE w.nonfinite), count(*) FILTER (WHERE w.skipped)
FROM whole w CROSS JOIN s GROUP BY 1 ORDER BY 1
$$""",
    f"site_series(of_run text, of_site bigint, {_SPAN.partition(', ')[2]}, points integer DEFAULT 500)": f"""
RETURNS TABLE (step bigint, {_WIDE_COLUMNS}) LANGUAGE sql STABLE PARALLEL SAFE AS $$
SELECT v.step / s.width * s.width, {_WIDE}
FROM {SCHEMA}.span(of_run, until_step, num_steps, points) s JOIN {SCHEMA}.value v ON {_OF_SPAN}
WHERE v.site = of_site
GROUP BY 1 ORDER BY 1
$$""",
    f"site_health({_SPAN})": f"""
RETURNS TABLE (site bigint, label text, module text, operand text, direction text, gemm text, {_WIDE_COLUMNS},
               first_bad_step bigint) LANGUAGE sql STABLE PARALLEL SAFE AS $$
SELECT l.site, l.label, l.module, l.operand, l.direction, l.gemm, w.*
FROM {SCHEMA}.site l JOIN (
    SELECT b.site AS of_site, {_WIDE}, min(v.first_bad_step) AS first_bad_step
    FROM {_BLOCKS.format(points=1)}
    CROSS JOIN LATERAL (
        SELECT {", ".join(_of_block(f) for f in FIELDS)},
               min({_STEP}) FILTER (WHERE v.num_nonfinite > 0 OR v.num_sentinel_tiles > 0) AS first_bad_step
        FROM unnest(b.steps, {_ARRAYS}) WITH ORDINALITY AS v(step, {_NAMES}, i)
        WHERE {_STEP} BETWEEN s.low AND s.high HAVING count(*) > 0) v
    GROUP BY b.site) w ON w.of_site = l.site
WHERE l.run_id = of_run
ORDER BY w.num_nonfinite DESC NULLS LAST, w.num_sentinel_tiles DESC NULLS LAST, w.tile_sqnr_db NULLS LAST, l.flow_order
$$""".replace("w.*", ", ".join(f"w.{f}" for f in (*FIELDS, "first_bad_step"))),
    f"worst_over_time({_SPAN}, field text, points integer DEFAULT 60, num_sites integer DEFAULT 30)": f"""
RETURNS TABLE ("time" timestamptz, metric text, value double precision) LANGUAGE sql STABLE PARALLEL SAFE AS $$
WITH s AS (SELECT * FROM {SCHEMA}.span(of_run, until_step, num_steps, points)),
picked AS (
    SELECT b.site, v.step, v.smallest, v.largest
    FROM {_BLOCKS.format(points="points")}
    CROSS JOIN LATERAL (
        SELECT {_STEP} / s.width * s.width AS step, min(x.x) AS smallest, max(x.x) AS largest
        FROM unnest(b.steps, b.amax_max, CASE field {_PICK_ARRAY} END) WITH ORDINALITY AS v(step, every, x, i)
        CROSS JOIN LATERAL (SELECT CASE WHEN v.x IS NULL AND field IN ({_COUNTS}) THEN 0 ELSE v.x END AS x) x
        WHERE {_STEP} BETWEEN s.low AND s.high GROUP BY 1) v),
cells AS (
    SELECT p.site, p.step, CASE WHEN max(p.largest) = 'NaN' THEN 'NaN'
        WHEN field IN ({_SMALLEST}) THEN min(p.smallest) ELSE max(p.largest) END AS x
    FROM picked p GROUP BY 1, 2),
worst AS (
    SELECT c.site FROM cells c GROUP BY c.site
    ORDER BY bool_or(c.x = 'NaN') DESC, CASE WHEN field IN ({_SMALLEST}) THEN -min(c.x) ELSE max(c.x) END DESC NULLS LAST
    LIMIT num_sites)
SELECT t.time, l.label, c.x
FROM worst w JOIN cells c ON c.site = w.site
JOIN {SCHEMA}.site l ON l.run_id = of_run AND l.site = w.site
JOIN {SCHEMA}.scalars(of_run, until_step, num_steps, points) t ON t.step = c.step
WHERE t.time IS NOT NULL
ORDER BY t.time, l.flow_order
$$""",
    f"octaves({_SPAN}, of_operand text, points integer DEFAULT 120)": f"""
RETURNS TABLE (step bigint, {_OCTAVE_COLUMNS}) LANGUAGE sql STABLE PARALLEL SAFE AS $$
WITH s AS (SELECT * FROM {SCHEMA}.span(of_run, until_step, num_steps, points)),
octave AS (
    SELECT v.step, v.octave, sum(v.num) AS num
    FROM {_BLOCKS.format(points="points")}
    JOIN {SCHEMA}.site l ON l.run_id = of_run AND l.site = b.site AND of_operand IN ('all', l.operand)
    CROSS JOIN LATERAL (
        SELECT {_STEP} / s.width * s.width AS step, {_OCTAVE} AS octave, count(*) AS num
        FROM unnest(b.steps, b.amax_max) WITH ORDINALITY AS v(step, amax_max, i)
        WHERE {_STEP} BETWEEN s.low AND s.high AND v.amax_max IS NOT NULL GROUP BY 1, 2) v
    GROUP BY 1, 2),
counted AS (SELECT o.step, {", ".join(_counted(i, k) for i, k in enumerate(OCTAVES))} FROM octave o GROUP BY 1)
SELECT g.step, {_OCTAVE_ZEROS}
FROM s CROSS JOIN LATERAL generate_series(s.low / s.width * s.width, s.high, s.width) AS g(step)
LEFT JOIN counted c ON c.step = g.step
ORDER BY g.step
$$""",
}


def create_chart_views(conn: Connection) -> None:
    """Create the functions, and grant them to the readers of the views of db.sql_views. Does nothing but on PostgreSQL."""
    if conn.dialect.name != "postgresql":
        return
    for name, body in VIEWS.items():
        conn.exec_driver_sql(f"CREATE VIEW {SCHEMA}.{name} AS {body}".replace("%", "%%"))
    for signature, body in FUNCTIONS.items():
        conn.exec_driver_sql(f"CREATE FUNCTION {SCHEMA}.{signature} {body}".replace("%", "%%"))
    grant_to_readers(conn)


def grant_to_readers(conn: Connection) -> None:
    """Let every role that may use the schema read all that is in it by now."""
    readers = conn.exec_driver_sql(
        "SELECT DISTINCT r.rolname FROM pg_namespace n, aclexplode(n.nspacl) a JOIN pg_roles r ON r.oid = a.grantee "
        f"WHERE n.nspname = '{SCHEMA}' AND a.privilege_type = 'USAGE' AND a.grantee <> n.nspowner"
    ).scalars()
    for role in list(readers):
        name = conn.dialect.identifier_preparer.quote_identifier(role)
        conn.exec_driver_sql(f"GRANT SELECT ON ALL TABLES IN SCHEMA {SCHEMA} TO {name}".replace("%", "%%"))


def drop_chart_views(conn: Connection) -> None:
    """Drop them in reverse order: some depend on others."""
    if conn.dialect.name == "postgresql":
        for signature in reversed(FUNCTIONS):
            conn.exec_driver_sql(f"DROP FUNCTION IF EXISTS {SCHEMA}.{signature.partition('(')[0]}")
        for name in VIEWS:
            conn.exec_driver_sql(f"DROP VIEW IF EXISTS {SCHEMA}.{name}")
