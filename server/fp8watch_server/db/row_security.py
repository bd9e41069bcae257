"""Row-level security on PostgreSQL: a reader's role of one tenant sees the runs of this tenant, in any SQL that it sends.

Shapes:     SQL; on PostgreSQL only, and only where `fp8watch migrate --reader ROLE --tenant TENANT` was ever given
Thread:     `fp8watch migrate`, start of the collector

The runs of a tenant are those that its ingest tokens name. The collector owns the tables, so no policy applies to it. Views read
with the rights of who asks from then on: else they would read with those of their owner, and so all rows.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fp8watch_server.db import schema as t
from fp8watch_server.db.sql_views import SCHEMA, RoleError, grant_reader

TENANCY = "tenancy"
"""Schema of what belongs to row-level security alone."""
ALL_TENANTS = "*"
_POLICY = "fp8watch_tenant"

_SETUP = (
    f"CREATE SCHEMA {TENANCY}",
    f"CREATE TABLE {TENANCY}.reader (role text PRIMARY KEY, tenant text NOT NULL)",
    # A shell pattern, as fnmatch reads it, as a regular expression.
    f"""CREATE FUNCTION {TENANCY}.regex_of(pattern text) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE at int := 1; last int; c text; made text := ''; stuff text;
BEGIN
  WHILE at <= length(pattern) LOOP
    c := substr(pattern, at, 1);
    at := at + 1;
    IF c = '*' THEN made := made || '.*';
    ELSIF c = '?' THEN made := made || '.';
    ELSIF c = '[' THEN
      last := at;
      IF substr(pattern, last, 1) = '!' THEN last := last + 1; END IF;
      IF substr(pattern, last, 1) = ']' THEN last := last + 1; END IF;
      WHILE last <= length(pattern) AND substr(pattern, last, 1) <> ']' LOOP last := last + 1; END LOOP;
      IF last > length(pattern) THEN made := made || '\\[';
      ELSE
        stuff := replace(replace(substr(pattern, at, last - at), '\\', '\\\\'), '[', '\\[');
        IF left(stuff, 1) = '!' THEN stuff := '^' || substr(stuff, 2);
        ELSIF left(stuff, 1) = '^' THEN stuff := '\\' || stuff; END IF;
        IF left(stuff, 1) = ']' THEN stuff := '\\' || stuff; END IF;
        IF left(stuff, 2) = '^]' THEN stuff := '^\\' || substr(stuff, 2); END IF;
        made := made || '[' || stuff || ']';
        at := last + 1;
      END IF;
    ELSIF c ~ '[A-Za-z0-9_]' THEN made := made || c;
    ELSE made := made || '\\' || c;
    END IF;
  END LOOP;
  made := '^(?:' || made || ')$';
  PERFORM 'x' ~ made;
  RETURN made;
EXCEPTION WHEN invalid_regular_expression THEN RETURN NULL;  -- it names no run
END $$""",
    f"""CREATE FUNCTION {TENANCY}.visible_runs() RETURNS SETOF text LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = public, pg_temp AS $$
SELECT r.run_id FROM public.run r WHERE EXISTS (
  SELECT 1 FROM {TENANCY}.reader a WHERE a.tenant = '{ALL_TENANTS}'
    AND CASE WHEN a.role IN (SELECT rolname FROM pg_roles) THEN pg_has_role(session_user, a.role, 'USAGE') END)
UNION
SELECT r.run_id
FROM (SELECT DISTINCT {TENANCY}.regex_of(pattern) AS regex
      FROM {TENANCY}.reader a JOIN public.token k ON k.tenant = a.tenant
      CROSS JOIN LATERAL unnest(string_to_array(k.runs, ',')) AS pattern
      WHERE CASE WHEN a.role IN (SELECT rolname FROM pg_roles) THEN pg_has_role(session_user, a.role, 'USAGE') END
        AND k.revoked_at IS NULL
        AND 'ingest' = ANY (string_to_array(k.scopes, ','))) AS named
