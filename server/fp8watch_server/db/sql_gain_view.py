"""SQL view and function of the gain error of quantisers, for Grafana on PostgreSQL.

Shapes:     SQL; on PostgreSQL only
Thread:     `fp8watch migrate`, start of the collector

Beside those of db.sql_chart_views, in the same schema. A gain error has two bad ends: a bucket shows the value furthest
from 0, and NaN is worse than any number. Only steps with full statistics have one.
"""

from __future__ import annotations

from sqlalchemy.engine import Connection

from fp8watch_server.db.sql_chart_views import grant_to_readers
from fp8watch_server.db.sql_views import SCHEMA

VIEW = f"""CREATE VIEW {SCHEMA}.gain AS
SELECT b.run_id, b.site, b.step0, coalesce(v.step, b.first_step + (v.i - 1) * b.step_gap) AS step, v.gain_error
FROM cell c
JOIN block b ON b.run_id = c.run_id AND b.tenant = c.tenant AND b.step0 = c.step0
            AND b.attempt = c.shown_attempt AND b.rank = c.shown_rank
CROSS JOIN LATERAL unnest(b.steps, b.gain_error) WITH ORDINALITY AS v(step, gain_error, i)
WHERE b.gain_error IS NOT NULL"""

FUNCTION = f"""CREATE FUNCTION {SCHEMA}.gain_series(
    of_run text, of_site bigint, until_step bigint, num_steps bigint, points integer DEFAULT 500)
RETURNS TABLE (step bigint, gain_error double precision) LANGUAGE sql STABLE PARALLEL SAFE AS $$
SELECT v.step / s.width * s.width,
       (CASE WHEN bool_or(v.gain_error = 'NaN') THEN 'NaN'
             WHEN -min(v.gain_error) > max(v.gain_error) THEN min(v.gain_error)
             ELSE max(v.gain_error) END)::double precision
FROM {SCHEMA}.span(of_run, until_step, num_steps, points) s
JOIN {SCHEMA}.gain v ON v.run_id = of_run AND v.step0 BETWEEN s.low - 255 AND s.high AND v.step BETWEEN s.low AND s.high
WHERE v.site = of_site AND v.gain_error IS NOT NULL
GROUP BY 1 ORDER BY 1
$$"""


def create_gain_view(conn: Connection) -> None:
    """Create both, and grant them to the readers of the other views. Does nothing but on PostgreSQL."""
    if conn.dialect.name == "postgresql":
        conn.exec_driver_sql(VIEW)
        conn.exec_driver_sql(FUNCTION)
        grant_to_readers(conn)


def drop_gain_view(conn: Connection) -> None:
    """Drop them."""
    if conn.dialect.name == "postgresql":
        conn.exec_driver_sql(f"DROP FUNCTION IF EXISTS {SCHEMA}.gain_series")
        conn.exec_driver_sql(f"DROP VIEW IF EXISTS {SCHEMA}.gain")
