"""Routes: which channels are told of which incidents.

Shapes:     outbox payload -> names of channels
Thread:     dispatcher; pure

Every route that matches adds its channels, in the order of the file, until one that says `stop`. A route matches on all
that it names: a pattern of the run (its id or its name), a severity, a pattern of the mode. Without any route
everything goes to every channel.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fp8watch_server.notify.channels.base import Channel


@dataclass(frozen=True)
class Route:
    """One route. An empty field matches everything."""

    channels: tuple[str, ...]
    runs: tuple[str, ...] = ()
    severities: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()
    stop: bool = False

    def matches(self, run_id: str, run_name: str, severity: str, mode: str) -> bool:
        """Whether an incident takes this route."""
        return (
            _any(self.runs, run_id, run_name)
            and (not self.severities or severity in self.severities)
            and _any(self.modes, mode)
        )


def _any(patterns: Sequence[str], *names: str) -> bool:
    return not patterns or any(fnmatch.fnmatchcase(name, p) for p in patterns for name in names)


@dataclass(frozen=True)
class Routing:
    """The channels of a collector, and the routes to them."""

    channels: tuple[Channel, ...] = ()
    routes: tuple[Route, ...] = ()
    stalled_after_s: float = 0.0
    """Silence of a run after which it is told as stalled; 0: never."""

    def channels_for(self, run_id: str, run_name: str, severity: str, mode: str) -> list[str]:
        """Names of channels, each once."""
        if not self.routes:
            return [c.name for c in self.channels]
        found: dict[str, None] = {}
        for route in self.routes:
            if route.matches(run_id, run_name, severity, mode):
                found |= dict.fromkeys(route.channels)
                if route.stop:
                    break
        return list(found)

    def route(self, payload: Mapping[str, Any]) -> list[str]:
        """Of an outbox payload. One that cannot be read goes everywhere: there it is seen to be broken."""
        incident, run = payload.get("incident"), payload.get("run")
        if not isinstance(incident, Mapping) or not isinstance(run, Mapping):
            return [c.name for c in self.channels]
        told = (run.get("id"), run.get("name"), incident.get("severity"), incident.get("mode"))
        return self.channels_for(*(str(word or "") for word in told))

    @property
    def secrets(self) -> tuple[str, ...]:
        """What no log may show."""
        return tuple(s for channel in self.channels for s in channel.secrets)
