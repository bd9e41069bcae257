"""A message shows the flight recorder in characters; it never waits for it, and never fails for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from notify.receiver import Receiver
from pages import synthetic, travelling
from pages.collector import make_app, serving
from pages.travelling import BORN

from fp8watch_server.db.dialect import writing
from fp8watch_server.incidents.messages import contract_incident, queue
from fp8watch_server.notify import flight_text, outbox
from fp8watch_server.notify.channels.slack import SlackChannel
from fp8watch_server.notify.outbox import Dispatcher
from fp8watch_server.notify.safe_http import Target
from fp8watch_server.store import queries


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    app = make_app(tmp_path_factory.mktemp("flight"))
    with serving(app) as client:
        travelling.travelling_run(client, app.state.engine)
        synthetic.Run(client, "calm", "calm", sites=synthetic.make_sites(1)).register().send(range(30), fault=False)
        yield app.state.engine


def told(engine: Any, receiver: Receiver, kind: str = "firing", key: str = "") -> list[dict[str, Any]]:
    """The blocks of the message about the fault."""
    with writing(engine) as conn:
        incident = contract_incident(queries.incident(conn, travelling.ID) or {}, "https://watch.example")
        queue(conn, "default", incident, kind, time.time() - 5, key=key or kind)
    dispatcher = Dispatcher(engine, [SlackChannel(Target(receiver.url, from_operator=True))])
    before, until = len(receiver.got), time.monotonic() + 20
    while len(receiver.got) == before and time.monotonic() < until:
        dispatcher.deliver_one(dispatcher._channels[0])
        time.sleep(0.05)
    blocks: list[dict[str, Any]] = receiver.got[-1].body["blocks"]
    return blocks


def test_sites_that_stand_out_are_drawn_in_the_order_of_execution(
    engine: Any, receiver_of: Callable[..., Receiver]
) -> None:
    sections = [b["text"]["text"] for b in told(engine, receiver_of()) if b["type"] == "section" and "text" in b]
    (picture,) = [s for s in sections if s.startswith("*Flight recorder*")]
    head, *rows = picture.split("```")[1].strip("\n").split("\n")
    at = head.index("▼")
    assert f"step {BORN}" in head
    assert 2 < len(rows) <= flight_text.MAX_ROWS + 1
    assert "".join(row[0] for row in rows if row[0] in "↓↑") == "".join(
        sorted("".join(row[0] for row in rows if row[0] in "↓↑"), key="↓↑".index)
    )
    for row in rows[:-1]:
        assert row[at - 1] in "·?"
        assert row[at + (row[0] == "↑")] in flight_text.BARS
        assert row[at + travelling.LASTS] == "·"
    assert rows[-1].startswith("and ")


def test_a_message_never_fails_for_its_picture(
    engine: Any, receiver_of: Callable[..., Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> str:
        raise MemoryError

    monkeypatch.setattr(outbox, "flight_text", broken)
    blocks = told(engine, receiver_of(), key="again")
    assert blocks[0]["type"] == "header"
    assert "Flight recorder" not in str(blocks)


def test_nothing_is_drawn_where_nothing_stands_out_or_all_would_take_long(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine.connect() as conn:
        assert flight_text.flight_text(conn, {"run_id": "calm", "first_step": 20}) == ""
        assert flight_text.flight_text(conn, {"run_id": "gone", "first_step": 20}) == ""
        monkeypatch.setattr(flight_text, "MAX_RECORDS", 100)
        assert flight_text.flight_text(conn, {"run_id": "travel", "first_step": BORN}) == ""
