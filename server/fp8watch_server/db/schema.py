"""Table definitions. Every key leads with run_id, so that a database can be sharded by run.

Shapes:     SQLAlchemy Core tables, the same on SQLite and PostgreSQL
Thread:     any; only data

Times are seconds since 1970 by the collector's clock, unless a column says otherwise. A number that may be
non-finite and is read by SQL has a `*_class` beside it, because SQLite stores NaN as NULL: 0 finite, 1 NaN,
2 +Inf, 3 −Inf, and NULL where there was no value at all. In JSON columns non-finite numbers are the strings
"nan", "inf" and "-inf" (store.dialect.Json does it).
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from fp8watch_server.db.block_tables import (
    BLOCK_ARRAYS,
    BLOCK_COUNTS,
    BLOCK_SAMPLED,
    BLOCK_STEPS,
    KEPT_DETAIL,
    KEPT_ROLLUP,
    KEPT_SUMMARY,
    ROLLED_ATTEMPT,
    ROLLED_RANK,
    batch_ledger,
    block,
    block_meta,
    cell,
    detect_state,
    logged,
    retention,
    scalar_block,
    sheet,
)
from fp8watch_server.db.dialect import Json
from fp8watch_server.db.directory_tables import moved_run, shard_of_run
from fp8watch_server.db.metadata import DEFAULT_TENANT, metadata, of_run, of_session, run_key

__all__ = [
    "BLOCK_ARRAYS",
    "BLOCK_COUNTS",
    "BLOCK_SAMPLED",
    "BLOCK_STEPS",
    "DEFAULT_TENANT",
    "KEPT_DETAIL",
    "KEPT_ROLLUP",
    "KEPT_SUMMARY",
    "ROLLED_ATTEMPT",
    "ROLLED_RANK",
    "batch_ledger",
    "block",
    "block_meta",
    "cell",
    "detect_state",
    "fact",
    "hot_batch",
    "incident",
    "incident_event",
    "logged",
    "metadata",
    "moved_run",
    "outbox",
    "retention",
    "run",
    "run_tag",
    "scalar",
    "scalar_block",
    "session",
    "shard_of_run",
    "sheet",
    "silence",
    "site",
    "site_total",
    "tile_map",
    "tile_map_batch",
    "token",
]

BATCH_PENDING, BATCH_DETECTED, BATCH_FAILED = 0, 1, 2
"""hot_batch.detected: not seen by the detectors yet, seen, or the detectors broke on it (detect_error says how)."""

run = sa.Table(
    "run",
    metadata,
    *run_key(),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("recipe", sa.Text, nullable=False, server_default=""),
    sa.Column("backend", sa.Text, nullable=False, server_default=""),
    sa.Column("world_size", sa.Integer, nullable=False, server_default="1"),
    sa.Column("attempt", sa.Integer, nullable=False, server_default="0"),  # newest attempt of any rank
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("last_seen_at", sa.Double, nullable=False),
    sa.Column("last_step", sa.BigInteger),  # of `last_step_attempt`; NULL before the first batch
    sa.Column("last_step_attempt", sa.Integer, nullable=False, server_default="0"),
    sa.Column("num_batches", sa.BigInteger, nullable=False, server_default="0"),  # also the source of hot_batch.arrival
    sa.Column("note", sa.Text, nullable=False, server_default=""),  # what people wrote about it
    sa.Column("archived_at", sa.Double),  # out of the list, kept; NULL again when the run goes on
    sa.Column("edited_at", sa.Double, nullable=False, server_default="0"),  # newest change of note, tags or archive
)
sa.Index(None, run.c.tenant, run.c.created_at)

run_tag = sa.Table(  # of attach(tags=), and of people
    "run_tag",
    metadata,
    *run_key(),
    sa.Column("tag", sa.Text, primary_key=True),
    of_run(),
)

session = sa.Table(
    "session",
    metadata,
    *run_key(),
    sa.Column("session", sa.Text, primary_key=True),
    sa.Column("rank", sa.Integer, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),  # from 1; each has one session of a rank at most
    sa.Column("world_size", sa.Integer, nullable=False),
    sa.Column("mesh", Json, nullable=False),
    sa.Column("host", sa.Text, nullable=False),
    sa.Column("pid", sa.BigInteger, nullable=False),
    sa.Column("started_at", sa.Double),  # by the clock of the training process
    sa.Column("versions", Json, nullable=False),
    sa.Column("recipe", sa.Text, nullable=False),
    sa.Column("fingerprint", sa.Text, nullable=False),
    sa.Column("backend", sa.Text, nullable=False),
    sa.Column("facts", Json, nullable=False),
    sa.Column("registered_at", sa.Double, nullable=False),
    sa.Column("last_seen_at", sa.Double, nullable=False),
    sa.Column("health", Json),  # counters of the agent, of its newest batch
    sa.Column("health_seq", sa.BigInteger, nullable=False, server_default="-1"),
    sa.Column("ledger_seq_max", sa.BigInteger, nullable=False, server_default="-1"),  # highest seq in batch_ledger
    sa.Column("ended", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column(
        "num_late_steps", sa.BigInteger, nullable=False, server_default="0"
    ),  # too late for the detectors' statistics
    sa.Column("last_late_step", sa.BigInteger),
    sa.Column("key_sha256", sa.Text),  # of the key that its batches must show; NULL: of an agent that sent none
    of_run(),
)
sa.Index(None, session.c.run_id, session.c.tenant, session.c.rank, session.c.attempt, unique=True)
sa.Index(  # which runs go on: a list of runs asks for that of all of them
    "ix_session_alive",
    session.c.run_id,
    session.c.tenant,
    sqlite_where=session.c.ended.is_(False),
    postgresql_where=session.c.ended.is_(False),
)

site = sa.Table(
    "site",
    metadata,
    *run_key(),
    sa.Column("site", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("module", sa.Text, nullable=False),
    sa.Column("operand", sa.Text, nullable=False),
    sa.Column("direction", sa.Text, nullable=False),
    sa.Column("gemm", sa.Text, nullable=False),
    sa.Column("flow_order", sa.Integer, nullable=False),  # Site.order: ORDER is an SQL keyword
    sa.Column("num_rows", sa.BigInteger, nullable=False),
    sa.Column("num_columns", sa.BigInteger, nullable=False),
    sa.Column("tile_rows", sa.Integer, nullable=False),
    sa.Column("tile_columns", sa.Integer, nullable=False),
    sa.Column("format", sa.Text, nullable=False),
    sa.Column("power_2_scale", sa.Boolean, nullable=False),
    sa.Column("eps", sa.Double, nullable=False),
    sa.Column("recipe", sa.Text, nullable=False),
    sa.Column("backend", sa.Text, nullable=False),
    sa.Column("evidence", Json, nullable=False),
    sa.Column("updated_at", sa.Double, nullable=False),
    of_run(),
)

site_total = sa.Table(  # running totals and newest values of a site over all ranks: what /metrics reads
    "site_total",
    metadata,
    *run_key(),
    sa.Column("site", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("num_nonfinite", sa.BigInteger, nullable=False),
    sa.Column("num_saturated", sa.BigInteger, nullable=False),
    sa.Column("num_sentinel_tiles", sa.BigInteger, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),  # of last_step
    sa.Column("last_step", sa.BigInteger, nullable=False),
    sa.Column("newest", Json, nullable=False),  # field or derived field -> value at last_step
    of_run(),
)

hot_batch = sa.Table(
    "hot_batch",
    metadata,
    *run_key(),
    sa.Column("session", sa.Text, primary_key=True),
    sa.Column("rank", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("body", sa.LargeBinary, nullable=False),  # as received: zstd
    sa.Column("body_sha256", sa.LargeBinary(32), nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("arrival", sa.BigInteger, nullable=False),  # order of commit within the run, from 1
    sa.Column("step_min", sa.BigInteger),  # NULL in a batch without steps
    sa.Column("step_max", sa.BigInteger),
    sa.Column("num_records", sa.BigInteger, nullable=False),
    sa.Column("received_at", sa.Double, nullable=False),
    sa.Column("detected", sa.SmallInteger, nullable=False, server_default="0"),
    sa.Column("detect_error", sa.Text),
    sa.Column(
        "urgent", sa.Boolean, nullable=False, server_default=sa.false()
    ),  # it holds what the detectors take first
    of_session(),
)
sa.Index(None, hot_batch.c.run_id, hot_batch.c.tenant, hot_batch.c.arrival, unique=True)
sa.Index(  # covers hot_batches.rows_between: SQLite reads through a body to reach the columns after it
    "ix_hot_batch_span",
    *(hot_batch.c[name] for name in ("run_id", "tenant", "step_min", "step_max")),
    *(hot_batch.c[name] for name in ("session", "rank", "seq", "attempt", "arrival", "received_at")),
)
sa.Index(
    "ix_hot_batch_pending",
    hot_batch.c.received_at,
    sqlite_where=hot_batch.c.detected == BATCH_PENDING,
    postgresql_where=hot_batch.c.detected == BATCH_PENDING,
)
sa.Index(
    "ix_hot_batch_urgent",
    *(hot_batch.c[name] for name in ("received_at", "run_id", "tenant")),
    sqlite_where=sa.and_(hot_batch.c.detected == BATCH_PENDING, hot_batch.c.urgent),
    postgresql_where=sa.and_(hot_batch.c.detected == BATCH_PENDING, hot_batch.c.urgent),
)
sa.Index(
    "ix_hot_batch_failed",
    hot_batch.c.received_at,
    sqlite_where=hot_batch.c.detected == BATCH_FAILED,
    postgresql_where=hot_batch.c.detected == BATCH_FAILED,
)

SCALAR_NAMES = ("loss", "grad_norm", "lr", "loss_scale")


def _scalar_columns() -> list[sa.Column[Any]]:
    columns: list[sa.Column[Any]] = []
    for name in SCALAR_NAMES:
        columns += [sa.Column(name, sa.Double), sa.Column(f"{name}_class", sa.SmallInteger)]
    return columns


scalar = sa.Table(
    "scalar",
    metadata,
    *run_key(),
    sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("rank", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("step", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("seq", sa.BigInteger, nullable=False),  # of its whole batch: of a step sent twice the later one stays
    sa.Column("status", sa.SmallInteger, nullable=False),  # record.StepStatus
    sa.Column("time", sa.Double),  # by the clock of the training process
    sa.Column("batch_id", sa.Text),
    *_scalar_columns(),
    of_run(),
)
sa.Index(None, scalar.c.run_id, scalar.c.tenant, scalar.c.step)

tile_map = sa.Table(
    "tile_map",
    metadata,
    *run_key(),
    sa.Column("site", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("step", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("rank", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("session", sa.Text, nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),  # wire.encode_tile_maps of this one map
    sa.Column("received_at", sa.Double, nullable=False),
    of_session(),
)
sa.Index(None, tile_map.c.run_id, tile_map.c.tenant, tile_map.c.step)

tile_map_batch = sa.Table(  # bodies of tile maps that were received, so that a resend is recognised
    "tile_map_batch",
    metadata,
    *run_key(),
    sa.Column("session", sa.Text, primary_key=True),
    sa.Column("rank", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("body_sha256", sa.LargeBinary(32), nullable=False),
    sa.Column("step_max", sa.BigInteger, nullable=False),
    sa.Column("received_at", sa.Double, nullable=False),
    of_session(),
)

incident = sa.Table(
    "incident",
    metadata,
    *run_key(),
    sa.Column("id", sa.Text, primary_key=True),  # uuid, hex
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("mode", sa.Text, nullable=False),  # slug of the failure mode
    sa.Column("title", sa.Text, nullable=False),
    sa.Column("severity", sa.Text, nullable=False),  # info | warning | critical
    sa.Column("status", sa.Text, nullable=False),  # open | acknowledged | resolved
    sa.Column("verdict", sa.Text, nullable=False),  # fp8 | shared | unknown
    sa.Column("first_step", sa.BigInteger, nullable=False),
    sa.Column("last_step", sa.BigInteger, nullable=False),
    sa.Column("num_events", sa.BigInteger, nullable=False),
    sa.Column("origin", sa.Boolean, nullable=False),
    sa.Column("place", Json, nullable=False),
    sa.Column("sites", Json, nullable=False),  # site ids, the named one first
    sa.Column("num_sites", sa.Integer, nullable=False),
    sa.Column("evidence", Json, nullable=False),
    sa.Column("cause", sa.Text, nullable=False),
    sa.Column("fix", Json, nullable=False),
    sa.Column("alternatives", Json, nullable=False),
    sa.Column("fingerprint", sa.Text, nullable=False),
    sa.Column("opened_at", sa.Double, nullable=False),
    sa.Column("resolved_at", sa.Double),
    sa.Column("updated_at", sa.Double, nullable=False),
    sa.Column("cause_id", sa.Text, nullable=False, server_default=""),  # incidents.causes: the same in every run
    sa.Column("seen_at", sa.Double),  # when somebody said that they looked at it
    sa.Column("owner", sa.Text, nullable=False, server_default=""),
    sa.Column("closed_as", sa.Text),  # NULL | fixed | false-alarm
    sa.Column("regression_of", sa.Text),  # id of the incident of this cause that was said to be fixed
    of_run(),
)
sa.Index(None, incident.c.run_id, incident.c.tenant, incident.c.fingerprint)
sa.Index(None, incident.c.tenant, incident.c.cause_id)
sa.Index(None, incident.c.run_id, incident.c.tenant, incident.c.status)
sa.Index(None, incident.c.id, unique=True)

incident_event = sa.Table(
    "incident_event",
    metadata,
    *run_key(),
    sa.Column("incident_id", sa.Text, primary_key=True),
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),  # from 1 within the incident
    sa.Column("kind", sa.Text, nullable=False),  # opened | updated | resolved, and what people did
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("step", sa.BigInteger),
    sa.Column("detail", Json, nullable=False),
    sa.ForeignKeyConstraint(
        ["run_id", "tenant", "incident_id"],
        ["incident.run_id", "incident.tenant", "incident.id"],
        ondelete="CASCADE",
    ),
)

outbox = sa.Table(
    "outbox",
    metadata,
    *run_key(),
    sa.Column("id", sa.Text, primary_key=True),  # uuid, hex
    sa.Column("incident_id", sa.Text, nullable=False),
    sa.Column("channel", sa.Text, nullable=False, server_default=""),  # '' = every channel that is configured
    sa.Column("kind", sa.Text, nullable=False),  # firing | resolved
    sa.Column("idempotency_key", sa.Text, nullable=False),
    sa.Column("payload", Json, nullable=False),
    sa.Column("state", sa.Text, nullable=False, server_default="pending"),  # pending | leased | sent | dead
    sa.Column("num_attempts", sa.Integer, nullable=False, server_default="0"),
    sa.Column("next_attempt_at", sa.Double, nullable=False, server_default="0"),
    sa.Column("leased_by", sa.Text),
    sa.Column("leased_until", sa.Double),
    sa.Column("last_error", sa.Text),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("sent_at", sa.Double),
)
sa.Index(None, outbox.c.state, outbox.c.next_attempt_at)
sa.Index(None, outbox.c.run_id, outbox.c.tenant, outbox.c.idempotency_key, outbox.c.channel, unique=True)

silence = sa.Table(
    "silence",
    metadata,
    *run_key(),  # run_id '' = every run
    sa.Column("id", sa.Text, primary_key=True),  # uuid, hex
    sa.Column("mode", sa.Text, nullable=False, server_default=""),  # '' = every mode
    sa.Column("module", sa.Text, nullable=False, server_default=""),  # '' = every module
    sa.Column("comment", sa.Text, nullable=False, server_default=""),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("expires_at", sa.Double, nullable=False),
)

token = sa.Table(
    "token",
    metadata,
    sa.Column("token_sha256", sa.Text, primary_key=True),  # hex; the token itself is not stored
    sa.Column("tenant", sa.Text, nullable=False, server_default=DEFAULT_TENANT),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("scopes", sa.Text, nullable=False),  # comma-separated: ingest, read, admin
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("revoked_at", sa.Double),
    sa.Column("runs", sa.Text, nullable=False, server_default="*"),  # comma-separated shell patterns of run ids
    sa.Column("expires_at", sa.Double),
)

fact = sa.Table(  # facts of the collector for SQL, such as `public_url`
    "fact",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)
