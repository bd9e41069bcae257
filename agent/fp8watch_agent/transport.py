"""HTTP client of the collector: one keep-alive connection, bounded responses, and a verdict for each status.

Upstream:   fp8watch_agent.uploader
Downstream: fp8watch_server.ingest.routes (HTTP), fp8watch_agent.relay (HTTP)
Thread:     sender; never the one that trains

urllib3 does no retries and follows no redirects here: the sender decides, because only it knows what is idempotent.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import urllib3

from fp8watch_agent.settings import read_token_file

MAX_ANSWER_BYTES = 64 << 10
MAX_RETRY_AFTER_S = 3600.0
SESSION_KEY = "Fp8watch-Session-Key"
COLLECTORS_ERRORS = frozenset({"key-reused", "refused"})
"""Errors of bodies that are refused for good, where no rule is given: by a relay, or in the answer to joined bodies."""


class ResponseMeaning(Enum):
    """What a response means for the body that was sent."""

    ACKNOWLEDGED = "acknowledged"
    REFUSED = "refused"  # this body will never be accepted: count it, go on with the next
    SPLIT = "split"  # too large
    REGISTER = "register"  # the collector does not know the run, the session or a site
    RETRY = "retry"  # retry later
    HOLD = "hold"  # nothing is accepted until a person changes something


@dataclass(frozen=True)
class Answer:
    """A response; status 0 when there was none."""

    status: int
    body: bytes = b""
    retry_after_s: float | None = None
    error: str = ""

    def __str__(self) -> str:
        if not self.status:
            return self.error
        text = self.body[:200].decode("utf-8", "replace").replace("\n", " ")
        return f"HTTP {self.status} {text}".rstrip()


class Capture(msgspec.Struct):
    """A wish for full tile maps of a site."""

    site: int
    steps: tuple[int, int]


class Ack(msgspec.Struct):
    """Body of a 200. Unknown keys of newer collectors are ignored."""

    acked: int
    captures: list[Capture] | None = None


class Refusal(msgspec.Struct):
    """Body of a refusal: what of it says that it is a collector's."""

    rule: str = ""
    error: str = ""


def judge(answer: Answer) -> ResponseMeaning:
    """Verdict on a response. A 200 is trusted only when it also names the seq: see `read_ack`. A body is given up only
    where a collector says so: a proxy that is spoken to in the wrong way refuses everything.
    """
    meaning = meaning_of(answer.status)
    return ResponseMeaning.HOLD if meaning is ResponseMeaning.REFUSED and not _by_collector(answer) else meaning


def _by_collector(answer: Answer) -> bool:
    try:
        refusal = msgspec.json.decode(answer.body, type=Refusal)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return False
    return bool(refusal.rule) or refusal.error in COLLECTORS_ERRORS


def meaning_of(status: int) -> ResponseMeaning:
    """What a status means where it is the collector's."""
    if status == 0 or status in (408, 425, 429) or status >= 500:
        return ResponseMeaning.RETRY
    if 200 <= status < 300:
        return ResponseMeaning.ACKNOWLEDGED
    if status in (400, 409, 415, 422):
        return ResponseMeaning.REFUSED
    if status == 413:
        return ResponseMeaning.SPLIT
    if status == 424:
        return ResponseMeaning.REGISTER
    return ResponseMeaning.HOLD  # 401, 403: token; 3xx, 404, 405: not a collector's URL


def read_ack(answer: Answer, seq: int) -> Ack | None:
    """The acknowledgement of `seq`, or None: some proxies answer 200 to everything."""
    try:
        ack = msgspec.json.decode(answer.body, type=Ack)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None
    return ack if ack.acked == seq else None


def _retry_after(value: str | None) -> float | None:
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (TypeError, ValueError, OverflowError):
            return None
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_S) if seconds == seconds else None


class Transport:
    """Requests to one collector."""

    def __init__(
        self, collector: str, token: str | None = None, token_file: Path | None = None, timeout_s: float = 10.0
    ) -> None:
        self._base = collector.rstrip("/")
        self._token = token
        self._token_file = token_file
        self._timeout_s = timeout_s
        self._pool = urllib3.PoolManager(num_pools=1, maxsize=1, retries=False)
        self.deadline: float | None = None  # time.monotonic(); no request lasts past it
        self.num_requests = 0
        self.reload_token()

    def reload_token(self) -> None:
        """Read the token file again: the token may have been rotated."""
        if self._token_file is not None:
            with contextlib.suppress(ValueError):
                self._token = read_token_file(self._token_file)

    def put(self, path: str, value: Any, key: str = "") -> Answer:
        """PUT JSON. `key`: of the session, if it has one."""
        return self._request("PUT", path, msgspec.json.encode(value), {"Content-Type": "application/json"}, key)

    def get(self, path: str) -> Answer:
        """GET; an answer beyond 64 KiB comes cut."""
        return self._request("GET", path, None, {"Accept": "application/json"}, "")

    def post(self, path: str, body: bytes, content_type: str, key: str = "") -> Answer:
        """POST a compressed body."""
        return self._request("POST", path, body, {"Content-Type": content_type, "Content-Encoding": "zstd"}, key)

    def post_joined(self, body: bytes, content_type: str) -> Answer:
        """POST several bodies that are compressed one by one."""
        return self._request("POST", "/v1/batches/joined", body, {"Content-Type": content_type}, "")

    def close(self) -> None:
        self._pool.clear()

    def _request(self, method: str, path: str, body: bytes | None, headers: dict[str, str], key: str) -> Answer:
        timeout_s = self._timeout_s
        if self.deadline is not None:
            timeout_s = min(timeout_s, self.deadline - time.monotonic())
            if timeout_s <= 0:
                return Answer(0, error="no time left")
        headers["User-Agent"] = "fp8watch-agent"
        if key:
            headers[SESSION_KEY] = key
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        self.num_requests += 1
        try:
            response = self._pool.request(
                method,
                self._base + path,
                body=body,
                headers=headers,
                redirect=False,
                retries=False,
                preload_content=False,
                decode_content=False,
                timeout=urllib3.Timeout(connect=timeout_s, read=timeout_s),
            )
            try:
                return self._read(response, time.monotonic() + timeout_s)
            finally:
                response.release_conn()
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as e:
            return Answer(0, error=f"{type(e).__name__}: {e}")

    def _read(self, response: urllib3.BaseHTTPResponse, until: float) -> Answer:
        """Read at most 64 KiB within one timeout: a trickling response must not block the sender for hours."""
        got = bytearray()
        while True:
            piece = response.read1(MAX_ANSWER_BYTES)
            if not piece:
                break
            got += piece
            if len(got) > MAX_ANSWER_BYTES or time.monotonic() > until:
                response.close()  # closing is cheaper than reading the rest
                break
        return Answer(response.status, bytes(got), _retry_after(response.headers.get("Retry-After")))
