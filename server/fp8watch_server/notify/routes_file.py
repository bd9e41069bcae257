"""Routes files: named channels and the routes to them, checked before they are used. `fp8watch notify check FILE`.

Upstream:   (a TOML or JSON file)            Downstream: fp8watch_server.notify.routes
Shapes:     text -> Routing
Thread:     start of the process

    [channels.oncall]
    kind = "slack"                       # slack | webhook | alertmanager | apprise
    url_file = "secrets/slack-oncall"    # beside this file; or url_env = "ONCALL_URL"
    max_per_hour = 30

    [[routes]]
    severities = ["critical"]
    channels = ["oncall"]

An address is a secret, so it is never written here: it is in a file, or in the environment. Unknown names, impossible
values and wrong units are refused, each with what would be right, and what has no effect is warned of.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fp8watch_server.detect.modes import SLUGS
from fp8watch_server.notify.apprise_channel import AppriseChannel
from fp8watch_server.notify.channels import AlertmanagerChannel, Channel, Pace, SlackChannel, WebhookChannel
from fp8watch_server.notify.fields import NAMES, Fields, near
from fp8watch_server.notify.message import SEVERITIES
from fp8watch_server.notify.routes import Route, Routing
from fp8watch_server.notify.safe_http import Target
from fp8watch_server.notify.stale_run import STALLED
from fp8watch_server.settings.webhook_url import TargetError
from fp8watch_server.store.queries import STALLED_AFTER_S

MAX_FILE_BYTES = 1 << 20
KINDS: dict[str, Any] = {
    "slack": SlackChannel,
    "webhook": WebhookChannel,
    "alertmanager": AlertmanagerChannel,
    "apprise": AppriseChannel,
}
MODES = (*SLUGS, STALLED)


class RoutesError(ValueError):
    """A routes file that cannot be used. `problems` holds every line of what is wrong with it."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


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
    raw = path.read_bytes()
    if len(raw) > MAX_FILE_BYTES:
        raise RoutesError([f"{path.name} of {len(raw)} bytes: at most {MAX_FILE_BYTES}; split it"])
    kind = "JSON" if path.suffix == ".json" else "TOML"
    try:
        text = raw.decode("utf-8")
        data = json.loads(text) if kind == "JSON" else _toml(text)
    except (ValueError, RecursionError) as e:
        if isinstance(e, RoutesError):
            raise
        raise RoutesError([f"{path.name}: not {kind} ({e}); correct it at that place"]) from e
    return check(data, path.parent, environ, known)


def _toml(text: str) -> Any:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ImportError:
            raise RoutesError(["TOML needs Python 3.11, or the package tomli: install it, or write JSON"]) from None
    return tomllib.loads(text)


def check(
    data: Any, folder: Path, environ: Mapping[str, str], known: Sequence[Channel] = ()
) -> tuple[Routing, list[str]]:
    """Check what a file holds. Raises RoutesError with every problem."""
    problems: list[str] = []
    if not isinstance(data, dict):
        raise RoutesError([f"{type(data).__name__} at the top: must be tables [channels.NAME] and [[routes]]"])
    top = Fields("", data, problems, ("channels", "routes", "stalled_after"))
    stalled_after_s = top.duration("stalled_after", 0.0, low=STALLED_AFTER_S, high=30 * 86_400.0)
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
    references = ("url_file", "url_env", "secret_file", "secret_env")
    paces = ("min_interval", "group_wait", "group_interval", "max_per_hour")
    fields = Fields(where, table, problems, ("kind", *references, *paces), hide=("url", "secret"))
    kind = fields.one_of("kind", tuple(KINDS))
    url = fields.secret("url", folder, environ, needed=True)
    secret = fields.secret("secret", folder, environ)
    if secret and kind in KINDS and kind != "webhook":
        problems.append(f'{where} secret: a {kind} channel signs nothing; take it out, or use kind = "webhook"')
    usual: Pace = KINDS[kind].pace if kind in KINDS else Pace()
    pace = Pace(
        min_interval_s=fields.duration("min_interval", usual.min_interval_s, high=3600.0),
        group_wait_s=fields.duration("group_wait", usual.group_wait_s, high=3600.0),
        group_interval_s=fields.duration("group_interval", usual.group_interval_s, high=86_400.0),
        max_per_hour=fields.whole("max_per_hour", usual.max_per_hour, high=3600),
    )
    if kind == "slack" and pace.min_interval_s < usual.min_interval_s:
        problems.append(f"{where} min_interval: Slack takes one message a second at most; give 1 s or more")
    if len(problems) > before:
        return None
    try:
        target = url if kind == "apprise" else Target(url, from_operator=True)
        made: Channel = KINDS[kind](target, name=name, pace=pace)
    except TargetError as e:
        problems.append(f"{where} url: {e}")
        return None
    return replace(made, secret=secret) if isinstance(made, WebhookChannel) else made


def _route(where: str, table: dict[str, Any], known: Sequence[str], problems: list[str]) -> Route:
    fields = Fields(where, table, problems, ("channels", "runs", "severities", "modes", "stop"))
    stop = fields.flag("stop")
    channels = fields.names("channels")
    if "channels" not in table or (not channels and not stop):
        problems.append(f"{where} channels: names whom to tell; to tell nobody, write channels = [] and stop = true")
    for name in channels:
        if name not in known:
            problems.append(
                f"{where} channels {name!r}: no such channel{near(name, known)}; write [channels.{name}] too"
            )
    severities = fields.names("severities")
    for name in severities:
        if name not in SEVERITIES:
            problems.append(
                f"{where} severities {name!r}: must be one of {', '.join(SEVERITIES)}{near(name, SEVERITIES)}"
            )
    modes = fields.names("modes")
    for name in modes:
        if not set(name) & set("*?[") and name not in MODES:
            problems.append(
                f"{where} modes {name!r}: no failure mode{near(name, MODES)}; a pattern such as nan-* is one too"
            )
    return Route(channels, fields.names("runs"), severities, modes, stop)


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
