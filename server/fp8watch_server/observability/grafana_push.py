"""Pushes the shipped dashboards into a Grafana: one folder, five dashboards, overwriting earlier versions.

Shapes:     JSON files -> one line of text for each dashboard
Thread:     main

Uses grafana-client, imported late: it brings urllib3-future, which replaces urllib3 in the whole environment. Nothing
else of the collector or of the agent is imported here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

POSTGRES_UID, PROMETHEUS_UID = "fp8watch-postgres", "fp8watch-prometheus"
FOLDER_UID = "fp8watch"
TIMEOUT_S = 20.0
_HERE = Path(__file__).parent
_PLACES = (_HERE / "dashboards", _HERE.parents[2] / "dashboards" / "grafana" / "dashboards")
"""Dashboards of an installation, and of a checkout."""


class PushError(RuntimeError):
    """Why the push failed: value, rule, remedy."""


class Api(Protocol):
    """The part of grafana_client.GrafanaApi that is used."""

    datasource: Any
    folder: Any
    dashboard: Any


@dataclass(frozen=True)
class Target:
    """Destination: folder and data source names."""

    url: str
    token: str
    folder: str = "fp8watch"
    postgres_uid: str = POSTGRES_UID
    prometheus_uid: str = PROMETHEUS_UID


def dashboards(folder: Path | None = None) -> dict[str, dict[str, Any]]:
    """Dashboards by uid.

    Raises:
        PushError: a folder without dashboards.
    """
    for place in (folder,) if folder is not None else _PLACES:
        if found := {p.stem: json.loads(p.read_text(encoding="utf-8")) for p in sorted(place.glob("*.json"))}:
            return found
    raise PushError(
        f"folder {str(folder or _PLACES[0])!r} holds no dashboards (*.json); name another with --dashboards"
    )


def connect(target: Target) -> Api:
    """Create a grafana-client.

    Raises:
        PushError: a URL that is none, no token, or no grafana-client.
    """
    parts = urlsplit(target.url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise PushError(f"URL {target.url[:200]!r} is not an address of a Grafana; write https://grafana.example.org")
    if parts.username or parts.password or parts.query:
        raise PushError("the URL of Grafana holds a user, a password or a query; give a token instead, in a file")
    if not target.token.strip() or not target.token.isascii():
        raise PushError("there is no token; make a service account with the role Editor in Grafana, and give its token")
    try:
        from grafana_client import GrafanaApi
    except ModuleNotFoundError as e:
        raise PushError(
            f"{e.name} is not here; pip install 'fp8watch[grafana]' into an environment of its own, "
            "never beside training: it replaces urllib3, through which agents send"
        ) from e
    made: Api = GrafanaApi.from_url(f"{target.url.rstrip('/')}/", credential=target.token.strip(), timeout=TIMEOUT_S)
    return made


def push(api: Api, target: Target, boards: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Push all dashboards, one line of output each; existing ones of the same uid are overwritten.

    Raises:
        PushError: Grafana refuses, or is none.
    """
    for uid in (target.postgres_uid, target.prometheus_uid):
        if _ask(target, f"data source {uid}", api.datasource.get_datasource_by_uid, uid, missing=True) is None:
            yield f"data source {uid} is not there yet: make it under this uid, or name another (--postgres-uid, --prometheus-uid)"
    if _ask(target, "folder", api.folder.get_folder, FOLDER_UID, missing=True) is None:
        _ask(target, "folder", api.folder.create_folder, target.folder, FOLDER_UID)
        yield f"folder {target.folder}: made"
    for uid, board in boards.items():
        body = {
            "dashboard": {**_with_sources(board, target), "id": None},
            "folderUid": FOLDER_UID,
            "message": "fp8watch grafana push",
            "overwrite": True,
        }
        answer = _ask(target, f"dashboard {uid}", api.dashboard.update_dashboard, body)
        yield f"{board['title']}: {target.url.rstrip('/')}/d/{answer.get('uid', uid)} (version {answer.get('version', '?')})"


def _with_sources(board: dict[str, Any], target: Target) -> dict[str, Any]:
    """The dashboard with other data source uids."""
    uids = {POSTGRES_UID: target.postgres_uid, PROMETHEUS_UID: target.prometheus_uid}

    def replaced(thing: Any) -> Any:
        if isinstance(thing, dict):
            return {k: uids.get(v, v) if k == "uid" and isinstance(v, str) else replaced(v) for k, v in thing.items()}
        return [replaced(v) for v in thing] if isinstance(thing, list) else thing

    changed: dict[str, Any] = {k: v if k == "uid" else replaced(v) for k, v in board.items()}
    return changed


def _ask(target: Target, what: str, call: Any, *given: Any, missing: bool = False) -> Any:
    """Call the client; None when `missing` and not found. Its exceptions become PushErrors."""
    try:
        answer = call(*given)
    except Exception as e:
        status = getattr(e, "status_code", None)
        if status == 404 and missing and isinstance(getattr(e, "response", None), dict):
            return None
        raise PushError(_explained(target, what, status, e)) from e
    if not isinstance(answer, dict):
        raise PushError(f"{target.url} answers with something else than JSON: is it a Grafana, with its path?")
    return answer


def _explained(target: Target, what: str, status: int | None, e: Exception) -> str:
    said = " ".join(str(getattr(e, "message", None) or e).replace(target.token.strip(), "…").split())[:300]
    if not status:
        return f"{what}: no answer from {target.url} ({type(e).__name__}: {said}); is the address right, and is Grafana up?"
    if status == 401:
        return f"{what}: Grafana refuses the token (401); make a new one for a service account with the role Editor"
    if status == 403:
        return f"{what}: the token may not do that (403: {said}); its service account needs the role Editor"
    if status == 404:
        return f"{what}: {target.url} has no such address (404); give Grafana's root URL, with its path if it has one"
    return f"{what}: Grafana says {status}: {said}"
