"""Questions to a collector over HTTP, with the settings that the agent has.

Thread:     main
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
import urllib3

from fp8watch_agent.settings import AgentSettings, read_token_file

DEFAULT_COLLECTOR = "http://127.0.0.1:8420"
MAX_ANSWER_BYTES = 64 << 20
TIMEOUT_S = 30.0


class NotAnswered(Exception):
    """No answer, or a refusal; the text says which, and what to do."""


class Unknown(NotAnswered):
    """The collector has no such thing."""


def add_arguments(parser: argparse.ArgumentParser, *, json: bool = True) -> None:
    """--collector, and --json."""
    parser.add_argument(
        "--collector", metavar="URL", help=f"the collector (FP8WATCH_COLLECTOR, else {DEFAULT_COLLECTOR})"
    )
    if json:
        parser.add_argument("--json", action="store_true", help="print the collector's own answer")


def segment(text: str) -> str:
    """An id as one segment of a path."""
    return quote(text, safe="")


class Asking:
    """GET requests to one collector."""

    def __init__(self, collector: str | None, timeout_s: float = TIMEOUT_S) -> None:
        """Take address and token from the argument and the environment.

        Raises:
            ValueError: a setting that cannot work, with rule and remedy.
        """
        settings = AgentSettings.from_environ(collector=collector)
        self.url = settings.collector or DEFAULT_COLLECTOR
        token = settings.token if settings.token_file is None else read_token_file(settings.token_file)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._timeout_s = timeout_s
        self._pool = urllib3.PoolManager(num_pools=1, retries=False)

    def close(self) -> None:
        """Close the connection."""
        self._pool.clear()

    def get(self, path: str, query: Mapping[str, Any] | None = None, accept: str = "application/json") -> bytes:
        """The body of an answer.

        Raises:
            NotAnswered: there was none, or it was a refusal. Unknown: it was a 404.
        """
        asked = {k: v for k, v in (query or {}).items() if v is not None}
        url = f"{self.url}{path}{'?' + urlencode(asked) if asked else ''}"
        headers = {**self._headers, "Accept": accept, "User-Agent": "fp8watch"}
        try:
            answer = self._pool.request(
                "GET",
                url,
                headers=headers,
                redirect=False,
                retries=False,
                preload_content=False,
                timeout=self._timeout_s,
            )
            body = answer.read(MAX_ANSWER_BYTES + 1)
            answer.release_conn()
        except (urllib3.exceptions.HTTPError, OSError) as e:
            raise NotAnswered(
                f"{self.url} was not reached ({e}); start `fp8watch serve`, or name another: --collector, FP8WATCH_COLLECTOR"
            ) from e
        if len(body) > MAX_ANSWER_BYTES:
            raise NotAnswered(f"{self.url}{path}: an answer above {MAX_ANSWER_BYTES >> 20} MiB; ask for less")
        if answer.status == 200:
            return bytes(body)
        raise _refusal(self.url, path, answer.status, bytes(body))

    def json(self, path: str, query: Mapping[str, Any] | None = None) -> Any:
        """A JSON answer."""
        try:
            return msgspec.json.decode(self.get(path, query))
        except msgspec.DecodeError as e:
            raise NotAnswered(f"{self.url}{path}: no JSON ({e}); is that a collector of fp8watch?") from e

    def listed(self, path: str, query: Mapping[str, Any] | None = None, at_most: int = 100) -> list[dict[str, Any]]:
        """Items of a list, over its pages."""
        out: list[dict[str, Any]] = []
        for page in self._pages(path, dict(query or {}), at_most):
            out += page
        return out[:at_most]

    def _pages(self, path: str, query: dict[str, Any], at_most: int) -> Iterator[list[dict[str, Any]]]:
        num, cursor = 0, None
        while num < at_most:
            found = self.json(path, {**query, "limit": min(1000, at_most - num), "cursor": cursor})
            yield found["items"]
            num, cursor = num + len(found["items"]), found["next"]
            if cursor is None:
                return


def _refusal(url: str, path: str, status: int, body: bytes) -> NotAnswered:
    try:
        problem = msgspec.json.decode(body)
        said = "; ".join(str(problem[k]) for k in ("detail", "rule", "remedy") if problem.get(k))
    except (msgspec.DecodeError, AttributeError, TypeError):
        said = ""
    if status == 404:
        return Unknown(said or f"{url}{path}: not found")
    if status in (401, 403):
        return NotAnswered(
            f"{url} refuses ({status}): {said or 'a token of scope read is needed'}; put it into FP8WATCH_TOKEN"
        )
    return NotAnswered(f"{url}{path} answered {status}{': ' + said if said else ''}")
