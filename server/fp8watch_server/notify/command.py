"""`fp8watch notify test | check | log | retry`: channels tried out, a routes file checked, what became of messages.

Shapes:     argv -> exit status: 0 well, 1 refused or unreachable or wrong, 2 usage, or nothing to send to
Thread:     main

`test` uses the settings of the collector, the same code and the same message, and no database.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from sqlalchemy.exc import DBAPIError

from fp8watch_server.db.dialect import DatabaseUrlError, engine_of, writing
from fp8watch_server.incidents.payload import MessagePayload
from fp8watch_server.notify.channels import KINDS, channels_of
from fp8watch_server.notify.channels.base import Channel
from fp8watch_server.notify.log import STATES, delivery_log, retry
from fp8watch_server.notify.message import SEVERITIES
from fp8watch_server.notify.routes_file import MODES, RoutesError, load_routes
from fp8watch_server.notify.safe_http import Unreachable
from fp8watch_server.notify.service import routing_of
from fp8watch_server.settings import SETTINGS, SettingError, Settings
from fp8watch_server.settings.webhook_url import TargetError


def test_payload(public_url: str, now: float) -> MessagePayload:
    """A message that says that it is a test, with the fields of a real one."""
    identity = uuid.uuid4().hex
    base = public_url.rstrip("/")
    return {
        "incident": {
            "id": identity,
            "run_id": "test",
            "attempt": 1,
            "mode": "inf-laundering",
            "title": "Test message: Inf laundered to 448 in layers.1.mlp.down_proj input (fprop), tile (37, 5)",
            "severity": "info",
            "status": "open",
            "verdict": "fp8",
            "first_step": 100,
            "last_step": 100,
            "num_events": 1,
            "origin": True,
            "place": {
                "ranks": [0],
                "module": "layers.1.mlp.down_proj",
                "gemm": "fprop",
                "operand": "input",
                "direction": "rowwise",
                "tile": [37, 5],
                "element": [37, 700],
                "expert": None,
            },
            "num_sites": 1,
            "evidence": [
                {"field": "num_inf", "value": 1, "baseline": 0, "unit": "elements", "since_step": 100},
                {"field": "num_sentinel_tiles", "value": 1, "baseline": 0, "unit": "tiles", "since_step": 100},
            ],
            "cause": "This is a test sent by `fp8watch notify test`. Nothing is broken.",
            "fix": [{"kind": "code", "text": "Nothing to change: messages arrive."}],
            "alternatives": [],
            "opened_at": now,
            "resolved_at": None,
            "fingerprint": identity,
            "url": f"{base}/incidents/{identity}",
            "runbook_url": f"{base}/runbooks/inf-laundering",
        },
        "run": {"id": "test", "name": "test"},
        "note": "",
    }


def send_test(channels: Sequence[Channel], public_url: str) -> int:
    """Send to each channel, print a line each. Exit status."""
    payload, failed = test_payload(public_url, time.time()), 0
    for channel in channels:
        started = time.monotonic()
        try:
            answer = channel.send(payload, "firing", payload["incident"]["id"], time.time())
        except (TargetError, Unreachable) as e:
            print(f"{channel.name}: failed: {e}")
            failed += 1
            continue
        took = f"{1000 * (time.monotonic() - started):.0f} ms"
        if 200 <= answer.status < 300:
            print(f"{channel.name}: delivered to {channel.masked} in {took}")
        else:
            print(f"{channel.name}: refused by {channel.masked}: HTTP {answer.status} {answer.text}".rstrip())
            failed += 1
    return 1 if failed else 0


def check(path: Path, environ: Mapping[str, str], run: str | None, severity: str, mode: str) -> int:
    """Say what is in a routes file, or all that is wrong with it; and where one incident would go."""
    try:
        routing, warnings = load_routes(path, environ, channels_of(_channels_only(environ)))
    except RoutesError as e:
        for problem in e.problems:
            print(f"{path}: {problem}", file=sys.stderr)
        return 1
    except OSError as e:
        print(f"{path}: cannot be read ({e.strerror}); give the path of a routes file", file=sys.stderr)
        return 1
    for warning in warnings:
        print(f"{path}: warning: {warning}")
    for channel in routing.channels:
        limit = f"{channel.pace.max_per_hour} messages an hour" if channel.pace.max_per_hour else "no limit"
        print(f"{channel.name}: {channel.masked}, {limit}")
    print(f"{len(routing.routes)} routes")
    if run is not None:
        names = routing.channels_for(run, run, severity, mode)
        print(f"  {severity} {mode} of run {run} goes to: {', '.join(names) or 'nobody'}")
    print(f"{path}: ok")
    return 0


def _of_channels() -> set[str]:
    """The settings that configure channels."""
    return {setting for kind in KINDS.values() for setting in kind.settings.values()}


def _channels_only(environ: Mapping[str, str]) -> Settings:
    """The settings of the channels: a wrong database is not a routes file's fault."""
    wanted = {v for s in SETTINGS if s.name in _of_channels() for v in s.variables}
    return Settings.from_environ({k: v for k, v in environ.items() if k in wanted | {"HOME"}})


