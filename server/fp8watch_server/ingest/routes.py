"""Where batches come in: raw bodies, limits, and one transaction that is either whole or not there.

Upstream:   fp8watch_agent.transport (HTTP), fp8watch_agent.relay_express (HTTP), fp8watch_server.ingest.joined
Downstream: fp8watch_server.ingest.intake
Shapes:     PUT registrations (JSON), POST batches and tile maps (wire bodies) -> rows; 200 means committed
Thread:     event loop reads; batches go through the committer, the rest through a small pool

Bodies never become pydantic models: they are decoded and checked column by column (fp8watch_agent.wire), and stored
as they came.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from sqlalchemy.exc import IntegrityError
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from fp8watch_agent.wire import (
    BATCH_CONTENT_TYPE,
    MAX_WIRE_BYTES,
    TILE_MAPS_CONTENT_TYPE,
    Batch,
    TooLarge,
    WireError,
    decode_batch,
    decode_tile_maps,
    decompress,
)
from fp8watch_server.db.dialect import writing
from fp8watch_server.http.errors import JsonResponse, Problem
from fp8watch_server.ingest.ingest_stats import Held
from fp8watch_server.ingest.intake import Ingest
from fp8watch_server.ingest.of_run import ingest_of, intake_of_body, intake_of_run
from fp8watch_server.ingest.registration import RunBody, SessionBody, check_name, decode
from fp8watch_server.ingest.request_sender import KEY_HEADER, quotas_of, sender_of
from fp8watch_server.store import registrations, tile_maps

MAX_JSON_BYTES = 4 << 20
MAX_INFLIGHT_BYTES = 128 << 20
ENCODINGS = ("zstd", "gzip")
PRUNE_TILE_MAPS_EVERY = 64
MAX_RANK = (1 << 31) - 1

T = TypeVar("T")

router = APIRouter(prefix="/v1", include_in_schema=True, tags=["ingest"])


async def read_body(request: Request, limit: int, held: Held) -> bytes:
    """Read a body, counted as in flight until `held` lets go of it.

    Raises:
        Problem: 413, 429.
    """
    length = request.headers.get("content-length", "")
    declared = int(length) if length.isascii() and length.isdecimal() and len(length) < 20 else 0
    if declared > limit:
        raise _too_large(declared, limit)
    got = bytearray()
    try:
        async for piece in request.stream():
            got += piece
            if len(got) > limit:
                raise _too_large(len(got), limit)
            held.add(len(piece))
            if held.total_bytes > MAX_INFLIGHT_BYTES:
                raise Problem(
                    429,
                    "too much is being taken in at this moment",
                    rule=f"at most {MAX_INFLIGHT_BYTES} bytes of bodies in flight",
                    remedy="send the same again after Retry-After",
                    headers={"Retry-After": "1"},
                )
    except ClientDisconnect as e:
        raise Problem(400, "the body ended early", rule="a body is complete", remedy="send it again") from e
    return bytes(got)


def _too_large(size: int, limit: int) -> Problem:
    return Problem(
        413, f"a body of {size} bytes or more", rule=f"at most {limit} bytes", remedy="split it, and send the halves"
    )


def _require_type(request: Request, content_type: str) -> None:
    got = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if got != content_type:
        raise Problem(
            415, f"Content-Type {got[:100]!r}", rule=f"Content-Type is {content_type}", remedy="send it with that type"
        )
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ENCODINGS:
        raise Problem(
            415,
            f"Content-Encoding {encoding[:100]!r}",
            rule=f"Content-Encoding is {' or '.join(ENCODINGS)}",
            remedy="compress it with zstd",
        )


def _wire(work: Callable[[], T]) -> T:
    """Run the codec, and say what was wrong as a problem."""
    try:
        return work()
    except WireError as e:
        detail, column = str(e), e.column
        if column != "body":
            status, rule = 422, f"column {column!r} has its exact length and allowed values"
        elif isinstance(e, TooLarge):
            status, rule = 413, "a body inflates to at most 64 MiB"
        else:
            status, rule = 400, "a body is a zstd frame with a msgpack map of header and columns"
    except (ValueError, TypeError, OverflowError, RecursionError, MemoryError) as e:
        status, column, detail = 400, "body", f"body: {type(e).__name__}: {e}"
        rule = "a body is a zstd frame with a msgpack map of header and columns"
    remedy = "split the batch" if status == 413 else "nothing of the batch was stored; correct it, or upgrade the agent"
    raise Problem(status, detail, rule=rule, remedy=remedy, error="refused", column=column)


def unstored(e: Exception) -> Problem:
    """What the store did not know, as a problem."""
    if isinstance(e, registrations.KeyReused):
        return Problem(
            409,
            "another body has been stored under this (run, session, rank, seq)",
            rule="a key belongs to one body for good",
            remedy="give every new body a new seq, and every process a new session",
            error="key-reused",
        )
    if isinstance(e, registrations.Unknown):
        extra: dict[str, Any] = {} if e.ids is None else {"ids": e.ids[:10_000]}
        return Problem(
            424,
            f"unknown {e.what}",
            rule="run, session and sites are registered before their batches",
            remedy="PUT run, session and sites, and send the same again",
            error=f"unknown-{e.what}",
            **extra,
        )
    if isinstance(e, registrations.WrongKey):
        return Problem(
            403,
            "the session was registered with another key",
            rule=f"whoever registers a session with {KEY_HEADER} shows the same key with all that it sends",
            remedy="give every process a session of its own; data of a spool needs the key that lies beside it",
            error="session-key",
        )
    return Problem(
        422,
        f"header: {e}",
        rule="a session belongs to one rank",
        remedy="register a session of its own for every process",
        error="refused",
        column="header",
    )


UNSTORED = (
    registrations.KeyReused,
    registrations.Unknown,
    registrations.RankMismatch,
    registrations.WrongKey,
)


async def _register(
    request: Request, run_id: str, store: Callable[[Ingest, bytes], dict[str, Any]], *, new: bool = False
) -> Response:
    """Store a registration in the database of its run; one of a run that is `new` may choose it."""
    sender_of(request).grant.require(run_id)
    if new:
        quotas_of(request).admit_run(sender_of(request).grant, run_id)
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise Problem(415, f"Content-Encoding {encoding[:100]!r}", rule="plain JSON", remedy="send it uncompressed")
    with ingest_of(request).stats.inflight() as held:
        body = await read_body(request, MAX_JSON_BYTES, held)
        ingest = await intake_of_run(request, run_id, new=new)
        try:
            return JsonResponse(await ingest.run(lambda: store(ingest, body)))
        except UNSTORED as e:
            raise unstored(e) from e


@router.put("/runs/{run_id:path}/sessions/{session}")
async def put_session(request: Request, run_id: str, session: str) -> Response:
    """Register one attach of one process; answers with its attempt."""
    key_sha256 = sender_of(request).key_sha256

    def store(ingest: Ingest, body: bytes) -> dict[str, Any]:
        facts = decode(body, SessionBody).as_facts(check_name("session", session))
        of_run, now = check_name("run", run_id), time.time()

        def register(alone: bool) -> int:
            with writing(ingest.engine) as conn:
                return registrations.register_session(conn, of_run, facts, now=now, key_sha256=key_sha256, alone=alone)

        try:
            attempt = register(alone=False)
        except IntegrityError:
            attempt = register(alone=True)
        return {"run": run_id, "session": session, "attempt": attempt}

    return await _register(request, run_id, store)


@router.put("/runs/{run_id:path}/sites")
async def put_sites(request: Request, run_id: str) -> Response:
    """Register sites, or renew their static facts."""
    key_sha256 = sender_of(request).key_sha256

    def store(ingest: Ingest, body: bytes) -> dict[str, Any]:
        return {"run": run_id, "num_sites": ingest.sites.register(run_id, body, key_sha256)}

    return await _register(request, run_id, store)


@router.put("/runs/{run_id:path}")
async def put_run(request: Request, run_id: str) -> Response:
    """Register a run, or renew what is said of it."""

    def store(ingest: Ingest, body: bytes) -> dict[str, Any]:
        got = decode(body, RunBody)
        check_name("run", run_id)
        facts: dict[str, Any] = {"name": got.name or run_id, "recipe": got.recipe, "backend": got.backend}
        facts |= {"world_size": got.world_size}
        now = time.time()
        if not got.tags:
            with ingest.engine.connect() as conn:
                if registrations.is_registered(conn, run_id, facts, now):
                    return {"run": run_id}
        with writing(ingest.engine) as conn:
            registrations.register_run(conn, run_id, **facts, now=now, tags=got.tags)
        return {"run": run_id}

    return await _register(request, run_id, store, new=True)


async def _post(
    request: Request, content_type: str, store: Callable[[Ingest, bytes], Awaitable[dict[str, Any]]]
) -> Response:
    stats = ingest_of(request).stats
    with stats.one_body() as outcome:
        _require_type(request, content_type)
        quotas_of(request).admit(sender_of(request).grant)
        with stats.inflight() as held:
            body = await read_body(request, MAX_WIRE_BYTES, held)
            try:
                ingest = await intake_of_body(request, body, run_of_body, queued=content_type == BATCH_CONTENT_TYPE)
                answer = await store(ingest, body)
            except UNSTORED as e:
                raise unstored(e) from e
        outcome.accepted(len(body))
    ingest.wake()
    return JsonResponse(answer)


def decode_checked(body: bytes) -> Batch:
    """Decode and check.

    Raises:
        Problem: what is wrong with it.
    """
    batch = _wire(lambda: decode_batch(decompress(body), compressed=False))
    _check_header(batch.header.run, batch.header.session, batch.header.rank)
    return batch


def run_of_body(body: bytes) -> str:
    """The run of a batch, or of tile maps.

    Raises:
        Problem: it is neither.
    """
    plain = _wire(lambda: decompress(body))
    try:
        return decode_batch(plain, compressed=False).header.run
    except WireError:
        return _wire(lambda: decode_tile_maps(plain, compressed=False)).run


@router.post("/batches")
async def post_batch(request: Request) -> Response:
    """Take a batch. 200 after commit, also when the very same batch had come before."""

    async def store(ingest: Ingest, body: bytes) -> dict[str, Any]:
        taken = await ingest.commit(body, sender_of(request))
        return {"acked": taken.seq, "captures": taken.captures}

    return await _post(request, BATCH_CONTENT_TYPE, store)


@router.post("/tile-maps")
async def post_tile_maps(request: Request) -> Response:
    """Take full tile maps. 200 after commit."""
    sender = sender_of(request)

    def write_maps(ingest: Ingest, body: bytes) -> dict[str, Any]:
        maps = _wire(lambda: decode_tile_maps(decompress(body), compressed=False))
        _check_header(maps.run, maps.session, maps.rank)
        sender.grant.require(maps.run)
        ingest.num_tile_map_bodies += 1
        with writing(ingest.engine) as conn:
            sha256, now = hashlib.sha256(body).digest(), time.time()
            tile_maps.commit_tile_maps(conn, maps, sha256, now=now, key_sha256=sender.key_sha256)
            if ingest.num_tile_map_bodies % PRUNE_TILE_MAPS_EVERY == 0:
                tile_maps.prune(conn, maps.run)
        return {"acked": maps.seq}

    async def store(ingest: Ingest, body: bytes) -> dict[str, Any]:
        return await ingest.run(lambda: write_maps(ingest, body))

    return await _post(request, TILE_MAPS_CONTENT_TYPE, store)


def _check_header(run_id: str, session: str, rank: int) -> None:
    check_name("run", run_id)
    check_name("session", session)
    if rank > MAX_RANK:
        raise Problem(
            422,
            f"header: rank {rank}",
            rule=f"rank is at most {MAX_RANK}",
            remedy="correct it",
            error="refused",
            column="header",
        )
