"""`fp8watch grafana push` against what Grafana's API promises.

Here through a client of a few lines that has grafana-client's calls and errors; the long test installs the real one
into an environment of its own, where it can replace urllib3 without harm.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from dashboards.grafana_contract import MAY_NOT, TOKEN, Grafana, grafana

from dashboards import boards
from dashboards.boards import ROOT
from fp8watch_server.observability import command
from fp8watch_server.observability.grafana_push import Api, Target, connect


@pytest.fixture
def there() -> Iterator[Grafana]:
    with grafana() as made:
        yield made
        assert made.wrong == []


class ClientError(Exception):
    """As grafana_client.client.GrafanaException."""

    def __init__(self, status_code: int, response: Any, message: str) -> None:
        self.status_code, self.response, self.message = status_code, response, message
        super().__init__(message)


def stand_in(target: Target) -> Api:
    """grafana-client's calls, over httpx."""

    def call(method: str, path: str, body: Any = None) -> Any:
        url = f"{target.url.rstrip('/')}/api{path}"
        answer = httpx.request(method, url, json=body, headers={"Authorization": f"Bearer {target.token}"})
        is_json = answer.headers["content-type"].startswith("application/json")
        said = answer.json() if is_json else answer.text
        if answer.status_code >= 400:
            raise ClientError(answer.status_code, said, f"Client Error {answer.status_code}: {said}")
        return said

    made: Any = SimpleNamespace(
        datasource=SimpleNamespace(get_datasource_by_uid=lambda uid: call("GET", f"/datasources/uid/{uid}")),
        folder=SimpleNamespace(
            get_folder=lambda uid: call("GET", f"/folders/{uid}"),
            create_folder=lambda title, uid: call("POST", "/folders", {"title": title, "uid": uid}),
        ),
        dashboard=SimpleNamespace(update_dashboard=lambda body: call("POST", "/dashboards/db", body)),
    )
    return made  # type: ignore[no-any-return]


def run(there: Grafana, *more: str, token: str = TOKEN, monkeypatch: pytest.MonkeyPatch, url: str | None = None) -> int:
    monkeypatch.setenv("FP8WATCH_GRAFANA_TOKEN", token)
    return command.main(["push", "--url", url or there.url, *more], connect=stand_in)