def show_log(database_url: str, options: argparse.Namespace) -> int:
    """One line for each notice, the newest first."""
    wanted = {"state": options.state, "channel": options.channel, "run_id": options.run, "limit": options.number}
    with engine_of(database_url, must_exist=True) as engine, engine.connect() as conn:
        entries = delivery_log(conn, **wanted)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(entries), indent=2).decode())
        return 0
    for e in entries:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(e["created_at"]))
        tries = f" after {e['num_attempts']} tries" if e["num_attempts"] > 1 else ""
        error = f": {e['last_error']}" if e["last_error"] and e["state"] != "sent" else ""
        line = f"{at}Z {e['id'][:8]} {e['channel'] or '(all)'} {e['kind']} {e['state']}{tries}{error} · {e['title']}"
        print("".join(c if c.isprintable() else " " for c in f"{line} · run {e['run_id']}"))
    if not entries:
        print("no messages" if options.state is None else f"no messages that are {options.state}")
    return 0


def send_again(database_url: str, options: argparse.Namespace) -> int:
    """Put dead letters back into the outbox, for the collector to send."""
    if not (options.id or options.channel or options.all):
        print(
            "fp8watch notify retry: name an id, --channel NAME, or --all; `fp8watch notify log --state dead` lists them"
        )
        return 2
    with engine_of(database_url, must_exist=True) as engine:
        with engine.connect() as conn:
            found = [e["id"] for e in delivery_log(conn, state="dead", limit=1000)]
        matching = [i for i in found if options.id and i.startswith(options.id)]
        if options.id and len(matching) != 1:
            print(f"fp8watch notify retry: {len(matching)} dead letters begin with {options.id!r}; it must be one")
            return 1
        with writing(engine) as conn:
            num = retry(conn, id=matching[0] if options.id else None, channel=options.channel)
    print(f"{num} messages are sent again")
    return 0


def main(argv: list[str], environ: Mapping[str, str] = os.environ) -> int:
    """Entry point of `fp8watch notify`."""
    options = _parser().parse_args(argv)
    try:
        if options.command == "check":
            return check(options.file, environ, options.run, options.severity, options.mode)
        settings = Settings.from_environ(environ, database_url=getattr(options, "database_url", None))
        if options.command == "log":
            return show_log(settings.database_url, options)
        if options.command == "retry":
            return send_again(settings.database_url, options)
        routing, _ = routing_of(settings, environ)
    except (SettingError, RoutesError, DatabaseUrlError) as e:
        print(f"fp8watch notify: {e}")
        return 2
    except DBAPIError as e:
        print(f"fp8watch notify: the database cannot be read ({str(e.orig).splitlines()[0]}); check --database-url")
        return 1
    channels = [c for c in routing.channels if options.channel in (None, c.name)]
    if not channels:
        known = [s.variable for s in SETTINGS if s.name in _of_channels() or s.name == "routes"]
        which = f"channel {options.channel!r}" if options.channel else "channel"
        there = f"; there are {', '.join(c.name for c in routing.channels)}" if routing.channels else ""
        print(f"fp8watch notify: no {which} is configured{there}; set {known[0]} (all variables: {', '.join(known)})")
        return 2
    return send_test(channels, settings.public_url)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fp8watch notify", description="Messages about incidents.")
    commands = parser.add_subparsers(dest="command", required=True)
    test = commands.add_parser("test", help="send a test message to every configured channel")
    test.add_argument("--channel", metavar="NAME", help="only this channel")
    checked = commands.add_parser("check", help="check a routes file")
    checked.add_argument("file", type=Path)
    checked.add_argument("--run", help="say where an incident of this run would go")
    checked.add_argument("--severity", choices=SEVERITIES, default="critical")
    checked.add_argument("--mode", choices=MODES, metavar="MODE", default="inf-laundering")
    log = commands.add_parser("log", help="what became of messages; --state dead for those that nobody got")
    log.add_argument("--state", choices=list(STATES))
    log.add_argument("--channel", metavar="NAME")
    log.add_argument("--run", metavar="ID")
    log.add_argument("-n", "--number", type=int, default=50, help="at most so many (50)")
    log.add_argument("--json", action="store_true")
    again = commands.add_parser("retry", help="send dead letters again")
    again.add_argument("id", nargs="?", help="of one, or how it begins")
    again.add_argument("--channel", metavar="NAME", help="all of a channel")
    again.add_argument("--all", action="store_true", help="all")
    for command in (log, again):
        command.add_argument("--database-url", metavar="URL")
    return parser
