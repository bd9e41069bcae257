"""Small JSON bodies of what people change, and who they say they are.

Shapes:     a request -> a msgspec struct; a request -> a name
Thread:     event loop
"""

from __future__ import annotations

import base64
from typing import TypeVar

import msgspec
from fastapi import Request

from fp8watch_server.http.errors import Problem

MAX_BYTES = 64 << 10
MAX_NAME_CHARS = 100
NOBODY = "api"
Body = TypeVar("Body", bound=msgspec.Struct)
T = TypeVar("T")


async def read(request: Request, kind: type[Body], what: str, rule: str) -> Body:
    """Decode and check a body.

    Raises:
        Problem: 413 above 64 KiB; 422 for what is not JSON, has a wrong value, or text that a database cannot hold.
    """
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BYTES:
            raise Problem(413, "a body above 64 KiB", rule="at most 64 KiB", remedy="shorten the text")
    return checked(bytes(body), kind, what, rule, "correct the value")


def checked(body: bytes, kind: type[T], what: str, rule: str, remedy: str) -> T:
    """JSON as one of `kind`.

    Raises:
        Problem: 422 for what is not JSON, has a wrong value, or text that a database cannot hold.
    """
    try:
        if b"\\u0000" in body or b"\0" in body:
            raise msgspec.ValidationError("a NUL character")
        got = msgspec.json.decode(body, type=kind)
        msgspec.json.encode(got)  # a lone surrogate is no text
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as e:
        raise Problem(422, f"{what}: {e}", rule=rule, remedy=remedy) from e
    return got


def author(request: Request) -> str:
    """The name that a browser sends with its token, which is asked for with any name; else `api`."""
    kind, _, value = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "basic":
        return NOBODY
    try:
        name = base64.b64decode(value.strip(), validate=True).decode().partition(":")[0]
    except (ValueError, UnicodeDecodeError):
        return NOBODY
    return name[:MAX_NAME_CHARS].replace("\0", "") or NOBODY
