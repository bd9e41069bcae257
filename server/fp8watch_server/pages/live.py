"""Server-sent events that notify open pages when their data has changed.

Shapes:     GET /live?run=…|incident=… -> text/event-stream of short versions; the page then asks for what it needs
Thread:     event loop; the question to the database goes to a thread, once for all pages that look at the same

An event carries only a version, no data: its size does not grow with the run, and it reveals nothing beyond the page
itself. A stream ends when the collector stops; browsers reconnect by themselves.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from anyio import to_thread
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import StreamingResponse
from sqlalchemy import Connection

from fp8watch_server.db import schema as t
from fp8watch_server.db.pools import for_requests
from fp8watch_server.db.shards import Shards
from fp8watch_server.http.databases import shards_of
from fp8watch_server.pages.formatting import segment
from fp8watch_server.store.queries import STALLED_AFTER_S

LOOK_EACH_S = 0.5
COMMENT_EACH_S = 15.0  # an empty comment line keeps proxies from closing the connection and detects dead clients
RETRY_MS = 2000
MAX_STREAM_S = 900.0  # then the browser reconnects, and its token is checked again

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True)
class Topic:
    """What a page shows: one run, one incident of it, or (neither) the list of runs."""

    run: str = ""
    incident: str = ""

    @property
    def url(self) -> str:
        """URL of its event stream."""
        parts = [
            f"{name}={segment(value)}" for name, value in (("run", self.run), ("incident", self.incident)) if value
        ]
        return f"/live{'?' if parts else ''}{'&'.join(parts)}"


def version(conn: Connection, topic: Topic, now: float | None = None) -> str:
    """A short text that changes when the page of a topic would. Reads a handful of rows by key."""
    now = time.time() if now is None else now
    r, i, s, q = t.run.c, t.incident.c, t.session.c, t.silence.c
    tenant = t.DEFAULT_TENANT
    of_run = (r.run_id, r.num_batches, r.attempt, r.last_step, r.last_seen_at, r.name, r.edited_at)
    runs = sa.select(*of_run).where(r.tenant == tenant, r.run_id == topic.run)
    incidents = sa.select(sa.func.count(), sa.func.max(i.updated_at)).where(i.tenant == tenant)
    sessions = sa.select(sa.func.count(), sa.func.sum(sa.cast(s.ended, sa.Integer)), sa.func.max(s.attempt)).where(
        s.tenant == tenant
    )
    silences = sa.select(q.id).where(q.tenant == tenant, q.expires_at > now).order_by(q.id)
    if topic.run:
        incidents = incidents.where(i.run_id == topic.run)
        sessions = sessions.where(s.run_id == topic.run)
    if topic.incident:
        incidents = incidents.where(i.id == topic.incident)
    parts: list[Any] = []
    if topic.run:
        parts += [[*row, now - row.last_seen_at > STALLED_AFTER_S] for row in conn.execute(runs)]
    else:
        parts.append(list(conn.execute(_of_all(now).where(r.tenant == tenant)).one()))
    parts += [list(conn.execute(sessions).one()), list(conn.execute(incidents).one())]
    if topic.incident:
        parts.append(list(conn.execute(silences).scalars()))
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def version_of_all(conns: Sequence[Connection]) -> str:
    """The same of the list of runs, over several databases; it changes when one of them goes or comes."""
    found = [version(conn, Topic()) for conn in conns]
    return found[0] if len(found) == 1 else hashlib.blake2b("".join(found).encode(), digest_size=8).hexdigest()


def _of_all(now: float) -> Any:
    """What changes whenever any run does: sums, because there may be ten thousand."""
    r = t.run.c
    silent = sa.case((r.last_seen_at < now - STALLED_AFTER_S, 1), else_=0)
    newest = (sa.func.max(r.last_seen_at), sa.func.max(r.edited_at))
    return sa.select(sa.func.count(), sa.func.sum(r.num_batches), sa.func.sum(r.attempt), *newest, sa.func.sum(silent))


class Live:
    """Subscriptions of open pages. One query per topic and half second, however many pages are open."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._known: dict[Topic, tuple[float, asyncio.Future[str]]] = {}
        self.closed = False

    def close(self) -> None:
        """End all streams: a stopping server waits for its answers, and these never end."""
        self.closed = True

    async def version(self, topic: Topic) -> str:
        """Current version, at most LOOK_EACH_S old."""
        now = time.monotonic()
        found = self._known.get(topic)
        if found is None or now - found[0] >= LOOK_EACH_S or found[1].get_loop() is not asyncio.get_running_loop():
            self._known = {k: v for k, v in self._known.items() if now - v[0] < 10 * LOOK_EACH_S}
            asking = asyncio.ensure_future(to_thread.run_sync(self._ask, topic))
            asking.add_done_callback(lambda done: done.cancelled() or done.exception())
            found = self._known[topic] = (now, asking)
        return await asyncio.shield(found[1])

    def _ask(self, topic: Topic) -> str:
        if topic.run or topic.incident:
            shards = self._shards
            engine = shards.of_run(topic.run) if topic.run else shards.of_incident(topic.incident)
            with for_requests(engine).connect() as conn:
                return version(conn, topic)
        with self._shards.connections() as everywhere:
            return version_of_all(everywhere.conns)

    async def events(self, topic: Topic) -> AsyncIterator[str]:
        """Event stream of one page."""
        last, sent_at, began = "", time.monotonic(), time.monotonic()
        yield f"retry: {RETRY_MS}\n\n"
        while not self.closed and time.monotonic() - began < MAX_STREAM_S:
            try:
                now = await self.version(topic)
            except sa.exc.SQLAlchemyError:
                return  # the page reports that the collector is unreachable, and reconnects
            if now != last:
                last, sent_at = now, time.monotonic()
                yield f"event: change\nid: {now}\ndata: {now}\n\n"
            elif time.monotonic() - sent_at > COMMENT_EACH_S:
                sent_at = time.monotonic()
                yield ": nothing new\n\n"
            await asyncio.sleep(LOOK_EACH_S)


@router.get("/live")
async def live_stream(request: Request, run: str = "", incident: str = "") -> StreamingResponse:
    """Events of what a page shows."""
    live: Live = request.app.state.live
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}  # nginx would buffer them
    return StreamingResponse(live.events(Topic(run, incident)), media_type="text/event-stream", headers=headers)


def install(app: FastAPI) -> None:
    """Add the stream. Whoever runs the server calls `app.state.live.close()` before it waits for open answers."""
    app.state.live = Live(shards_of(app))
    app.include_router(router)
