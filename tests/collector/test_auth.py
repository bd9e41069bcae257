"""Every route and every identity; and who may open the collector to others."""

from __future__ import annotations

import base64
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from collector.kit import Recorder, on_sqlite
from starlette.routing import Route

from fp8watch_server import auth
from fp8watch_server.app import create_app
from fp8watch_server.store import schema as t
from fp8watch_server.store.dialect import make_engine, writing

pytestmark = on_sqlite
TOKEN = "fp8w_" + "a" * 40
READER = "fp8w_" + "r" * 40

# method and path -> the scope it needs; a new route without a line here fails the test
ROUTES = {
    "PUT /v1/runs/{run_id:path}": "ingest",
    "PUT /v1/runs/{run_id:path}/sessions/{session}": "ingest",
    "PUT /v1/runs/{run_id:path}/sites": "ingest",
    "POST /v1/batches": "ingest",
    "POST /v1/tile-maps": "ingest",
    "GET /api/v1/runs": "read",
    "GET /api/v1/runs/{run_id:path}": "read",
    "GET /api/v1/runs/{run_id:path}/sites": "read",
    "GET /api/v1/runs/{run_id:path}/series": "read",
    "GET /api/v1/runs/{run_id:path}/scalars": "read",
    "GET /api/v1/runs/{run_id:path}/top": "read",
    "GET /api/v1/runs/{run_id:path}/heatmap": "read",
    "GET /api/v1/runs/{run_id:path}/incidents": "read",
    "GET /api/v1/runs/{run_id:path}/sites/{site}/histogram": "read",
    "GET /api/v1/runs/{run_id:path}/sites/{site}/tile-map": "read",
    "GET /api/v1/incidents": "read",
    "GET /api/v1/incidents/{incident_id}": "read",
    "POST /api/v1/incidents/{incident_id}/ack": "admin",
    "POST /api/v1/incidents/{incident_id}/resolve": "admin",
    "GET /api/v1/silences": "read",
    "POST /api/v1/silences": "admin",
    "DELETE /api/v1/silences/{silence_id}": "admin",
    "GET /metrics": "read",
    "GET /openapi.json": "read",
    "GET /healthz": None,
    "GET /readyz": None,
}


def all_routes(routes: Any, prefix: str = "") -> Iterator[str]:
    for route in routes:
        if isinstance(route, Route) or hasattr(route, "methods"):
            for method in sorted((route.methods or set()) - {"HEAD"}):
                yield f"{method} {prefix}{route.path}"
        elif hasattr(route, "original_router"):
            yield from all_routes(route.original_router.routes, prefix)


@pytest.fixture
def app(settings: Any) -> Any:
    settings = dataclasses.replace(settings, token=TOKEN, host="0.0.0.0")
    app = create_app(settings, detection=Recorder().detection(), dispatcher=lambda e, s: None, pages=False)
    row = {"token_sha256": auth.token_sha256(READER), "name": "reader", "scopes": "read", "created_at": time.time()}
    with writing(app.state.engine) as conn:
        conn.execute(sa.insert(t.token), [row])
    return app


def test_every_route_is_in_the_table(app: Any) -> None:
    assert set(all_routes(app.routes)) == set(ROUTES)


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_asks_for_its_scope(client: httpx.Client, route: str) -> None:
    method, path = route.split(" ")
    for name in ("run_id:path", "session", "site", "incident_id", "silence_id"):
        path = path.replace(f"{{{name}}}", "1")
    needed = ROUTES[route]

    def status(authorization: str | None) -> int:
        headers = {} if authorization is None else {"Authorization": authorization}
        return client.request(method, path, headers=headers).status_code

    basic = base64.b64encode(f"anyone:{TOKEN}".encode()).decode()
    if needed is None:
        assert status(None) == 200
        return
    for nobody in (None, "Bearer wrong-token-wrong-token", "Basic !!!", "Bearer", f"Digest {TOKEN}"):
        assert status(nobody) == 401, nobody
    assert (status(f"Bearer {READER}") == 403) == (needed != "read")
    assert status(f"Bearer {TOKEN}") not in (401, 403)
    assert status(f"Basic {basic}") not in (401, 403)


def test_a_token_is_kept_as_its_hash_only(app: Any, settings: Any) -> None:
    app.state.engine.dispose()
    files = list(Path(settings.database_url.removeprefix("sqlite:///")).parent.iterdir())
    assert files
    assert all(TOKEN.encode() not in path.read_bytes() for path in files)
    assert TOKEN not in repr(app.state.settings)


def test_a_revoked_token_is_refused_and_nothing_opens_when_the_last_one_goes(
    client: httpx.Client, app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    assert client.get("/api/v1/runs", headers=headers).status_code == 200
    with writing(app.state.engine) as conn:
        conn.execute(sa.update(t.token).values(revoked_at=time.time()))
    monkeypatch.setattr(auth, "RELOAD_AFTER_S", 0.0)
    assert client.get("/api/v1/runs", headers=headers).status_code == 401
    assert client.get("/api/v1/runs").status_code == 401


def test_a_page_of_somebody_else_cannot_write(client: httpx.Client) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    foreign = client.post("/api/v1/incidents/x/ack", headers={**headers, "Origin": "https://evil.example"})
    own = client.post("/api/v1/incidents/x/ack", headers={**headers, "Origin": str(client.base_url).rstrip("/")})
    assert (foreign.status_code, own.status_code) == (403, 404)


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"host": "127.0.0.1"}, False),
        ({"host": "localhost"}, False),
        ({"host": "::1"}, False),
        ({"host": "0.0.0.0"}, True),
        ({"host": "::"}, True),
        ({"host": "192.168.1.5"}, True),
        ({"host": "collector.example"}, True),
        ({"host": "0.0.0.0", "insecure": True}, False),
        ({"host": "0.0.0.0", "token": TOKEN}, False),
    ],
)
def test_beyond_loopback_a_token_is_needed(settings: Any, changes: dict[str, Any], refused: bool) -> None:
    changed = dataclasses.replace(settings, **changes)
    engine = make_engine(changed.database_url)
    auth.install_token(engine, changed)
    if refused:
        with pytest.raises(auth.Exposed, match="--insecure"):
            auth.check_exposure(engine, changed)
    else:
        auth.check_exposure(engine, changed)
    engine.dispose()
