"""The table of settings: environment, files, command line, refusals, secrets."""

from __future__ import annotations

import os
from dataclasses import MISSING, fields
from pathlib import Path
from urllib.parse import unquote

import pytest

from fp8watch_server.auth import command as token
from fp8watch_server.cli import parser
from fp8watch_server.db import dialect, migrations
from fp8watch_server.settings import SETTINGS, SettingError, Settings
from fp8watch_server.store import command as store
from fp8watch_server.store.backup import backup

HOOK = "https://hooks.slack.com/services/T0/B0/secret"


def test_defaults_and_environment_and_command_line() -> None:
    assert (
        Settings.from_environ({"HOME": "/home/x"}).database_url == "sqlite:////home/x/.local/share/fp8watch/fp8watch.db"
    )
    assert Settings.from_environ({"XDG_DATA_HOME": "/d"}).database_url == "sqlite:////d/fp8watch/fp8watch.db"
    environ = {"FP8WATCH_PORT": "9000", "FP8WATCH_HOST": "localhost", "FP8WATCH_PUBLIC_URL": "https://x.example/"}
    got = Settings.from_environ(environ, port="0")
    assert (got.port, got.host, got.public_url) == (0, "localhost", "https://x.example")


@pytest.mark.parametrize(
    ("variable", "value", "word"),
    [
        ("FP8WATCH_PORT", "http", "whole number"),
        ("FP8WATCH_PORT", "-1", "whole number"),
        ("FP8WATCH_HOST", "http://x", "address"),
        ("FP8WATCH_PUBLIC_URL", "ftp://x", "http"),
        ("FP8WATCH_DATABASE_URL", "oracle://x/y", "sqlite"),
        ("FP8WATCH_TOKEN", "short", "16"),
        ("FP8WATCH_INSECURE", "maybe", "1 or 0"),
    ],
)
def test_a_bad_value_is_refused_with_variable_and_rule(variable: str, value: str, word: str) -> None:
    with pytest.raises(SettingError, match=variable) as e:
        Settings.from_environ({variable: value, "HOME": "/h"})
    assert word in str(e.value)
    assert ("short" in str(e.value)) is False


def test_a_secret_may_come_from_a_file_and_is_never_shown(tmp_path: Path) -> None:
    path = tmp_path / "hook"
    path.write_text(HOOK + "\n")
    got = Settings.from_environ({"HOME": "/h", "FP8WATCH_SLACK_WEBHOOK_URL_FILE": str(path)})
    assert got.slack_webhook_url == HOOK
    assert HOOK not in repr(got)
    assert "***" in repr(got)
    with pytest.raises(SettingError, match="both set"):
        Settings.from_environ({"FP8WATCH_TOKEN": "t" * 20, "FP8WATCH_TOKEN_FILE": str(path)})
    with pytest.raises(SettingError, match="cannot be read"):
        Settings.from_environ({"FP8WATCH_TOKEN_FILE": str(tmp_path / "none")})
    with pytest.raises(SettingError) as e:
        Settings.from_environ({"HOME": "/h", "FP8WATCH_SLACK_WEBHOOK_URL": "hooks.slack.com/services/secret"})
    assert "secret" not in str(e.value)


def test_unknown_settings_are_refused_with_the_known_ones() -> None:
    with pytest.raises(SettingError, match="database_url"):
        Settings.from_environ({}, prot="1")


def test_help_names_every_setting_and_takes_no_secret() -> None:
    text = parser().format_help()
    for s in SETTINGS:
        assert s.variable in text
        assert (f"--{s.name.replace('_', '-')}" in text) is not s.secret


def test_a_setting_is_a_field_and_nothing_else() -> None:
    assert [s.name for s in SETTINGS] == [f.name for f in fields(Settings)]
    for s, f in zip(SETTINGS, fields(Settings), strict=True):
        assert f.default is MISSING or s.default == f.default
        assert s.variable == f"FP8WATCH_{s.name.upper()}"


REFUSED = {
    "port": ["", "65536", "9" * 5000, "+5", "1.0", "1e3", "8_0", " 80", "٣"],
    "host": ["", "a b", "a/b", "me@b", "h\n", "h\u00a0"],
    "hosts": ["a b", "a*,b", "h:1/x"],
    "insecure": ["-0", "yes", "\ud800"],
    "token": ["a" * 15, "a" * 16 + "\n", "a" * 16 + "\x1c", "ä" * 16],
    "log_format": ["xml", "text ", "\ud800"],
    "log_level": ["loud"],
    "detail_hours": ["-1", "nan", "inf", "1e400", "many"],
    "keep_days": ["-0.1", "NaN"],
    "keep_steps": ["-1", "1.5", "1" * 19],
    "keep_bytes": ["1e9", "0x10"],
    "public_url": ["ftp://x", "http://"],
    "rules": ["/nowhere"],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in REFUSED.items() for text in texts])
def test_what_a_type_does_not_take_is_refused_with_its_rule(name: str, text: str) -> None:
    with pytest.raises(SettingError, match=r"must be .") as e:
        Settings.from_environ({"HOME": "/h"}, **{name: text})
    assert str(e.value).startswith(f"--{name.replace('_', '-')}=")


def test_what_a_type_takes_is_read() -> None:
    given = {"port": "007", "detail_hours": ".5", "keep_steps": "0", "hosts": "A.example, b", "log_level": "INFO"}
    got = Settings.from_environ({"HOME": "/h"}, **given, insecure="TRUE")
    assert (got.port, got.detail_hours, got.keep_steps, got.hosts) == (7, 0.5, 0, ("a.example", "b"))
    assert (got.log_level, got.insecure) == ("info", True)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("FP8WATCH_SHARDS", "a=postgresql+psycopg:/fp8watch:PW-x@db1/x"),
        ("FP8WATCH_DATABASE_URL", "postgresql+psycopg://fp8watch:PW-x@db1:port/x"),
        ("FP8WATCH_DATABASE_URL", "fp8watch:PW-x@db1/x"),
        ("FP8WATCH_QUEUE", "nats://user:PW-x@n1:4222,nats:n2:4222"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_without_its_password(variable: str, value: str) -> None:
    with pytest.raises(SettingError) as e:
        Settings.from_environ({variable: value, "HOME": "/home/x"})
    assert variable in str(e.value)
    assert "PW" not in str(e.value)


def test_where_the_collector_has_a_postgresql_of_its_own_no_command_makes_or_reads_another_database(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("FP8WATCH_DATABASE_URL", raising=False)
    monkeypatch.setenv("FP8WATCH_PG", "1")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv(
        "XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run"))
    )  # without one the package of pg_dump warns
    for main, argv in (
        (token.main, ["create", "agents"]),
        (store.migrate_main, []),
        (store.check_main, []),
        (store.prune_main, []),
        (store.backup_main, [str(tmp_path / "copy")]),
    ):
        assert main(argv) == 2, main
        assert str(tmp_path / "fp8watch" / "pg") in unquote(capsys.readouterr().err)
    assert list(tmp_path.rglob("*")) == []


def test_a_database_and_its_backup_are_for_their_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with dialect.engine_of(f"sqlite:///{tmp_path / 'x.db'}") as engine:
            migrations.upgrade(engine)
            backup(f"sqlite:///{tmp_path / 'x.db'}", tmp_path / "copy")
            modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    finally:
        os.umask(before)
    assert set(modes) >= {"x.db", "x.db-wal", "copy"}
    assert set(modes.values()) == {0o600}
