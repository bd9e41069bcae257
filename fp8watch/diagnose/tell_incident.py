"""Attach what a diagnosis said to an incident, whose page then shows it.

Shapes:     plain values -> one POST     Thread:     the caller's
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import urllib3

from fp8watch_agent.fix_command import address, elsewhere
from fp8watch_agent.settings import read_token_file

TIMEOUT_S = 10


def tell_incident(
    kind: str, said: Mapping[str, Any], incident: str, collector: str | None = None, token: str | None = None
) -> None:
    """Send it.

    Args:
        kind: comparison or bisection.
        said: as `as_json` gives it.
        incident: its id, or the address of its page.
        collector: URL, for an id; else FP8WATCH_COLLECTOR. A token of the environment goes there, wherever the page is.
        token: with scope ingest; else FP8WATCH_TOKEN, or what is in FP8WATCH_TOKEN_FILE.

    Raises:
        ValueError: no collector is named.
        OSError: it cannot be reached, or refuses; the message says why.
    """
    file = os.environ.get("FP8WATCH_TOKEN_FILE")
    secret = token or os.environ.get("FP8WATCH_TOKEN") or (read_token_file(Path(file)) if file else None)
    of_environment = bool(secret) and not token
    url, name = address(incident, collector or os.environ.get("FP8WATCH_COLLECTOR"), secret=of_environment)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {secret}"} if secret else {})
    target = f"{url}/v1/incidents/{quote(name, safe='')}/{kind}"
    try:
        answer = urllib3.request(
            "POST", target, body=json.dumps(said), headers=headers, timeout=TIMEOUT_S, retries=False, redirect=False
        )
    except urllib3.exceptions.HTTPError as e:
        raise OSError(f"collector {url} was not reached: {e}") from e
    if answer.status not in (200, 201):
        why = answer.data[:500].decode("utf-8", "replace")
        raise OSError(f"collector {url} answered {answer.status}: {why}{elsewhere(incident, url)}")
