"""Batch deduplication after compaction: the ledger of batch keys and body hashes.

Shapes:     256 sequence numbers of a session -> one row of 16 bytes each
Thread:     compactor (write), ingest pool (read)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import upsert

SEQS = 256
DIGEST_BYTES = 16
"""Stored bytes of a body's SHA-256: enough to exclude collisions."""
_NONE = bytes(DIGEST_BYTES)


def digest_of(conn: Connection, run_id: str, tenant: str, session: str, rank: int, seq: int) -> bytes | None:
    """First 16 bytes of the SHA-256 of a compacted batch; None when there was none."""
    c = t.batch_ledger.c
    page = conn.execute(
        sa.select(c.digests).where(
            c.run_id == run_id, c.tenant == tenant, c.session == session, c.rank == rank, c.seq0 == seq - seq % SEQS
        )
    ).scalar()
    if page is None:
        return None
    at = seq % SEQS * DIGEST_BYTES
    found = bytes(page)[at : at + DIGEST_BYTES]
    return found if found and found != _NONE else None


def enter(conn: Connection, rows: Sequence[Any]) -> None:
    """Add batches (run_id, tenant, session, rank, seq, body_sha256), in the transaction that deletes them."""
    pages: dict[tuple[Any, ...], dict[int, bytes]] = defaultdict(dict)
    for row in rows:
        key = (row.run_id, row.tenant, row.session, row.rank, row.seq - row.seq % SEQS)
        pages[key][row.seq % SEQS] = bytes(row.body_sha256)[:DIGEST_BYTES]
    c = t.batch_ledger.c
    out = []
    for key, digests in pages.items():
        names = ("run_id", "tenant", "session", "rank", "seq0")
        there = conn.execute(sa.select(c.digests).where(*(c[n] == v for n, v in zip(names, key, strict=True)))).scalar()
        page = bytearray(there or b"")
        needed = (max(digests) + 1) * DIGEST_BYTES
        page.extend(bytes(max(0, needed - len(page))))
        for place, digest in digests.items():
            page[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES] = digest
        out.append({**dict(zip(names, key, strict=True)), "digests": bytes(page)})
    upsert(conn, t.batch_ledger, out)
    newest: dict[tuple[str, str, str], int] = {}
    for row in rows:
        of = (row.run_id, row.tenant, row.session)
        newest[of] = max(newest.get(of, -1), row.seq)
    s = t.session.c
    for (run_id, tenant, session), seq in sorted(newest.items()):
        this = (s.run_id == run_id, s.tenant == tenant, s.session == session, s.ledger_seq_max < seq)
        conn.execute(sa.update(t.session).where(*this).values(ledger_seq_max=seq))
