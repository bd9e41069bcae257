"""The JSON of registrations: what a run, a session and a site say of themselves, checked field by field.

Shapes:     JSON bytes -> msgspec structs; unknown keys of newer agents are ignored
Thread:     ingest pool
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

from fp8watch_agent.record import Site
from fp8watch_server.http.errors import Problem
from fp8watch_server.store.registrations import MAX_TAG_CHARS, MAX_TAGS, StoredSession

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
LongText = Annotated[str, msgspec.Meta(max_length=65536)]
"""A fact may list modules; the agent cuts its lists far below."""
Small = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 53) - 1)]
SiteId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 53) - 1)]


class RunBody(msgspec.Struct):
    """PUT /v1/runs/{run}."""

    name: Text = ""
    recipe: Text = ""
    backend: Text = ""
    world_size: Positive = 1
    tags: Annotated[
        list[Annotated[str, msgspec.Meta(max_length=MAX_TAG_CHARS)]], msgspec.Meta(max_length=MAX_TAGS)
    ] = []


class SessionBody(msgspec.Struct):
    """PUT /v1/runs/{run}/sessions/{session}."""

    rank: Small
    world_size: Positive = 1
    mesh: dict[Name, Small] = {}
    host: Text = ""
    pid: Size = 0
    started_at: float | None = None
    versions: dict[Name, Text] = {}
    recipe: Text = ""
    fingerprint: Text = ""
    backend: Text = ""
    facts: dict[Name, LongText | int | float | bool | None] = {}

    def as_facts(self, session: str) -> StoredSession:
        """As the store takes it."""
        return StoredSession(session=session, **{name: getattr(self, name) for name in self.__struct_fields__})


class SiteBody(msgspec.Struct):
    """One of the sites of PUT /v1/runs/{run}/sites."""

    id: SiteId
    module: Name
    operand: Name
    direction: Name
    gemm: Text
    order: Small
    shape: tuple[Size, Size]
    tile: tuple[Positive, Positive]
    format: Text
    power_2_scale: bool
    eps: Annotated[float, msgspec.Meta(ge=0)]
    recipe: Text = ""
    backend: Text = ""
    evidence: dict[Name, Text] = {}

    def as_site(self) -> Site:
        """As the agent knows it."""
        return Site(**{name: getattr(self, name) for name in self.__struct_fields__})


class SitesBody(msgspec.Struct):
    """PUT /v1/runs/{run}/sites."""

    session: Name
    sites: list[SiteBody]


Body = TypeVar("Body", RunBody, SessionBody, SitesBody)


def decode(raw: bytes, kind: type[Body]) -> Body:
    """Decode and check one registration.

    Raises:
        Problem: 400 for what is not JSON, 422 for a wrong value, with the path of the value.
    """
    try:
        value = msgspec.json.decode(raw, type=kind)
        _no_nul(msgspec.to_builtins(value), "$")
    except msgspec.ValidationError as e:
        raise Problem(
            422, f"{kind.__name__}: {e}", rule="every value has its type and range", remedy="correct it"
        ) from e
    except (msgspec.DecodeError, UnicodeError, RecursionError) as e:
        raise Problem(
            400,
            f"{kind.__name__}: not JSON ({e})",
            rule="the body is one JSON object",
            remedy="send valid JSON in UTF-8",
        ) from e
    return value


def _no_nul(value: Any, path: str) -> None:
    """PostgreSQL has no NUL in text, so nobody may send one."""
    if isinstance(value, str):
        if "\0" in value:
            raise msgspec.ValidationError(f"a NUL character - at `{path}`")
        value.encode()  # a lone surrogate is no text either
    elif isinstance(value, dict):
        for key, item in value.items():
            _no_nul(key, path)
            _no_nul(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for item in value:
            _no_nul(item, f"{path}[...]")


def check_name(what: str, value: str) -> str:
    """Check an identifier out of a URL.

    Raises:
        Problem: 422 with the rule.
    """
    if not 1 <= len(value) <= 512 or any(ord(c) < 32 or ord(c) == 127 or 0xD800 <= ord(c) < 0xE000 for c in value):
        raise Problem(
            422,
            f"{what} {value[:64]!r} of {len(value)} characters",
            rule="1 to 512 characters, none of them a control character",
            remedy=f"choose another {what}; FP8WATCH_RUN sets a run's",
        )
    return value
