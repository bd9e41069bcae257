"""`fp8watch replay` shows what would be raised, and changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from collector.kit import Agent, make_site

from fp8watch_server.db import schema as t
from fp8watch_server.pipeline.replay import main, replay

UP = make_site("up", order=0)


def test_a_stored_run_is_replayed_and_nothing_is_written(client: Any, app: Any) -> None:
    agent = Agent(client).register([UP])
    for step in range(8):
        agent.send([UP], [step], fields={"num_inf": int(step == 5)})
    with app.state.engine.connect() as conn:
        before = conn.execute(sa.select(sa.func.count()).select_from(t.incident)).scalar_one()
        got = replay(conn, "run-1")
        after = conn.execute(sa.select(sa.func.count()).select_from(t.incident)).scalar_one()
    assert [(i["mode"], i["first_step"]) for i in got.incidents] == [("inf-laundering", 5)]
    assert (got.num_batches, got.first_step) == (8, 0)
    assert before == after


def test_the_command_takes_a_rules_file(
    client: Any,
    app: Any,
    settings: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent = Agent(client).register([UP])
    agent.send([UP], [5], fields={"num_inf": 1})
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps({"defaults": {"disable": ["inf-laundering"]}}))
    url = settings.database_url
    assert main(["run-1", "--database-url", url]) == 0
    assert "inf-laundering" in capsys.readouterr().out
    assert main(["run-1", "--database-url", url, "--rules", str(rules)]) == 0
    assert "inf-laundering" not in capsys.readouterr().out
    monkeypatch.setenv("FP8WATCH_DATABASE_URL", url)
    assert main(["run-1"]) == 0
    assert "inf-laundering" in capsys.readouterr().out
    assert main(["nobody", "--database-url", url]) == 1
    assert "no stored batches" in capsys.readouterr().err


def test_a_database_that_is_away_is_said_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FP8WATCH_DATABASE_URL", "postgresql+psycopg://nobody@127.0.0.1:9/x")
    assert main(["run-1"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
