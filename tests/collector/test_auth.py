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
from collector.kit import Agent, Recorder, make_site, served
from starlette.routing import Route

from fp8watch_server.app import create_app
from fp8watch_server.auth import tokens as auth
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import make_engine, writing
from fp8watch_server.settings import Settings

TOKEN = "fp8w_" + "a" * 40
IDENTITIES = {  # who asks -> scopes of the token that they send, None: nothing that counts
    "nobody": None,
    "a wrong token": None,
    "a revoked token": None,
    "bearer without a token": None,
    "basic that is not base64": None,
    "another scheme": None,
    "an agent": {"ingest"},
    "a reader": {"read"},
    "an admin": {"admin"},
    "agent and reader": {"ingest", "read"},
    "the token of the settings": {"ingest", "read", "admin"},
    "the same as a password": {"ingest", "read", "admin"},
}

# method and path -> the scope it needs; a new route without a line here fails the test
ROUTES = {
    "PUT /v1/runs/{run_id:path}": "ingest",
    "PUT /v1/runs/{run_id:path}/sessions/{session}": "ingest",
    "PUT /v1/runs/{run_id:path}/sites": "ingest",
    "POST /v1/batches": "ingest",
    "POST /v1/batches/joined": "ingest",
    "POST /v1/tile-maps": "ingest",
    "POST /v1/incidents/{incident_id}/comparison": "ingest",
    "POST /v1/incidents/{incident_id}/bisection": "ingest",
    "GET /api/v1/runs": "read",
    "GET /api/v1/runs/{run_id:path}": "read",
    "GET /api/v1/runs/{run_id:path}/sites": "read",
    "GET /api/v1/runs/{run_id:path}/series": "read",
    "GET /api/v1/runs/{run_id:path}/sessions": "read",
    "GET /api/v1/runs/{run_id:path}/scalars": "read",
    "GET /api/v1/runs/{run_id:path}/flight": "read",
    "GET /api/v1/runs/{run_id:path}/top": "read",
    "GET /api/v1/runs/{run_id:path}/heatmap": "read",
    "GET /api/v1/runs/{run_id:path}/incidents": "read",
    "GET /api/v1/runs/{run_id:path}/checkpoints": "read",
    "GET /api/v1/incidents/{incident_id}/fix": "read",
    "GET /api/v1/runs/{run_id:path}/sites/{site}/histogram": "read",
    "GET /api/v1/runs/{run_id:path}/sites/{site}/tile-map": "read",
    "GET /api/v1/compare": "read",
    "GET /api/v1/incidents": "read",
    "GET /api/v1/incidents/{incident_id}": "read",
    "POST /api/v1/incidents/{incident_id}/ack": "admin",
    "POST /api/v1/incidents/{incident_id}/resolve": "admin",
    "POST /api/v1/incidents/{incident_id}/seen": "admin",
    "POST /api/v1/incidents/{incident_id}/fixed": "admin",
    "POST /api/v1/incidents/{incident_id}/false-alarm": "admin",
    "POST /api/v1/incidents/{incident_id}/assign": "admin",
    "POST /api/v1/incidents/{incident_id}/comment": "admin",
    "POST /api/v1/causes/{cause_id}/assign": "admin",
    "POST /api/v1/causes/{cause_id}/{action}": "admin",
    "PATCH /api/v1/runs/{run_id:path}": "admin",
    "DELETE /api/v1/runs/{run_id:path}": "admin",
    "GET /api/v1/notifications": "read",
    "GET /api/v1/silences": "read",
    "POST /api/v1/silences": "admin",
    "DELETE /api/v1/silences/{silence_id}": "admin",
    "GET /": "read",
    "GET /live": "read",
    "GET /compare": "read",
    "GET /incidents/{incident_id}/report.html": "read",
    "GET /runs/{run_id:path}": "read",
    "GET /runs/{run_id:path}/health.json": "read",
    "GET /runs/{run_id:path}/training.json": "read",
    "GET /runs/{run_id:path}/sites/{site}/charts.json": "read",
    "GET /runs/{run_id:path}/sites/{site}": "read",
    "GET /runs/{run_id:path}/sites/{site}/tile-map": "read",
    "GET /incidents/{incident_id}": "read",
    "GET /incidents": "read",
    "GET /incidents/{incident_id}/tiles.svg": "read",
    "GET /incidents/{incident_id}/flight": "read",
    "GET /incidents/{incident_id}/flight.svg": "read",
    "GET /runs/{run_id:path}/flight": "read",
    "GET /runbooks": "read",
    "GET /silences": "read",
    "GET /collector": "read",
    "GET /runbooks/{slug}": "read",
    "GET /assets/{name}": "read",
    "GET /static/{of}/{name}": "read",
    "GET /favicon.ico": "read",
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


def bearer(number: int) -> str:
    return f"fp8w_{number:043d}"


@pytest.fixture
def database_kind() -> str:
    return "sqlite"


@pytest.fixture
def app(settings: Any) -> Any:
    return make_app(settings)


def make_app(settings: Any) -> Any:
    settings = dataclasses.replace(settings, token=TOKEN, host="0.0.0.0")
    app = create_app(settings, detection=Recorder().detection(), dispatcher=lambda e, s: None)
    rows = [
        {"token_sha256": auth.token_sha256(bearer(i)), "name": name, "created_at": 1.0, "revoked_at": None}
        | {"scopes": ",".join(sorted(scopes or {"ingest", "read", "admin"}))}
        for i, (name, scopes) in enumerate(IDENTITIES.items())
        if scopes or name == "a revoked token"
    ]
    for row in rows:
        row["revoked_at"] = 2.0 if row["name"] == "a revoked token" else None
    with writing(app.state.engine) as conn:
        conn.execute(sa.insert(t.token), rows)
    return app


def authorization(identity: str) -> dict[str, str]:
    number = list(IDENTITIES).index(identity)
    value = {
        "nobody": None,
        "a wrong token": "Bearer fp8w_wrong-token-wrong-token",
        "bearer without a token": "Bearer",
        "basic that is not base64": "Basic !!!",
        "another scheme": f"Digest {TOKEN}",
        "the token of the settings": f"Bearer {TOKEN}",
        "the same as a password": "Basic " + base64.b64encode(f"anyone:{TOKEN}".encode()).decode(),
    }.get(identity, f"Bearer {bearer(number)}")
    return {} if value is None else {"Authorization": value}


def test_every_route_is_in_the_table(app: Any) -> None:
    assert set(all_routes(app.routes)) == set(ROUTES)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], int]:
    """The status that every identity gets on every route: one application for all of them."""
    made = make_app(Settings(database_url=f"sqlite:///{tmp_path_factory.mktemp('auth') / 'x.db'}"))
    made.state.live.close()  # its streams end at once
    found = {}
    with served(made) as url, httpx.Client(base_url=url, timeout=60) as client:
        for route in ROUTES:
            method, path = route.split(" ")
            for name in (
                "run_id:path",
                "session",
                "site",
                "incident_id",
                "cause_id",
                "action",
                "silence_id",
                "slug",
                "name",
                "of",
            ):
                path = path.replace(f"{{{name}}}", "1")
            for identity in IDENTITIES:
                for _ in range(5):  # 503: a busy disk; whoever may come in is asked to come again
                    answer = client.request(method, path, headers=authorization(identity))
                    if answer.status_code != 503:
                        break
                    time.sleep(1)
                found[route, identity] = answer.status_code
                if answer.status_code == 401:
                    assert answer.headers["www-authenticate"].startswith("Basic")
    made.state.ingest.stop()
    made.state.engine.dispose()
    return found


