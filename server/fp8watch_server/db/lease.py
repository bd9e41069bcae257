"""Sessions and transactions that PostgreSQL ends when their process hangs, so that their locks are leases.

Shapes:     a connection
Thread:     whoever holds it, and asks the database something once in BEAT_S
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

LEASE_S = 6.0
"""After so long without a question PostgreSQL ends the session: its process hangs, or its machine is gone."""
BEAT_S = 1.5


def lease_session(conn: Connection) -> None:
    """Limit how long the session of this connection may be silent."""
    conn.execute(sa.select(sa.func.set_config("idle_session_timeout", str(int(LEASE_S * 1000)), False)))


def lease_transaction(conn: Connection) -> None:
    """Limit how long the transaction of this connection may be silent: it locks a run, and others wait for that."""
    if conn.dialect.name == "postgresql":
        value = str(int(LEASE_S * 1000))
        conn.execute(sa.select(sa.func.set_config("idle_in_transaction_session_timeout", value, True)))
