"""`fp8watch fix INCIDENT --for FRAMEWORK`: the fix of an incident as a file that the framework reads.

Thread:     its own process
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote, urlencode, urlsplit

import urllib3

from fp8watch_agent.settings import ADDRESS, read_token_file

TARGETS = ("megatron", "te-debug", "torchtitan", "torchao", "fp8watch")
MAX_BYTES = 4 << 20
TIMEOUT_S = 20


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(
        prog="fp8watch fix",
        description="Write the modules that an incident names into a file that keeps them in high precision: Megatron-LM's "
        "--te-precision-config-file, Transformer Engine's debug features, torchtitan's filter_fqns, torchao's "
        "module_filter_fn, or a recipe file of fp8watch. Exit status: 0, or 2 where it cannot be written.",
    )
    made.add_argument("incident", metavar="INCIDENT", help="its id, or the address of its page")
    made.add_argument("--for", dest="target", choices=TARGETS, required=True, help="who reads the file")
    made.add_argument("--module", action="append", metavar="NAME", help="these modules instead, as module or module.operand, "
                      "such as a bisection names; may be given again")  # fmt: skip
    made.add_argument("-o", "--output", metavar="FILE", help="where to write it (default: standard output)")
    made.add_argument("--collector", metavar="URL", help="of an id [FP8WATCH_COLLECTOR]; its token, of scope read: "
                      "[FP8WATCH_TOKEN or FP8WATCH_TOKEN_FILE]")  # fmt: skip
    return made


def address(incident: str, collector: str | None, *, secret: bool = False) -> tuple[str, str]:
    """Collector and id.

    Args:
        incident: id, or address of its page.
        collector: of an id.
        secret: a token of the environment goes with it, which is that collector's: the address of a page at another host
            stands for the id alone.

    Raises:
        ValueError: neither is known.
    """
    parts = urlsplit(incident)
    if parts.scheme in ("http", "https"):
        before, found, name = parts.path.rpartition("/incidents/")
        if not found or not name.strip("/"):
            raise ValueError(f"{incident!r}: must be the address of an incident's page, …/incidents/ID")
        if secret and collector and _origin(collector) != _origin(incident):
            return collector.rstrip("/"), name.strip("/")
        return f"{parts.scheme}://{parts.netloc}{before}", name.strip("/")
    if not collector:
        raise ValueError(
            "no collector: give the address of the incident's page, or --collector URL, or FP8WATCH_COLLECTOR"
        )
    if urlsplit(collector).scheme not in ("http", "https"):
        raise ValueError(f"collector={collector!r}: must be an http:// or https:// URL with a host; {ADDRESS}")
    return collector.rstrip("/"), incident


def elsewhere(incident: str, collector: str) -> str:
    """What a refusal ends with where the page is at another host than the collector that was asked."""
    parts = urlsplit(incident)
    if parts.scheme not in ("http", "https") or _origin(incident) == _origin(collector):
        return ""
    there = f"{parts.scheme}://{parts.netloc}"
    return f" (the token is for {collector} alone; if it is for the page's host too, set FP8WATCH_COLLECTOR={there})"


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def fetch(incident: str, target: str, modules: Sequence[str], collector: str | None) -> str:
    """The text of the file, as the collector writes it.

    Raises:
        ValueError: no collector, or it refuses; the message says why.
        OSError: it cannot be reached.
    """
    file = os.environ.get("FP8WATCH_TOKEN_FILE")
    token = os.environ.get("FP8WATCH_TOKEN") or (read_token_file(Path(file)) if file else None)
    base, name = address(incident, collector, secret=token is not None)
    query = urlencode([("for", target), *(("module", module) for module in modules)])
    url = f"{base}/api/v1/incidents/{quote(name, safe='')}/fix?{query}"
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        answer = urllib3.request(
            "GET", url, headers=headers, timeout=TIMEOUT_S, retries=False, redirect=False, preload_content=False
        )
        body = answer.read(MAX_BYTES, decode_content=True)
        answer.release_conn()
    except urllib3.exceptions.HTTPError as e:
        raise OSError(f"collector {base} was not reached: {e}") from e
    text = body.decode("utf-8", "replace")
    if answer.status != 200:
        raise ValueError(f"collector {base} answered {answer.status}: {_detail(text)}{elsewhere(incident, base)}")
    return text


def _detail(text: str) -> str:
    """What a problem document says; else the text."""
    try:
        said = json.loads(text)
        return f"{said['detail']}; {said['remedy']}"
    except (ValueError, KeyError, TypeError):
        return text[:500]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    args = parser().parse_args(None if argv is None else list(argv))
    collector = args.collector or os.environ.get("FP8WATCH_COLLECTOR")
    try:
        text = fetch(args.incident, args.target, args.module or [], collector)
        if args.output:
            Path(args.output).write_text(text, encoding="utf-8")
        else:
            sys.stdout.write(text)
    except BrokenPipeError:
        raise  # the reader has what it wanted, which fp8watch.cli knows
    except (ValueError, OSError) as e:
        sys.stderr.write(f"fp8watch fix: {e}\n")
        return 2
    return 0
