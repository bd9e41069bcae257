"""Several batches in one request: each with the key of its session, each answered by itself.

Shapes:     [(session key, body)] -> one msgpack array; its answers, in the same order
Thread:     any; pure

Bodies are compressed one by one as they were made, so the request itself is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from fp8watch_agent.bounded_decompress import WireError
from fp8watch_agent.transport import Capture

JOINED_PATH = "/v1/batches/joined"
JOINED_CONTENT_TYPE = "application/vnd.fp8watch.batches+msgpack"
MAX_JOINED = 128
MAX_JOINED_BYTES = 8 << 20


_Bodies = Annotated[list[tuple[str, bytes]], msgspec.Meta(min_length=1, max_length=MAX_JOINED)]
"""The number is checked before any of them is decoded."""


class JoinedAnswer(msgspec.Struct, omit_defaults=True):
    """What became of one batch: the status that it would have got alone."""

    status: int
    acked: int | None = None
    captures: list[Capture] | None = None
    error: str = ""


class JoinedAnswers(msgspec.Struct):
    """Body of a 200 to a joined request."""

    answers: list[JoinedAnswer]


def join_bodies(bodies: Sequence[tuple[str, bytes]]) -> bytes:
    """Encode batches, each with the key of its session (empty: none)."""
    return msgspec.msgpack.encode(bodies)


def split_bodies(raw: bytes) -> list[tuple[str, bytes]]:
    """Inverse of `join_bodies`.

    Raises:
        WireError: not such an array, or of too many.
    """
    try:
        return msgspec.msgpack.decode(raw, type=_Bodies)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise WireError("body", str(e)) from e
