"""A run that is written straight into a database, as ingest and the detect worker would, without either."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import sqlalchemy as sa
from collector.kit import Agent, make_site

from fp8watch_agent.record import HISTOGRAMS, Site
from fp8watch_agent.wire import decode_batch
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import writing
from fp8watch_server.store import commit, queries, reading, registrations
from fp8watch_server.store.compactor import Compactor, Done

UP, DOWN, HEAD = (make_site(name, order=i) for i, name in enumerate(("layers.0.up", "layers.0.down", "layers.1.up")))
SITES = [UP, DOWN, HEAD]
NOW = 1_800_000_000.0
FIELDS = ("amax_max", "signal_energy", "tile_sqnr_db", "num_nonfinite")


def made_up(rng: np.random.Generator, num_steps: int, num_sites: int) -> dict[str, Any]:
    """Columns [steps × sites] with everything that a record may hold: non-finite values, zeros, histograms."""
    n = num_steps * num_sites
    amax = np.exp2(rng.normal(0, 3, n)).astype(np.float32)
    amax[rng.random(n) < 0.02] = np.nan
    amax[rng.random(n) < 0.02] = np.inf
    hist = rng.integers(0, 50, (n, 64)) * (rng.random((n, 64)) < 0.1)
    return {
        "amax_max": amax,
        "signal_energy": np.exp(rng.normal(0, 20, n)),
        "noise_energy": np.exp(rng.normal(-5, 20, n)),
        "tile_noise_ratio_sum": rng.random(n),
        "tile_noise_ratio_max": rng.random(n),
        "num_underflow": rng.integers(0, 900, n),
        "num_nan": (rng.random(n) < 0.05) * rng.integers(0, 3, n),
        "scale_inv_min": np.exp2(-rng.integers(0, 20, n)),
        "amax_hist": hist,
        "worst_tile": rng.integers(0, 99, (n, 2)),
    }


class Feed:
    """One database, any number of runs; batches are known to the detectors as soon as they are in."""

    def __init__(self, engine: sa.Engine) -> None:
        self.engine, self.now = engine, NOW
        self.known = commit.KnownSites()
        self.sites: list[Site] = SITES

    def agent(self, run: str = "run-1", rank: int = 0, attempt: int = 1, world_size: int = 2) -> Agent:
        """Register a run, a session and its sites."""
        agent = Agent(None, run=run, session=f"{rank:016x}{attempt:016x}", rank=rank)
        started_at = 1e9 * attempt  # all ranks of an attempt together
        facts = registrations.StoredSession(
            agent.session, rank, world_size, {}, "node", 1, started_at, {}, "blockwise", f"f{attempt}", "cpu", {}
        )
        with writing(self.engine) as conn:
            registrations.register_run(
                conn, run, name=run, recipe="blockwise", backend="cpu", world_size=world_size, now=self.now
            )
            assert registrations.register_session(conn, run, facts, now=self.now) == attempt
            registrations.register_sites(conn, run, agent.session, self.sites, now=self.now)
        return agent

    def commit(self, body: bytes, *, detected: bool = True) -> bool:
        """What ingest does with a body, and the worker after it."""
        batch = decode_batch(body)
        h = batch.header
        with writing(self.engine) as conn:
            item = commit.Incoming(batch, body, hashlib.sha256(body).digest())
            (outcome,) = commit.commit_group(conn, [item], self.known, now=self.now, replays=True)
            assert isinstance(outcome, commit.Committed), outcome
            new = outcome.stored
            if new and detected:
                b = t.hot_batch.c
                conn.execute(
                    sa.update(t.hot_batch)
                    .where(b.run_id == h.run, b.session == h.session, b.seq == h.seq)
                    .values(detected=t.BATCH_DETECTED)
                )
        return new

    def send(self, agent: Agent, steps: list[int], sites: list[Site] | None = None, **given: Any) -> bytes:
        """Commit a batch."""
        body = agent.body(self.sites if sites is None else sites, steps, **given)
        assert self.commit(body)
        return body

    def compact(self, *, everything: bool = False, **more: Any) -> Done:
        """Rounds of the compactor until nothing is left to do; `everything`: also what is still warm."""
        total = Done()
        compactor = Compactor(self.engine, clock=lambda: self.now + (1e6 if everything else 0), **more)
        for _ in range(100):
            done = compactor.round()
            total.num_records += done.num_records
            total.num_groups += done.num_groups
            total.num_rolled_up += done.num_rolled_up
            if not done.anything and not done.num_raced:
                return total
        raise AssertionError("the compactor does not come to an end")

    def count(self, table: sa.Table, *where: Any) -> int:
        """Rows of a table."""
        with self.engine.connect() as conn:
            return int(conn.execute(sa.select(sa.func.count()).select_from(table).where(*where)).scalar_one())

    def answers(self, run: str = "run-1", windows: Any = ((None, None),), ranks: Any = (None, 0, 1)) -> list[Any]:
        """Everything that a page may ask."""
        out: list[Any] = []
        with self.engine.connect() as conn:
            for low, high in windows:
                for rank in ranks:
                    for site, field in zip(self.sites, FIELDS, strict=False):
                        out.append(queries.series(conn, run, site.id, field, low, high, 50, rank))
                    out.append(queries.scalars(conn, run, "loss", low, high, 60, rank))
                out.append(queries.histogram(conn, run, self.sites[0].id, low, high, 40))
                for field in FIELDS:
                    out += [queries.top(conn, run, field, 5, low, high)]
                    out += [queries.heatmap(conn, run, field, low, high, points) for points in (5, 400)]
        return out

    def records(self, run: str = "run-1", rank: int | None = None) -> dict[str, Any]:
        """All columns of all records, as bytes."""
        from fp8watch_server.store.blocks import ALL_FIELDS

        with self.engine.connect() as conn:
            got = reading.gather(conn, run, ALL_FIELDS, rank=rank)
        whole = {"site": got.site, "step": got.step, **got.columns}
        return {name: np.ascontiguousarray(values).tobytes() for name, values in whole.items()}


__all__ = ["DOWN", "HEAD", "HISTOGRAMS", "NOW", "SITES", "UP", "Feed", "made_up"]
