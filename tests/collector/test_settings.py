"""The table of settings: environment, files, command line, refusals, secrets."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8watch_server.cli import parser
from fp8watch_server.settings import SETTINGS, SettingError, Settings

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
