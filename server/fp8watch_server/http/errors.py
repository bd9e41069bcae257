"""Errors as RFC 9457 problem details (value, rule, remedy), and JSON with non-finite numbers made safe.

Shapes:     exceptions -> application/problem+json
Thread:     event loop
"""

from __future__ import annotations

import errno
import logging
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from fp8watch_server.db.fence import RunHasMoved, is_fenced
from fp8watch_server.db.shards import ShardAway
from fp8watch_server.http.away_page import asked_by_a_person, away_page

log = logging.getLogger("fp8watch.collector")

RETRY_AFTER_S = 1
OUT_OF_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})
_encoder = msgspec.json.Encoder(enc_hook=str)


class Problem(Exception):
    """An error response. `extra` holds members besides those of RFC 9457, such as `error` and `ids`."""

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        rule: str,
        remedy: str,
        headers: dict[str, str] | None = None,
        **extra: Any,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.rule = rule
        self.remedy = remedy
        self.headers = headers
        self.extra = extra

    def response(self) -> Response:
        """As a Starlette response."""
        title = HTTPStatus(self.status).phrase if self.status in HTTPStatus._value2member_map_ else "Problem"
        content = {
            "type": "about:blank",
            "title": title,
            "status": self.status,
            "detail": self.detail,
            "rule": self.rule,
            "remedy": self.remedy,
            **self.extra,
        }
        return Response(_encoder.encode(content), self.status, self.headers, media_type="application/problem+json")


class JsonResponse(Response):
    """JSON by msgspec: an unexpected NaN becomes null, where other encoders fail."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encode."""
        return _encoder.encode(content)


def _on_problem(request: Request, e: Exception) -> Response:
    assert isinstance(e, Problem)
    return e.response()


def _on_http(request: Request, e: Exception) -> Response:
    assert isinstance(e, HTTPException)
    remedies = {404: "look at /openapi.json for the routes there are", 405: "use a method named in Allow"}
    return Problem(
        e.status_code,
        f"{request.method} {request.url.path}: {e.detail}",
        rule="the route and the method must be ones that the collector has",
        remedy=remedies.get(e.status_code, "correct the request"),
        headers=dict(e.headers) if e.headers else None,
    ).response()


def _on_validation(request: Request, e: Exception) -> Response:
    assert isinstance(e, RequestValidationError)
    first = e.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    shown = str(first.get("input"))[:100]
    return Problem(
        422,
        f"{where}={shown!r}: {first['msg']}",
        rule=str(first["msg"]),
        remedy=f"correct {where} and ask again",
        parameter=where,
    ).response()


def _on_database(request: Request, e: Exception) -> Response:
    log.warning("%s %s: database: %s", request.method, request.url.path, str(e).splitlines()[0])
    if asked_by_a_person(request.scope):
        return away_page(RETRY_AFTER_S, _why_not(e))
    return Problem(
        503,
        _why_not(e),
        rule="an answer of 200 means committed",
        remedy="send the same again later; the collector recovers by itself",
        headers={"Retry-After": str(RETRY_AFTER_S)},
    ).response()


def _why_not(e: Exception) -> str:
    if isinstance(e, ShardAway):
        return str(e.orig)
    if isinstance(e, RunHasMoved):
        return str(e)
    return "the run is being moved to another shard" if is_fenced(e) else "the database cannot be used at the moment"


def _on_too_many_files(request: Request, e: OSError) -> Response:
    log.error("%s %s: %s; raise the limit of open files (ulimit -n)", request.method, request.url.path, e)
    return Problem(
        503,
        "the collector can open no more files at the moment",
        rule="connections and files together are within the system's limit (ulimit -n)",
        remedy="send the same again later; the operator raises the limit",
        headers={"Retry-After": str(RETRY_AFTER_S)},
    ).response()


def _on_database_error(request: Request, e: Exception) -> Response:
    """A DBAPIError that is not about the connection is a bug, unless the connection broke underneath."""
    assert isinstance(e, DBAPIError)
    return _on_database(request, e) if e.connection_invalidated or is_fenced(e) else _on_bug(request, e)


def _on_bug(request: Request, e: Exception) -> Response:
    cause: BaseException | None = e
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in OUT_OF_DESCRIPTORS:
            return _on_too_many_files(request, cause)
        cause = cause.__cause__ or cause.__context__
    log.error("%s %s failed", request.method, request.url.path, exc_info=e)
    return Problem(
        500,
        "the collector failed on this request",
        rule="this must not happen",
        remedy="report it, with the lines that the collector has logged",
    ).response()


def answer_of(request: Request, e: Exception) -> Response:
    """Response for an exception."""
    if isinstance(e, Problem):
        return e.response()
    if isinstance(e, OperationalError | InterfaceError | PoolTimeoutError | RunHasMoved):
        return _on_database(request, e)
    return _on_database_error(request, e) if isinstance(e, DBAPIError) else _on_bug(request, e)


def install(app: FastAPI) -> None:
    """Register problem responses for all exceptions."""
    app.add_exception_handler(Problem, _on_problem)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(RequestValidationError, _on_validation)
    app.add_exception_handler(OperationalError, _on_database)
    app.add_exception_handler(InterfaceError, _on_database)
    app.add_exception_handler(PoolTimeoutError, _on_database)
    app.add_exception_handler(RunHasMoved, _on_database)
    app.add_exception_handler(DBAPIError, _on_database_error)
    app.add_exception_handler(Exception, _on_bug)
