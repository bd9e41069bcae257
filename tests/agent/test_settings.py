"""Settings: one table; what cannot work is refused with variable, value, rule and remedy."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from fp8watch_agent.settings import VARIABLES, AgentSettings


def test_without_variables_the_defaults_hold() -> None:
    got = AgentSettings.from_environ({"HOME": "/home/me"})
    assert got.collector is None
    assert (got.every, got.recipe, got.disabled, got.run) == (1, None, "", None)
    assert got.spool_dir == Path("/home/me/.local/state/fp8watch")
    assert AgentSettings.from_environ({"XDG_STATE_HOME": "/state"}).spool_dir == Path("/state/fp8watch")
    assert AgentSettings.from_environ({"XDG_STATE_HOME": "relative", "HOME": "/h"}).spool_dir.is_relative_to("/h")


def test_each_variable_fills_its_field(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("fp8w_x\n")
    environ = {
        "FP8WATCH_COLLECTOR": "https://collector.example/base/",
        "FP8WATCH_TOKEN_FILE": str(token),
        "FP8WATCH_RUN": "gpt-7b.003",
        "FP8WATCH_EVERY": "10",
        "FP8WATCH_RECIPE": "observe",
        "FP8WATCH_SPOOL_DIR": str(tmp_path),
        "FP8WATCH_DISABLED": "stats",
    }
    got = AgentSettings.from_environ(environ)
    assert got == AgentSettings(
        collector="https://collector.example/base",
        token_file=token,
        run="gpt-7b.003",
        every=10,
        recipe="observe",
        spool_dir=tmp_path,
        disabled="stats",
    )
    assert AgentSettings.from_environ({"FP8WATCH_TOKEN": " fp8w_x\n"}).token == "fp8w_x"
    assert AgentSettings.from_environ({"FP8WATCH_DISABLED": "0"}).disabled == ""
    assert AgentSettings.from_environ({"FP8WATCH_MERGE_STEPS": " 16 "}).merge_steps == 16


def test_the_table_names_existing_fields_once_each() -> None:
    names = [v.field for v in VARIABLES]
    assert len(set(names)) == len(names)
    assert set(names) <= {f.name for f in fields(AgentSettings)}


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("FP8WATCH_COLLECTOR", "localhost:8000", "http:// or https://"),
        ("FP8WATCH_COLLECTOR", "http://", "with a host"),
        ("FP8WATCH_COLLECTOR", "http://h:99999", "not a URL"),
        ("FP8WATCH_COLLECTOR", "http://h/?a=b", "query"),
        ("FP8WATCH_COLLECTOR", "http://me:hush@h", "password"),
        ("FP8WATCH_TOKEN", "two words", "printable ASCII"),
        ("FP8WATCH_TOKEN", "line\r\nX-Injected: hush", "printable ASCII"),
        ("FP8WATCH_TOKEN_FILE", "/nonexistent/token", "cannot be read"),
        ("FP8WATCH_RUN", "a/b", "slashes"),
        ("FP8WATCH_RUN", "..", "slashes"),
        ("FP8WATCH_RUN", "x" * 201, "200 characters"),
        ("FP8WATCH_EVERY", "0", "whole number from 1"),
        ("FP8WATCH_EVERY", "often", "whole number from 1"),
        ("FP8WATCH_EVERY", "1.5", "whole number from 1"),
        ("FP8WATCH_RECIPE", "fp4", "mxfp8, observe"),
        ("FP8WATCH_SPOOL_DIR", "relative/folder", "absolute"),
        ("FP8WATCH_DISABLED", "yes", "1 (everything) or stats"),
    ],
)
def test_what_cannot_work_is_refused(name: str, value: str, rule: str) -> None:
    with pytest.raises(ValueError, match=name) as e:
        AgentSettings.from_environ({name: value})
    assert rule in str(e.value)
    assert "; " in str(e.value), "a remedy follows"
    assert "hush" not in str(e.value), "secrets are not repeated"


def test_arguments_win_over_variables_and_obey_the_same_rules() -> None:
    environ = {"FP8WATCH_COLLECTOR": "http://a", "FP8WATCH_EVERY": "3"}
    got = AgentSettings.from_environ(environ, collector="http://b/", every=None)
    assert (got.collector, got.every) == ("http://b", 3)
    with pytest.raises(ValueError, match="every='0'"):
        AgentSettings.from_environ({}, every=0)
    with pytest.raises(ValueError, match=r"unknown setting; known are .*batch_bytes"):
        AgentSettings.from_environ({}, evry=3)
    with pytest.raises(ValueError, match="ring_bytes"):
        AgentSettings.from_environ({}, ring_bytes=1 << 30)


def test_token_and_token_file_together_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("x")
    with pytest.raises(ValueError, match="unset one of the two"):
        AgentSettings.from_environ({"FP8WATCH_TOKEN": "y", "FP8WATCH_TOKEN_FILE": str(tmp_path / "t")})
