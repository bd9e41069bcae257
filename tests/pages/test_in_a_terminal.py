"""Names from outside do not reach a terminal as commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fp8watch_agent.terminal import command
from fp8watch_agent.terminal.collector_client import Asking
from fp8watch_server.incidents import command as rules
from fp8watch_server.open import command as opening

HOSTILE = "x\x1b]0;gone\x07\x9b2J"


def test_where_two_runs_part(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = {"sentence": f"They part in {HOSTILE}", "facts": [], "not_looked_at": []}
    monkeypatch.setattr(Asking, "json", lambda *_: found)
    assert command.compare_main(["a", "b"]) == 0
    assert_plain(capsys.readouterr().out)


def test_false_alarms(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], database_url: str) -> None:
    row: dict[str, Any] = {"mode": "dead-layer", "name": HOSTILE, "run_id": "r", "first_step": 1, "evidence": []}
    monkeypatch.setattr(rules, "_rows", lambda *_: [{**row, "place": {"module": HOSTILE}}])
    assert rules.main(["false-alarms", "--database-url", database_url]) == 0
    assert_plain(capsys.readouterr().out)


def test_the_title_of_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "r.html"
    report.write_text(f'<meta name="generator" content="fp8watch 1"><title>a &lt; {HOSTILE}</title>')
    assert opening.main([str(report), "--no-browser"]) == 0
    out = capsys.readouterr().out
    assert "a < x" in out
    assert_plain(out)


def assert_plain(out: str) -> None:
    assert "]0;gone" in out
    assert all(c.isprintable() or c == "\n" for c in out)
