"""What every channel has: its pace, its target, and its entry in the registry of kinds.

Upstream:   fp8watch_server.notify.outbox
Downstream: fp8watch_server.notify.channels.slack
Shapes:     outbox payload -> one HTTP request
Thread:     dispatcher, one per channel
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from fp8watch_server.incidents.payload import MessagePayload
from fp8watch_server.notify.safe_http import Answer, Target


@dataclass(frozen=True)
class Pace:
    """How many messages a channel bears, and what goes together in one."""

    min_interval_s: float = 0.0
    """Least time between two messages of the channel."""
    group_wait_s: float = 0.3
    """How long the first notice of a run waits for others, to go with them in one message."""
    group_interval_s: float = 10.0
    """Least time between two messages about one run; a new critical incident does not wait for it."""
    max_per_hour: int = 0
    """Messages within an hour; what comes after is told in summaries. 0: any number."""


class Channel(Protocol):
    """Somewhere to send messages to."""

    @property
    def name(self) -> str:
        """As stored in outbox.channel; one per process."""
        ...

    @property
    def pace(self) -> Pace:
        """How many messages it bears."""
        ...

    @property
    def masked(self) -> str:
        """Where it goes, without the secret."""
        ...

    @property
    def secrets(self) -> tuple[str, ...]:
        """What no log and no error may show."""
        ...

    def send(self, payload: MessagePayload, kind: str, idempotency_key: str, now: float) -> Answer:
        """One attempt. Raises Unreachable or TargetError."""
        ...


@dataclass(frozen=True)
class Kind:
    """One kind of channel: what a routes file may say of it, and how it is made.

    Args:
        name: as `kind = "..."` of a routes file gives it.
        make: url, name, pace, further secrets and options -> Channel. Raises TargetError.
        pace: of a channel whose table says nothing of it.
        secrets: fields that are given as NAME_file or NAME_env; the first is needed.
        options: further fields of its table: type, with its bounds and a `Rule`, and default.
        settings: argument of `make` -> setting of the collector, where the environment can configure one.
        too_fast: what is said where `min_interval` is below the kind's own; "": it may be.
    """

    name: str
    make: Callable[..., Channel]
    pace: Pace
    secrets: tuple[str, ...] = ("url",)
    options: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    too_fast: str = ""


REGISTERED: list[Kind] = []
C = TypeVar("C", bound="type[Any]")


def channel(name: str, **described: Any) -> Callable[[C], C]:
    """Register a class of channels as a kind; `described` are the further fields of `Kind`."""

    def register(cls: C) -> C:
        REGISTERED.append(Kind(name, cls.of, cls.pace, **described))
        return cls

    return register


@dataclass(frozen=True)
class HttpChannel:
    """A channel that posts to one URL, which is a secret."""

    target: Target
    name: str
    pace: Pace = Pace()

    @classmethod
    def of(cls, url: str, **given: Any) -> Channel:
        """From what a routes file or the environment gives. Raises TargetError."""
        made: Channel = cls(Target(url, from_operator=True), **given)  # type: ignore[assignment]
        return made

    @property
    def masked(self) -> str:
        """Where it goes, without the secret."""
        return self.target.masked

    @property
    def secrets(self) -> tuple[str, ...]:
        """What no log and no error may show."""
        return (self.target.url,)

    def post(self, body: bytes, idempotency_key: str, headers: Mapping[str, str] = {}) -> Answer:
        """One attempt: JSON, under a key that tells a repetition from a new message."""
        own = {"Content-Type": "application/json", "Idempotency-Key": idempotency_key}
        return self.target.post(body, {**own, **headers})
