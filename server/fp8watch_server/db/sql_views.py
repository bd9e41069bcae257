"""SQL views and functions for Grafana on PostgreSQL, with stable columns, and a role that can read nothing else.

Shapes:     SQL; on PostgreSQL only
Thread:     `fp8watch migrate`, start of the collector

Everything lies in the schema `grafana`. A view reads with the rights of its owner, so the role needs none on tables.
Steps are there once they are compacted: some 32 steps after the end of their 256, or after ten minutes.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fp8watch_server.db import schema as t

SCHEMA = "grafana"
FIELDS = (*t.BLOCK_ARRAYS, *t.BLOCK_COUNTS)
MAX_ROLE_CHARS = 63

_ARRAYS = ", ".join(f"b.{name}" for name in FIELDS)
_NAMES = ", ".join(FIELDS)
_REALS = ", ".join(f"v.{name}" for name in t.BLOCK_ARRAYS)
_COUNTS = ", ".join(f"CASE WHEN b.{name} IS NULL THEN 0 ELSE v.{name} END AS {name}" for name in t.BLOCK_COUNTS)
_PICK = " ".join(f"WHEN '{name}' THEN {name}::double precision" for name in FIELDS)

STATEMENTS = (
    f"CREATE SCHEMA {SCHEMA}",
    f"""CREATE VIEW {SCHEMA}.run AS
SELECT run_id, name, recipe, backend, world_size, attempt, last_step,
       to_timestamp(created_at) AS created_at, to_timestamp(last_seen_at) AS last_seen_at
FROM run""",
    f"""CREATE VIEW {SCHEMA}.site AS
SELECT run_id, site, module, operand, direction, gemm, flow_order, format,
       module || ' ' || operand || ' ' || direction AS label
FROM site""",
    f"""CREATE VIEW {SCHEMA}.scalar AS
SELECT run_id, attempt, rank, step, to_timestamp(time) AS time, status,
       loss, loss_class, grad_norm, grad_norm_class, lr, lr_class, loss_scale, loss_scale_class
FROM scalar""",
    f"""CREATE VIEW {SCHEMA}.incident AS
SELECT run_id, id, mode, title, severity, status, verdict, first_step, last_step, num_events, num_sites,
       place ->> 'module' AS module, place ->> 'operand' AS operand, cause,
       to_timestamp(opened_at) AS opened_at, to_timestamp(resolved_at) AS resolved_at
FROM incident""",
    f"""CREATE VIEW {SCHEMA}.value AS
SELECT b.run_id, b.site, b.step0, coalesce(v.step, b.first_step + (v.i - 1) * b.step_gap) AS step, {_REALS}, {_COUNTS}
FROM cell c
JOIN block b ON b.run_id = c.run_id AND b.tenant = c.tenant AND b.step0 = c.step0
            AND b.attempt = c.shown_attempt AND b.rank = c.shown_rank
CROSS JOIN LATERAL unnest(b.steps, {_ARRAYS}) WITH ORDINALITY AS v(step, {_NAMES}, i)""",
    f"""CREATE FUNCTION {SCHEMA}.series(of_run text, of_site bigint, field text, from_step bigint, to_step bigint)
RETURNS TABLE (step bigint, value double precision) LANGUAGE sql STABLE AS $$
SELECT v.step, CASE field {_PICK} END
FROM {SCHEMA}.value v
WHERE v.run_id = of_run AND v.site = of_site AND v.step0 BETWEEN from_step - 255 AND to_step
  AND v.step BETWEEN from_step AND to_step
ORDER BY v.step
$$""",
    f"""CREATE FUNCTION {SCHEMA}.heatmap(
    of_run text, field text, from_step bigint, to_step bigint, points integer DEFAULT 200)
RETURNS TABLE (step bigint, site bigint, label text, smallest double precision, largest double precision)
LANGUAGE sql STABLE AS $$
WITH width AS (SELECT greatest(1, ceil((to_step - from_step + 1)::numeric / greatest(points, 1)))::bigint AS w)
SELECT (v.step / w) * w, v.site, s.label,
       min(CASE field {_PICK} END), max(CASE field {_PICK} END)
FROM {SCHEMA}.value v CROSS JOIN width JOIN {SCHEMA}.site s ON s.run_id = v.run_id AND s.site = v.site
WHERE v.run_id = of_run AND v.step0 BETWEEN from_step - 255 AND to_step AND v.step BETWEEN from_step AND to_step
GROUP BY 1, 2, 3, s.flow_order
ORDER BY s.flow_order, 1
$$""",
)


class RoleError(ValueError):
    """A role that cannot be used: value, rule, remedy."""


def create_views(conn: Connection) -> None:
    """Create the schema, its views and its functions. Does nothing but on PostgreSQL."""
    if conn.dialect.name == "postgresql":
        for statement in STATEMENTS:
            conn.exec_driver_sql(statement.replace("%", "%%"))


def drop_views(conn: Connection) -> None:
    """Drop them."""
    if conn.dialect.name == "postgresql":
        conn.exec_driver_sql(f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE")


def grant_reader(conn: Connection, role: str) -> bool:
    """Let a role SELECT from the views, and nothing else; created if missing, without the right to log in.

    Returns:
        Whether it was made.

    Raises:
        RoleError: not PostgreSQL, a name that is none, or a role that may do more.
    """
    if conn.dialect.name != "postgresql":
        raise RoleError("roles are PostgreSQL's; SQLite has none: give readers a token with scope read instead")
    if not role.isidentifier() or not role.isascii() or len(role) > MAX_ROLE_CHARS:
        raise RoleError(f"role {role[:100]!r} must be a name of letters, digits and _, at most {MAX_ROLE_CHARS}")
    there = conn.execute(
        sa.text("SELECT rolsuper, rolcreaterole, rolcreatedb FROM pg_roles WHERE rolname = :role"), {"role": role}
    ).first()
    name = conn.dialect.identifier_preparer.quote_identifier(role)
    if there is None:
        conn.exec_driver_sql(f"CREATE ROLE {name} NOLOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE")
    elif any(there):
        raise RoleError(f"role {role!r} is an administrator; a reader of dashboards is a role of its own: name another")
    tables = ", ".join(conn.dialect.identifier_preparer.quote(n) for n in sorted(t.metadata.tables))
    conn.exec_driver_sql(f"REVOKE ALL ON {tables} FROM {name}")
    conn.exec_driver_sql(f"REVOKE CREATE ON SCHEMA public FROM {name}")
    conn.exec_driver_sql(f"GRANT USAGE ON SCHEMA {SCHEMA} TO {name}")
    conn.exec_driver_sql(f"GRANT SELECT ON ALL TABLES IN SCHEMA {SCHEMA} TO {name}")
    conn.exec_driver_sql(f"GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA {SCHEMA} TO {name}")
    return there is None
