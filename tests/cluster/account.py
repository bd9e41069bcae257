"""What databases hold of every batch, compacted or not; a batch that is there twice is told."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from fp8watch_server.db import schema as t
from fp8watch_server.store.batch_dedup import DIGEST_BYTES

Key = tuple[str, str, int, int]  # run, session, rank, seq
_NONE = bytes(DIGEST_BYTES)


def stored(engines: Sequence[Engine]) -> dict[Key, bytes]:
    """First bytes of each body's hash, by key, over all databases. Whole only while nobody writes."""
    found: dict[Key, bytes] = {}
    for engine in engines:
        for key, digest in _of(engine):
            assert key not in found, f"{key} is stored twice"
            found[key] = digest
    return found


def _of(engine: Engine) -> list[tuple[Key, bytes]]:
    b, c = t.hot_batch.c, t.batch_ledger.c
    with engine.connect() as conn:
        hot = conn.execute(sa.select(b.run_id, b.session, b.rank, b.seq, b.body_sha256)).all()
        pages = conn.execute(sa.select(c.run_id, c.session, c.rank, c.seq0, c.digests)).all()
    out = [((run, session, rank, seq), bytes(digest)[:DIGEST_BYTES]) for run, session, rank, seq, digest in hot]
    for run, session, rank, seq0, page in pages:
        for i in range(len(page) // DIGEST_BYTES):
            digest = bytes(page)[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES]
            if digest != _NONE:
                out.append(((run, session, rank, seq0 + i), digest))
    return out


def check_counts(engines: Sequence[Engine]) -> None:
    """Each run counts as many batches as it has."""
    by_run: dict[str, int] = {}
    for run, *_ in stored(engines):
        by_run[run] = by_run.get(run, 0) + 1
    r = t.run.c
    for engine in engines:
        with engine.connect() as conn:
            for run, num in conn.execute(sa.select(r.run_id, r.num_batches)):
                assert num == by_run.get(run, 0), run


def num_saturated(engines: Sequence[Engine]) -> dict[str, set[int]]:
    """Run -> what its sites count as saturated."""
    s, out = t.site_total.c, dict[str, set[int]]()
    for engine in engines:
        with engine.connect() as conn:
            for run, num in conn.execute(sa.select(s.run_id, s.num_saturated)):
                out.setdefault(run, set()).add(num)
    return out
