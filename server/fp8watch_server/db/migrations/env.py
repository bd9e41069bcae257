"""How Alembic runs the revisions: on the connection that fp8watch_server.db.migrations.upgrade has opened."""

from __future__ import annotations

from alembic import context

from fp8watch_server.db.schema import metadata

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=metadata, transactional_ddl=False)
context.run_migrations()