@pytest.mark.parametrize("identity", IDENTITIES)
def test_every_route_lets_in_who_has_its_scope(answers: dict[tuple[str, str], int], identity: str) -> None:
    scopes, wrong = IDENTITIES[identity], {}
    for route, needed in ROUTES.items():
        status = answers[route, identity]
        if needed is None:
            is_right = status == 200
        elif scopes is None:
            is_right = status == 401
        elif needed not in scopes:
            is_right = status == 403
        else:
            is_right = status < 500 and status not in (401, 403)
        if not is_right:
            wrong[route] = status
    assert wrong == {}


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


def test_a_collector_without_a_token_takes_that_of_another_from_nobody(
    settings: Any, client: httpx.Client, app: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(auth, "RELOAD_AFTER_S", 0.0)
    monkeypatch.setattr(auth, "READ_S", 5.0)  # a busy machine is waited for
    second = create_app(
        dataclasses.replace(settings, token=""), detection=Recorder().detection(), dispatcher=lambda e, s: None
    )
    assert "fp8watch token revoke settings" in caplog.text
    assert client.get("/api/v1/runs", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
    assert auth.read_tokens(second.state.engine).closed
    second.state.ingest.stop()
    second.state.engine.dispose()


def test_a_page_of_somebody_else_cannot_write(client: httpx.Client) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    foreign = client.post("/api/v1/incidents/x/ack", headers={**headers, "Origin": "https://evil.example"})
    own = client.post("/api/v1/incidents/x/ack", headers={**headers, "Origin": str(client.base_url).rstrip("/")})
    assert (foreign.status_code, own.status_code) == (403, 404)
    for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 404), ("none", 404)):
        answer = client.post("/api/v1/incidents/x/ack", headers={**headers, "Sec-Fetch-Site": site})
        assert answer.status_code == status, site
    for program, status in (("Mozilla/5.0 (X11; Linux x86_64) Safari/604.1", 403), ("curl/8.5.0", 404)):
        answer = client.post("/api/v1/incidents/x/ack", headers={**headers, "User-Agent": program})
        assert answer.status_code == status, program


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
        ({"host": "127.0.0.1", "public_url": "https://watch.example"}, True),
        ({"host": "127.0.0.1", "public_url": "http://localhost:8420"}, False),
        ({"host": "127.0.0.1", "public_url": "https://watch.example", "token": TOKEN}, False),
        ({"host": "127.0.0.1", "public_url": "https://watch.example", "insecure": True}, False),
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
    assert (changed.loopback or changed.insecure or bool(changed.token)) is not refused
    engine.dispose()


