"""Which database takes a body in: that of its run.

Shapes:     a run id, or a body -> Ingest
Thread:     event loop; the directory is asked in the pool of the home database, once a run
"""

from __future__ import annotations

from collections.abc import Callable

from fastapi import Request

from fp8watch_agent.peek import run_of
from fp8watch_server.db.directory import HOME
from fp8watch_server.http.databases import shards_of
from fp8watch_server.http.db_timeout import unavailable
from fp8watch_server.ingest.intake import Ingest
from fp8watch_server.ingest.registration import check_name


def ingest_of(request: Request) -> Ingest:
    """That of the home database."""
    found = request.app.state.ingest
    assert isinstance(found, Ingest)
    return found


async def intake_of_run(request: Request, run_id: str, *, new: bool = False, queued: bool = False) -> Ingest:
    """That of a run; one that is `new` is placed, where it lies nowhere.

    Args:
        queued: what a queue takes may wait there for a shard that is away.

    Raises:
        ShardAway: its shard does not answer.
        Problem: no such name, the run is being moved, or the home database does not answer.
    """
    home, shards = ingest_of(request), shards_of(request.app)
    if not shards.others:
        return home
    name = shards.directory.known(run_id)
    if name is None:
        check_name("run", run_id)
        name = await home.run(lambda: shards.name_of_run(run_id, new=new))
    if shards.directory.refuses(run_id):
        raise unavailable("the run is being moved to another shard")
    if name == HOME:
        return home
    found = request.app.state.ingests.get(name)
    if found is None or not queued or found.committer.queue_ready is None:
        shards.named(name)
    assert isinstance(found, Ingest)
    return found


async def intake_of_body(
    request: Request, body: bytes, decode: Callable[[bytes], str], *, queued: bool = False
) -> Ingest:
    """That of the run that a body names.

    Args:
        queued: as of a run.
        decode: gives the run of a body that does not begin with it.

    Raises:
        ShardAway, Problem: as of a run, or what is wrong with the body.
    """
    home = ingest_of(request)
    if not shards_of(request.app).others:
        return home
    run_id = run_of(body)
    if run_id is None:
        run_id = await home.run(lambda: decode(body))
    return await intake_of_run(request, run_id, queued=queued)