JOIN public.run r ON r.run_id ~ named.regex
$$""",
)


def is_on(conn: Connection) -> bool:
    """Whether tenants are kept apart in this database."""
    if conn.dialect.name != "postgresql":
        return False
    return conn.exec_driver_sql(f"SELECT to_regclass('{TENANCY}.reader') IS NOT NULL").scalar_one() is True


def grant_tenant_reader(conn: Connection, role: str, tenant: str | None) -> bool:
    """Let a role read the views: of a tenant's runs, or (None) of all. With a tenant, row-level security is on from then on.

    Returns:
        Whether the role was made.

    Raises:
        RoleError: as `grant_reader`; or a tenant that is the sign for all of them.
    """
    if tenant == ALL_TENANTS or tenant == "":
        raise RoleError(f"tenant {tenant!r}: must be the label of tokens; without --tenant the role reads all runs")
    made = grant_reader(conn, role)
    if tenant is not None and not is_on(conn):
        for statement in _SETUP:
            conn.exec_driver_sql(statement.replace("%", "%%"))
        for other in _readers(conn):
            _note(conn, other, ALL_TENANTS)
    if is_on(conn):
        _note(conn, role, tenant or ALL_TENANTS)
        renew(conn)
    return made


def renew(conn: Connection) -> None:
    """Bring policies, views and rights up to date with the tables and views that there are by now; nothing where it is off."""
    if not is_on(conn):
        return
    conn.exec_driver_sql(f"DELETE FROM {TENANCY}.reader WHERE role NOT IN (SELECT rolname FROM pg_roles)")
    readers = list(conn.exec_driver_sql(f"SELECT role FROM {TENANCY}.reader").scalars())
    if not readers:
        return
    quote = conn.dialect.identifier_preparer.quote_identifier
    to = ", ".join(map(quote, readers))
    for view in conn.exec_driver_sql(f"SELECT viewname FROM pg_views WHERE schemaname = '{SCHEMA}'").scalars().all():
        conn.exec_driver_sql(f"ALTER VIEW {SCHEMA}.{quote(view)} SET (security_invoker = true)")
    for table in _tables():
        conn.exec_driver_sql(f"ALTER TABLE {quote(table)} ENABLE ROW LEVEL SECURITY")
        conn.exec_driver_sql(f"DROP POLICY IF EXISTS {_POLICY} ON {quote(table)}")
        conn.exec_driver_sql(
            f"CREATE POLICY {_POLICY} ON {quote(table)} FOR SELECT "
            f"USING (run_id = ANY (ARRAY(SELECT {TENANCY}.visible_runs())))"
        )
    read = ", ".join(quote(table) for table in _read_by_views(conn))
    conn.exec_driver_sql(f"GRANT USAGE ON SCHEMA {TENANCY} TO {to}")
    conn.exec_driver_sql(f"GRANT SELECT ON {read} TO {to}")


def turn_off(conn: Connection) -> None:
    """Every reader reads all runs again."""
    if not is_on(conn):
        return
    quote = conn.dialect.identifier_preparer.quote_identifier
    there = f"SELECT role FROM {TENANCY}.reader WHERE role IN (SELECT rolname FROM pg_roles)"
    readers = list(conn.exec_driver_sql(there).scalars())
    for table in _tables():
        conn.exec_driver_sql(f"DROP POLICY IF EXISTS {_POLICY} ON {quote(table)}")
        conn.exec_driver_sql(f"ALTER TABLE {quote(table)} DISABLE ROW LEVEL SECURITY")
    for view in conn.exec_driver_sql(f"SELECT viewname FROM pg_views WHERE schemaname = '{SCHEMA}'").scalars().all():
        conn.exec_driver_sql(f"ALTER VIEW {SCHEMA}.{quote(view)} RESET (security_invoker)")
    read = ", ".join(quote(table) for table in _read_by_views(conn))
    for role in readers:
        conn.exec_driver_sql(f"REVOKE SELECT ON {read} FROM {quote(role)}")
    conn.exec_driver_sql(f"DROP SCHEMA {TENANCY} CASCADE")


def _note(conn: Connection, role: str, tenant: str) -> None:
    conn.execute(
        sa.text(
            f"INSERT INTO {TENANCY}.reader (role, tenant) VALUES (:role, :tenant) "
            "ON CONFLICT (role) DO UPDATE SET tenant = excluded.tenant"
        ),
        {"role": role, "tenant": tenant},
    )


def _tables() -> list[str]:
    """All whose rows belong to a run."""
    return [table.name for table in t.metadata.sorted_tables if "run_id" in table.c]


def _read_by_views(conn: Connection) -> list[str]:
    """Tables that the views for Grafana read."""
    found = conn.exec_driver_sql(
        "SELECT DISTINCT c.relname FROM pg_depend d JOIN pg_rewrite r ON r.oid = d.objid JOIN pg_class v ON v.oid = r.ev_class "
        "JOIN pg_class c ON c.oid = d.refobjid JOIN pg_namespace n ON n.oid = v.relnamespace "
        f"WHERE n.nspname = '{SCHEMA}' AND c.relkind IN ('r', 'p') ORDER BY 1"
    )
    return list(found.scalars())


def _readers(conn: Connection) -> list[str]:
    """Roles that read the views."""
    found = conn.exec_driver_sql(
        "SELECT DISTINCT r.rolname FROM pg_namespace n, aclexplode(n.nspacl) a JOIN pg_roles r ON r.oid = a.grantee "
        f"WHERE n.nspname = '{SCHEMA}' AND a.privilege_type = 'USAGE' AND a.grantee <> n.nspowner ORDER BY 1"
    )
    return list(found.scalars())