@pytest.fixture
def open_client(settings: Any) -> Iterator[httpx.Client]:
    """A collector on loopback without tokens."""
    settings = dataclasses.replace(settings, hosts=("box.example",), public_url="https://127.0.0.2:8443")
    made = create_app(settings, detection=Recorder().detection(), dispatcher=lambda e, s: None)
    with served(made) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client
    made.state.ingest.stop()
    made.state.engine.dispose()


OWN = ["localhost", "localhost:8420", "127.0.0.1:1", "[::1]", "[::1]:8420", "BOX.example", "127.0.0.2:8443"]
FOREIGN = ["evil.example", "evil.example:8420", "127.0.0.1.evil.example", "localhost.evil.example:80", "[::2]", "", "0"]


@pytest.mark.parametrize("host", OWN)
def test_without_tokens_a_collector_answers_to_its_own_names(open_client: httpx.Client, host: str) -> None:
    assert open_client.get("/api/v1/runs", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", FOREIGN)
def test_a_name_that_was_made_to_point_here_is_refused(open_client: httpx.Client, host: str) -> None:
    """DNS rebinding: a page of evil.example may let its name point to 127.0.0.1, and would read and write here."""
    for method, path in (("GET", "/api/v1/runs"), ("GET", "/"), ("POST", "/v1/batches"), ("PUT", "/v1/runs/r")):
        answer = open_client.request(method, path, headers={"Host": host})
        assert answer.status_code == 421, path
        assert "FP8WATCH_HOSTS" in answer.json()["remedy"]
    assert open_client.get("/healthz", headers={"Host": host}).status_code == 200


def test_with_tokens_any_name_will_do(client: httpx.Client) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}", "Host": "collector.example"}
    assert client.get("/api/v1/runs", headers=headers).status_code == 200


def test_names_from_outside_are_not_markup_and_not_lines(open_client: httpx.Client) -> None:
    hostile = "<script>alert(1)</script>"
    agent = Agent(open_client, run="run-<b>").register([make_site(hostile)], name=hostile)
    agent.send([make_site(hostile)], [1])
    for path in ("/", "/runs/run-%3Cb%3E", f"/runs/run-%3Cb%3E/sites/{make_site(hostile).id}"):
        answer = open_client.get(path)
        assert answer.status_code == 200
        assert hostile not in answer.text
        assert "script-src 'self';" in answer.headers["content-security-policy"]


def test_names_from_outside_do_not_turn_text_around(open_client: httpx.Client) -> None:
    spoofed = "txt\u202egnp.exe"
    agent = Agent(open_client, run="run-1").register([make_site(spoofed)], name=spoofed)
    agent.send([make_site(spoofed)], [1])
    for path in ("/", "/runs/run-1", f"/runs/run-1/sites/{make_site(spoofed).id}"):
        page = open_client.get(path).text
        assert "\u202e" not in page
        assert "txt\\u202egnp.exe" in page