def test_all_dashboards_arrive_as_they_are_and_again(
    there: Grafana, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(there, monkeypatch=monkeypatch) == 0
    assert run(there, "--folder", "other", monkeypatch=monkeypatch) == 0
    assert there.folders == {"fp8watch": {"uid": "fp8watch", "title": "fp8watch", "id": 1}}
    for uid, board in boards.load().items():
        got = there.dashboards[uid]
        assert got["version"] == 2
        assert got["panels"] == board["panels"]
    out = capsys.readouterr().out
    assert f"{there.url}/d/fp8watch-run (version 2)" in out
    assert "not there yet" not in out


def test_data_sources_of_other_names(
    there: Grafana, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--postgres-uid", "pg-1", "--prometheus-uid", "grafanacloud-prom"]
    there.sources = {"pg-1": "grafana-postgresql-datasource"}
    assert run(there, *given, monkeypatch=monkeypatch) == 0
    assert "data source grafanacloud-prom is not there yet" in capsys.readouterr().out
    text = str(there.dashboards)
    assert "'uid': 'pg-1'" in text
    assert "fp8watch-postgres" not in text
    assert "fp8watch-prometheus" not in text
    assert set(there.dashboards) == set(boards.load()), "their own uids stay"


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"token": "wrong"}, "refuses the token (401); make a new one"),
        ({"token": MAY_NOT}, "needs the role Editor"),
        ({"path": ""}, "give Grafana's root URL"),
        ({"url": "http://127.0.0.1:9"}, "no answer from http://127.0.0.1:9"),
        ({"status": 500}, "Grafana says 500"),
        ({"status": 302}, "is it a Grafana"),
    ],
    ids=str,
)
def test_what_goes_wrong_is_said(
    there: Grafana, how: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there.status = how.get("status") if how.get("status") != 302 else None
    url = how.get("url") or (there.url.removesuffix("/g") if "path" in how else there.url)
    if how.get("status") == 302:  # a sign-in page, as proxies give it
        monkeypatch.setattr(there, "answer", lambda *_: (200, "<html>sign in</html>"))
    token = how.get("token", TOKEN)
    assert run(there, token=token, url=url, monkeypatch=monkeypatch) == 1
    err = capsys.readouterr().err
    assert says in err
    assert token not in err
    assert "Traceback" not in err
    assert there.dashboards == {}


@pytest.mark.parametrize(
    ("url", "token", "says"),
    [
        ("grafana.example.org", TOKEN, "write https://"),
        ("ftp://grafana.example.org", TOKEN, "write https://"),
        ("https://admin:secret@grafana.example.org", TOKEN, "give a token instead"),
        ("https://grafana.example.org", " ", "there is no token"),
    ],
)
def test_a_bad_url_or_no_token_is_refused_before_anything_is_sent(
    url: str, token: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FP8WATCH_GRAFANA_TOKEN", token)
    assert command.main(["push", "--url", url]) == 1
    err = capsys.readouterr().err
    assert says in err
    assert "secret" not in err


def test_usage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("FP8WATCH_GRAFANA_URL", raising=False)
    assert command.main(["push"]) == 2
    assert "--url" in capsys.readouterr().err
    assert command.main(["push", "--url", "https://g", "--token-file", str(tmp_path / "none")]) == 1
    assert "cannot be read" in capsys.readouterr().err
    (tmp_path / "token").write_text(TOKEN + "\n")
    assert (
        command.main(
            ["push", "--url", "https://g", "--token-file", str(tmp_path / "token"), "--dashboards", str(tmp_path)]
        )
        == 1
    )
    assert "holds no dashboards" in capsys.readouterr().err


def test_without_the_client_it_says_where_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grafana_client", None)
    with pytest.raises(Exception, match="environment of its own"):
        connect(Target("https://grafana.example.org", TOKEN))


@pytest.mark.heavy(9, "server/fp8watch_server/observability", "pyproject.toml")
def test_the_real_client_in_an_environment_of_its_own(there: Grafana, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    pip = [venv / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    done = subprocess.run([*pip, "grafana-client>=5"], capture_output=True, text=True)
    if done.returncode and ("No matching distribution" in done.stderr or "ConnectionError" in done.stderr):
        pytest.skip(f"no package registry reachable: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    code = "import sys; from fp8watch_server.observability.command import main; sys.exit(main(sys.argv[1:]))"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "server"), "FP8WATCH_GRAFANA_TOKEN": TOKEN}
    for name in [n for n in env if n.lower().endswith("_proxy")]:
        del env[name]

    def pushed(url: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [venv / "bin" / "python", "-c", code, "push", "--url", url]
        return subprocess.run(command, env={**env, **more}, capture_output=True, text=True, cwd=tmp_path)

    for _ in range(2):
        done = pushed(there.url + "/")
        assert done.returncode == 0, done.stderr
    assert {uid: b["version"] for uid, b in there.dashboards.items()} == dict.fromkeys(boards.load(), 2)
    for url, more, says in (
        (there.url, {"FP8WATCH_GRAFANA_TOKEN": "wrong"}, "refuses the token (401)"),
        (there.url, {"FP8WATCH_GRAFANA_TOKEN": MAY_NOT}, "needs the role Editor"),
        (there.url.removesuffix("/g"), {}, "give Grafana's root URL"),
        ("http://127.0.0.1:9", {}, "no answer from http://127.0.0.1:9"),
        ("http://no-such-host.invalid", {}, "no answer from http://no-such-host.invalid"),
    ):
        done = pushed(url, **more)
        assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
        assert says in done.stderr
