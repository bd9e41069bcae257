"""What a rules file says is in force: behind a restart of the collector, and for the end of an incident."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from collector.kit import Agent, make_site

from fp8watch_server.app import _detection
from fp8watch_server.db import schema as t
from fp8watch_server.detect.thresholds import Thresholds
from fp8watch_server.pipeline import detect_worker as worker_module
from fp8watch_server.pipeline.detect_worker import DetectWorker
from fp8watch_server.pipeline.replay import replay
from fp8watch_server.settings import Settings

UP = make_site("up", order=0)


class Collector:
    """Detection by rules, over a database that stays."""

    def __init__(self, app: Any, settings: Settings, folder: Path, **rules: Any) -> None:
        path = folder / "rules.json"
        path.write_text(json.dumps({"runs": {"run-*": rules}}))
        self._app, self._settings = app, replace(settings, rules=str(path))
        self.restart()

    def restart(self) -> None:
        self.worker = DetectWorker(self._app.state.engine, _detection(self._settings))

    def incidents(self) -> list[tuple[str, str]]:
        self.worker.drain()
        with self._app.state.engine.connect() as conn:
            rows = conn.execute(sa.select(t.incident.c.mode, t.incident.c.status))
            return [(row.mode, row.status) for row in rows]


def test_rules_are_in_force_behind_a_restart(
    client: Any, app: Any, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "SAVE_EVERY_BATCHES", 1)
    collector = Collector(app, settings, tmp_path, disable=["inf-laundering"])
    agent = Agent(client)
    agent.world_size = 1  # nobody is waited for
    agent.register([UP])
    for step in (4, 5):
        agent.send([UP], [step], fields={"num_inf": 1})
        assert collector.incidents() == []
        with app.state.engine.connect() as conn:
            assert conn.execute(sa.select(t.detect_state)).first() is not None
        collector.restart()


@pytest.mark.parametrize(("after", "last_step", "status"), [(3, 9, "resolved"), (30, 27, "open")])
def test_an_incident_ends_after_as_many_clean_steps_as_the_rules_say(
    client: Any, app: Any, settings: Settings, tmp_path: Path, after: int, last_step: int, status: str
) -> None:
    collector = Collector(app, settings, tmp_path, close_after_steps=after)
    agent = Agent(client)
    agent.world_size = 1  # nobody is waited for
    agent.register([UP])
    for step in range(5, last_step + 1):
        agent.send([UP], [step], fields={"num_inf": int(step == 5)})
    assert collector.incidents() == [("inf-laundering", status)]
    with app.state.engine.connect() as conn:
        [incident] = replay(conn, "run-1", Thresholds({"close_after_steps": after})).incidents
    assert incident["status"] == status
