"""Routes files: named channels and the routes to them, checked before they are used. `fp8watch notify check FILE`.

Shapes:     text -> Routing
Thread:     start of the process

    [channels.oncall]
    kind = "slack"                       # one of notify.channels
    url_file = "secrets/slack-oncall"    # beside this file; or url_env = "ONCALL_URL"
    max_per_hour = 30

    [[routes]]
    severities = ["critical"]
    channels = ["oncall"]

An address is a secret, so it is never written here: it is in a file, or in the environment. Unknown names, impossible
values and wrong units are refused, each with what would be right, and what has no effect is warned of.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fp8watch_agent.checks import near
from fp8watch_server.config.file import FileError, read_file
from fp8watch_server.detect.modes import SLUGS
from fp8watch_server.notify.channels import KINDS
from fp8watch_server.notify.channels.base import Channel, Kind, Pace
from fp8watch_server.notify.fields import Fields, Flag, duration, texts, whole
from fp8watch_server.notify.message import SEVERITIES
from fp8watch_server.notify.routes import Route, Routing
from fp8watch_server.notify.stale_run import STALLED
from fp8watch_server.settings.webhook_url import TargetError
from fp8watch_server.store.queries import STALLED_AFTER_S

MODES = (*SLUGS, STALLED)
NAMES = re.compile(r"[A-Za-z0-9_-]{1,40}")
PACE = ("min_interval", "group_wait", "group_interval", "max_per_hour")
SECRETS = tuple(dict.fromkeys(name for kind in KINDS.values() for name in kind.secrets))


class RoutesError(FileError):
    """A routes file that cannot be used. `problems` holds every line of what is wrong with it."""


def load_routes(
    path: Path, environ: Mapping[str, str] = os.environ, known: Sequence[Channel] = ()
) -> tuple[Routing, list[str]]:
    """Read and check a file.

    Args:
        environ: where `url_env` and `secret_env` are looked up.
        known: channels of the environment, which routes may name too.

    Returns:
        The routing, and warnings: settings without effect.

    Raises:
        RoutesError: every problem of the file, each with value, rule and remedy, and none with a secret.
        OSError: it cannot be read.
    """
    return check(read_file(path, RoutesError), path.parent, environ, known)


def check(
    data: Any, folder: Path, environ: Mapping[str, str], known: Sequence[Channel] = ()
) -> tuple[Routing, list[str]]:
    """Check what a file holds. Raises RoutesError with every problem."""
    problems: list[str] = []
    if not isinstance(data, dict):
        raise RoutesError([f"{type(data).__name__} at the top: must be tables [channels.NAME] and [[routes]]"])
    top = Fields("", data, problems, ("channels", "routes", "stalled_after"))
    stalled_after_s = top.get("stalled_after", duration(STALLED_AFTER_S, 30 * 86_400.0), 0.0)
    channels: dict[str, Channel] = {c.name: c for c in known}
    tables = top.table("channels", "tables, one a channel: [channels.oncall]")
    for name, table in tables.items():
        where = f"[channels.{name}]"
        if not NAMES.fullmatch(name):
            problems.append(f"{where}: a name has 1 to 40 of a-z, A-Z, 0-9, - and _; choose another")
        elif name in channels:
            problems.append(
                f"{where}: the environment has a channel {name} already; choose another name, or unset that"
            )
        elif not isinstance(table, dict):
            problems.append(f"{where} is no table; write kind and url_file below [channels.{name}]")
        elif (made := _channel(where, name, table, folder, environ, problems)) is not None:
            channels[name] = made
    named = (*channels, *(n for n in tables if n not in channels))  # one that is wrong is complained of once
    routes = []
    given = data.get("routes", [])
    if not isinstance(given, list):
        problems.append("routes: must be tables, each begun with [[routes]]")
        given = []
    for i, table in enumerate(given, 1):
        if isinstance(table, dict):
            routes.append(_route(f"[[routes]] {i}", table, named, problems))
        else:
            problems.append(f"[[routes]] {i} is no table; write channels below [[routes]]")
    if not channels and not problems:
        problems.append("no channel: a file of routes needs one at least, such as [channels.oncall]")
    if problems:
        raise RoutesError(problems)
    return Routing(tuple(channels.values()), tuple(routes), stalled_after_s), _without_effect(channels, routes)


def _channel(
    where: str, name: str, table: dict[str, Any], folder: Path, environ: Mapping[str, str], problems: list[str]
) -> Channel | None:
    before = len(problems)
    kind = KINDS.get(str(table.get("kind")))
    options = {} if kind is None else kind.options
    references = [f"{secret}_{source}" for secret in SECRETS for source in ("file", "env")]
    fields = Fields(where, table, problems, ("kind", *references, *PACE, *options), hide=SECRETS)
    fields.one_of("kind", tuple(KINDS))
    needed = "url" if kind is None else kind.secrets[0]
    given = {secret: fields.secret(secret, folder, environ, needed=secret == needed) for secret in SECRETS}
    pace = _pace(fields, Pace() if kind is None else kind.pace)
    given |= {option: fields.get(option, hint, default) for option, (hint, default) in options.items()}
    if kind is None:
        return None
    problems += [f"{where} {what}" for what in _not_of(kind, given, pace)]
    if len(problems) > before:
        return None
    try:
        return kind.make(**given, name=name, pace=pace)
    except TargetError as e:
        problems.append(f"{where} {needed}: {e}")
        return None


def _pace(fields: Fields, usual: Pace) -> Pace:
    return Pace(
        min_interval_s=fields.get("min_interval", duration(0, 3600), usual.min_interval_s),
        group_wait_s=fields.get("group_wait", duration(0, 3600), usual.group_wait_s),
        group_interval_s=fields.get("group_interval", duration(0, 86_400), usual.group_interval_s),
        max_per_hour=fields.get("max_per_hour", whole(3600, usual.max_per_hour), usual.max_per_hour),
    )


def _not_of(kind: Kind, given: dict[str, Any], pace: Pace) -> Iterator[str]:
    """What a table gives that its kind does not take; secrets of other kinds are taken out of `given`."""
    for secret in SECRETS:
        if secret not in kind.secrets and given.pop(secret):
            lacks = "signs nothing" if secret == "secret" else f"takes no {secret}"
            takers = " or ".join(f'"{k.name}"' for k in KINDS.values() if secret in k.secrets)
            yield f"{secret}: a {kind.name} channel {lacks}; take it out, or use kind = {takers}"
    if kind.too_fast and pace.min_interval_s < kind.pace.min_interval_s:
        yield f"min_interval: {kind.too_fast}"


def _route(where: str, table: dict[str, Any], known: Sequence[str], problems: list[str]) -> Route:
    fields = Fields(where, table, problems, ("channels", "runs", "severities", "modes", "stop"))
    stop = fields.get("stop", Flag, False)
    channels = fields.get("channels", texts("channels"), ())
    if "channels" not in table or (not channels and not stop):
        problems.append(f"{where} channels: names whom to tell; to tell nobody, write channels = [] and stop = true")
    for name in channels:
        if name not in known:
            problems.append(
                f"{where} channels {name!r}: no such channel{near(name, known)}; write [channels.{name}] too"
            )
    severities = fields.get("severities", texts("severities"), ())
    for name in severities:
        if name not in SEVERITIES:
            problems.append(
                f"{where} severities {name!r}: must be one of {', '.join(SEVERITIES)}{near(name, SEVERITIES)}"
            )
    modes = fields.get("modes", texts("modes"), ())
    for name in modes:
        if not set(name) & set("*?[") and name not in MODES:
            problems.append(
                f"{where} modes {name!r}: no failure mode{near(name, MODES)}; a pattern such as nan-* is one too"
            )
    return Route(channels, fields.get("runs", texts("runs"), ()), severities, modes, stop)


def _without_effect(channels: Mapping[str, Channel], routes: Sequence[Route]) -> list[str]:
    """What a file says and nothing comes of."""
    warnings = []
    if routes:
        reached = {name for route in routes for name in route.channels}
        warnings += [
            f"channel {name} is in no route: nothing is sent to it" for name in channels if name not in reached
        ]
    for i, route in enumerate(routes, 1):
        if route.stop and not (route.runs or route.severities or route.modes) and i < len(routes):
            warnings.append(f"[[routes]] {i} stops everything: those after it are never reached")
    if routes and not any("critical" in r.severities or not r.severities for r in routes if r.channels):
        warnings.append("no route leads anywhere for critical incidents: nobody is told of them")
    return warnings
