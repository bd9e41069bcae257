"""`fp8watch notify test`: sends one test message to every configured channel, and says what came back.

Upstream:   fp8watch_server.notify.channels    Downstream: fp8watch_server.notify.target
Shapes:     argv -> exit status: 0 all delivered, 1 something refused or unreachable, 2 nothing to send to
Thread:     main

It uses the settings of the collector, the same code and the same message, and no database.
"""

from __future__ import annotations

import argparse
import os
import time
import uuid
from collections.abc import Mapping
from typing import Any

from fp8watch_server.settings import SETTINGS, SettingError, Settings

from .channels import Channel, channels_of
from .target import TargetError, Unreachable


def test_payload(public_url: str, now: float) -> dict[str, Any]:
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


def send_test(channels: list[Channel], public_url: str) -> int:
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


def main(argv: list[str], environ: Mapping[str, str] = os.environ) -> int:
    """Entry point of `fp8watch notify`."""
    parser = argparse.ArgumentParser(prog="fp8watch notify", description="Messages about incidents.")
    commands = parser.add_subparsers(dest="command", required=True)
    test = commands.add_parser("test", help="send a test message to every configured channel")
    test.add_argument("--channel", choices=["slack", "webhook"], help="only this channel")
    options = parser.parse_args(argv)
    try:
        settings = Settings.from_environ(environ)
    except SettingError as e:
        print(f"fp8watch notify: {e}")
        return 2
    channels = [c for c in channels_of(settings) if options.channel in (None, c.name)]
    if not channels:
        known = [s.variable for s in SETTINGS if "webhook" in s.name]
        which = f"channel {options.channel!r}" if options.channel else "channel"
        print(f"fp8watch notify: no {which} is configured; set {known[0]} (all variables: {', '.join(known)})")
        return 2
    return send_test(channels, settings.public_url)
