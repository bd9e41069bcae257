"""A relay with several collectors turns to another one when one is away; a run that is refused holds back itself alone."""

from __future__ import annotations

import errno
import os
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from collector.fake_collector import FakeCollector
from collector.killing import SITES
from collector.kit import Agent
from support.agents import close_fails, taken_over

from fp8watch_agent import relay_express, relay_forward, relay_refused
from fp8watch_agent.batch import Kind, Parcel
from fp8watch_agent.relay import Relay
from fp8watch_agent.relay_collectors import read_collectors
from fp8watch_agent.relay_journal import POSITION, Full
from fp8watch_agent.relay_journals import Journals
from fp8watch_agent.relay_refused import Refused
from fp8watch_agent.settings import AgentSettings
from fp8watch_agent.transport import SESSION_KEY

NOWHERE = "http://127.0.0.1:9"
BROKEN = {"num_nan": 3}
MIB = 1 << 20


@pytest.fixture
def collectors() -> Iterator[list[FakeCollector]]:
    """Two on one database."""
    first = FakeCollector()
    made = [first, FakeCollector(first)]
    yield made
    for one in made:
        one.close()


@pytest.fixture
def relays() -> Iterator[Callable[..., Relay]]:
    made: list[Relay] = []

    def start(
        folder: Path, *urls: str, join_s: float = 0.0, max_bytes: int = 64 * MIB, request_timeout_s: float = 3.0
    ) -> Relay:
        settings = AgentSettings(spool_dir=folder, request_timeout_s=request_timeout_s)
        made.append(Relay(settings, urls, max_bytes=max_bytes, join_s=join_s, port=0))
        made[-1].start()
        return made[-1]

    yield start
    for relay in made:
        relay.stop(0)


@pytest.fixture
def client_of() -> Iterator[Callable[[Relay], httpx.Client]]:
    made: list[httpx.Client] = []

    def client(relay: Relay) -> httpx.Client:
        made.append(httpx.Client(base_url=relay.url, trust_env=False, headers={SESSION_KEY: "key"}))
        return made[-1]

    yield client
    for one in made:
        one.close()


@pytest.fixture
def agent_of(client_of: Callable[[Relay], httpx.Client]) -> Callable[..., Agent]:
    def agent(relay: Relay, run: str = "run-0", rank: int = 0) -> Agent:
        session = f"{run}{rank}".replace("-", "")
        return Agent(client_of(relay), run=run, session=session, rank=rank).register(SITES)

    return agent


def until(holds: Callable[[], Any], said: Callable[[], object], timeout_s: float = 20.0) -> float:
    """Seconds until something holds."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < timeout_s, said()
        time.sleep(0.005)
    return time.monotonic() - began


@pytest.mark.parametrize("way", ["away", "hangs", "503", "500"])
def test_a_broken_batch_goes_to_a_collector_that_answers(
    tmp_path: Path,
    collectors: list[FakeCollector],
    relays: Callable[..., Relay],
    agent_of: Callable[..., Agent],
    monkeypatch: pytest.MonkeyPatch,
    way: str,
) -> None:
    """Before a request ends by itself, whatever is wrong with the first one, and the healthy ones go there too; later the first
    is used again."""
    if way != "hangs":  # who refuses is not waited for
        monkeypatch.setattr(relay_express, "HEDGE_S", 60.0)
    first, second = collectors
    relay = relays(tmp_path, first.url, second.url, request_timeout_s=10.0)
    agent = agent_of(relay)
    agent.send(SITES, [1])
    until(lambda: first.of("run-0") == [1] and relay.health()["waiting"] == 0, relay.health)
    assert (first.num_posts, second.num_posts) == (1, 0)
    if way == "away":
        first.close()
    elif way == "hangs":
        first.hangs = True
    else:
        first.status = int(way)
    agent.send(SITES, [2], fields=BROKEN)
    until(lambda: 2 in first.of("run-0"), relay.health, 8.0)
    agent.send(SITES, [3])
    until(lambda: relay.health()["waiting"] == 0, relay.health, 40.0)
    assert first.of("run-0") == [1, 2, 3]
    until(lambda: relay.health()["away"].keys() == {first.url}, relay.health)
    if way == "away":
        first.open_again()
    first.status = 0
    first.go_on()
    until(lambda: not relay.health()["away"], relay.health)
    before = second.num_posts
    agent.send(SITES, [4])
    agent.send(SITES, [5], fields=BROKEN)
    until(lambda: relay.health()["waiting"] == 0, relay.health)
    assert second.num_posts == before
    assert first.of("run-0") == [1, 2, 3, 4, 5] or first.of("run-0") == [1, 2, 3, 5, 4]
    assert relay.health()["refused"] == 0


def test_who_refuses_a_broken_batch_is_not_waited_for(
    tmp_path: Path,
    collectors: list[FakeCollector],
    relays: Callable[..., Relay],
    agent_of: Callable[..., Agent],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay_express, "HEDGE_S", 60.0)
    first, second = collectors
    relay = relays(tmp_path, first.url, second.url, join_s=60.0)
    first.status = 503
    agent_of(relay).send(SITES, [1], fields=BROKEN)
    until(lambda: first.of("run-0") == [1], relay.health)
    assert second.num_posts == 1


def test_a_collector_that_is_slow_gets_smaller_requests(
    tmp_path: Path, collectors: list[FakeCollector], relays: Callable[..., Relay], agent_of: Callable[..., Agent]
) -> None:
    """One that would not answer a large one in time, and says that it is ready: it is not left, and not asked for the same again."""
    first, second = collectors
    relay = relays(tmp_path, first.url, second.url, join_s=1.0)
    agent = agent_of(relay)
    first.batch_s = second.batch_s = 0.3
    for step in range(1, 25):
        agent.send(SITES, [step])
    until(lambda: relay.health()["waiting"] == 0, relay.health, 60)
    assert first.of("run-0") == list(range(1, 25))
    assert not relay.health()["away"]


def test_what_one_collector_refuses_another_one_takes(
    tmp_path: Path, collectors: list[FakeCollector], relays: Callable[..., Relay], agent_of: Callable[..., Agent]
) -> None:
    """One that says it is ready, and whose way to a database is broken."""
    first, second = collectors
    relay = relays(tmp_path, first.url, second.url)
    first.refused["run-0"] = 503
    agent = agent_of(relay)
    for step in range(1, 6):
        agent.send(SITES, [step])
    until(lambda: relay.health()["waiting"] == 0, relay.health)
    assert second.of("run-0") == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("what", "status"), [("run-0", 503), ("run-0/0", 503), ("run-0", 429), ("run-0", 403)])
def test_while_a_run_is_refused_the_others_go_on(
    tmp_path: Path,
    collectors: list[FakeCollector],
    relays: Callable[..., Relay],
    agent_of: Callable[..., Agent],
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    status: int,
) -> None:
    """Nothing of another rank waits behind it, broken batches neither, and of the rank itself none overtakes another."""
    monkeypatch.setattr(relay_forward, "MAX_JOINED", 4)
    first = collectors[0]
    relay = relays(tmp_path, first.url)
    refused, other, beside = agent_of(relay), agent_of(relay, "run-1"), agent_of(relay, "run-0", 1)
    first.refused[what] = status
    steps = list(range(1, 11))
    for agent in (refused, other, beside):  # more than go in a request, before those of the others
        for step in steps:
            agent.send(SITES, [step])
    until(lambda: first.of("run-1") == steps, relay.health, 5)
    if what == "run-0/0":
        until(lambda: first.of("run-0", 1) == steps, relay.health, 5)
    for agent in (refused, other):
        agent.send(SITES, [11], fields=BROKEN)
    assert until(lambda: 11 in first.of("run-1"), relay.health) < 1.0
    assert first.of("run-0") == []
    assert relay.health()["held_sessions"] >= 1
    assert relay.health()["problem"]
    if status == 403:  # until a person changes something
        return
    first.refused.clear()
    until(lambda: relay.health()["waiting"] == 0, relay.health)
    assert [seq for seq in first.of("run-0") if seq != 11] == steps
    assert first.of("run-0", 1) == steps
    assert (relay.health()["held_sessions"], relay.health()["refused"]) == (0, 0)


def test_a_run_whose_database_hangs_leaves_a_way_to_the_others(
    tmp_path: Path, collectors: list[FakeCollector], relays: Callable[..., Relay], agent_of: Callable[..., Agent]
) -> None:
    """However many broken batches it has."""
    first = collectors[0]
    relay = relays(tmp_path, first.url, join_s=60.0)
    hung, other = [agent_of(relay, rank=rank) for rank in range(6)], agent_of(relay, "run-1")
    first.slow.add("run-0")
    for agent in hung:
        agent.send(SITES, [1], fields=BROKEN)
    time.sleep(0.1)
    other.send(SITES, [1], fields=BROKEN)
    assert until(lambda: first.of("run-1") == [1], relay.health) < 1.0
    assert not any(first.of("run-0", rank) for rank in range(6))


def test_an_error_that_nobody_foresaw_holds_back_one_session(
    tmp_path: Path,
    collectors: list[FakeCollector],
    relays: Callable[..., Relay],
    agent_of: Callable[..., Agent],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Wherever its batch stands in a request; and it goes on when the error is gone."""
    first, body, broken = collectors[0], Journals.body, {"run00"}

    def reads(self: Journals, entry: Any) -> bytes:
        if entry.session in broken:
            raise ZeroDivisionError("a bug")
        return body(self, entry)

    monkeypatch.setattr(Journals, "body", reads)
    relay = relays(tmp_path, first.url, join_s=0.2)
    before, poison, behind = agent_of(relay, "run-1"), agent_of(relay, "run-0"), agent_of(relay, "run-2")
    steps = list(range(1, 9))
    for step in steps:
        for agent in (before, poison, behind):
            agent.send(SITES, [step], fields=BROKEN if step == 4 else {})
    until(lambda: sorted(first.of("run-1")) == sorted(first.of("run-2")) == steps, relay.health)
    until(lambda: relay.health()["waiting"] == len(steps), relay.health)
    assert first.of("run-0") == []
    health = relay.health()
    assert health["held_sessions"] == 1
    assert "ZeroDivisionError: a bug" in health["problem"]
    assert len([r for r in caplog.records if "an error of this relay" in r.getMessage() and r.exc_info]) == 1
    broken.clear()
    until(lambda: relay.health()["waiting"] == 0, relay.health)
    assert sorted(first.of("run-0")) == steps
    assert (relay.health()["held_sessions"], relay.health()["refused"]) == (0, 0)


def test_a_session_of_somebody_else_is_refused_for_good(
    tmp_path: Path,
    collectors: list[FakeCollector],
    relays: Callable[..., Relay],
    agent_of: Callable[..., Agent],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All of it is counted, some of it is kept, and it is said once."""
    monkeypatch.setattr(relay_refused, "MAX_FILES", 3)
    first = collectors[0]
    relay = relays(tmp_path, first.url)
    stranger, other = agent_of(relay), agent_of(relay, "run-0", 1)
    first.refused["run-0/0"] = 403
    for step in range(1, 6):
        for agent in (stranger, other):
            agent.send(SITES, [step])
    until(lambda: relay.health()["waiting"] == 0, relay.health)
    assert (relay.health()["refused"], relay.health()["delivered"]) == (5, 5)
    assert first.of("run-0", 1) == [1, 2, 3, 4, 5]
    assert len(list(tmp_path.glob("relay/refused/*"))) == 3
    assert len([r for r in caplog.records if "is refused (http_403); it is kept" in r.getMessage()]) == 1


def test_what_is_refused_takes_no_more_than_its_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_refused, "MAX_BYTES", 3500)
    for seq in range(5):
        Refused(tmp_path).keep("a", Parcel(Kind.BATCH, seq, bytes(1000), 1), "http_422")
    kept = sorted((tmp_path / "refused").iterdir())
    assert [path.name for path in kept] == [f"a-{seq}-http_422.zst" for seq in range(3)]
    kept[0].unlink()
    Refused(tmp_path).keep("b", Parcel(Kind.BATCH, 0, bytes(1000), 1), "http_422")
    assert len(list((tmp_path / "refused").iterdir())) == 3, "who takes files away makes room"


def test_a_relay_that_starts_again_sends_the_newest_broken_batch_first(
    tmp_path: Path,
    collectors: list[FakeCollector],
    relays: Callable[..., Relay],
    agent_of: Callable[..., Agent],
    client_of: Callable[[Relay], httpx.Client],
) -> None:
    """Before it reads the rest of its journal; what it takes meanwhile goes before those of the relay before it."""
    first = collectors[0]
    before = relays(tmp_path, NOWHERE, join_s=60.0)
    agent, late = agent_of(before), agent_of(before, rank=1)
    for step in (1, 2):
        agent.send(SITES, [step], fields=BROKEN)
    late.send(SITES, [3], fields=BROKEN)
    for step in range(4, 12):
        agent.send(SITES, [step])
    before.stop(0)
    first.hangs = True
    after = relays(tmp_path, first.url, join_s=60.0)
    agent.client = client_of(after)
    time.sleep(0.2)
    agent.send(SITES, [12], fields=BROKEN)
    first.go_on()
    until(lambda: len(first.taken) == 4, after.health)
    assert first.taken[0] == ("run-0", 1, 1)
    assert first.of("run-0") == [agent.seq, 2, 1]
    assert after.health()["delivered"] == 0


def test_who_is_refused_leaves_room_and_files_to_the_others(tmp_path: Path) -> None:
    journals = Journals(tmp_path, 200_000)

    def put(session: str, seq: int, held: bool = False) -> Any:
        return journals.append(Kind.BATCH, session, seq, 1, bytes(9_000), held=held)

    def fill() -> None:
        for seq in range(100):
            put("a", seq, held=True)

    with pytest.raises(Full):
        fill()
    kept = journals.num_waiting
    assert 0.7 * 200_000 < journals.num_bytes <= 0.75 * 200_000
    for seq in range(200):  # far more than there is room for
        entry = put("b", seq)
        assert journals.first(9, MIB, but={"a"}) == [entry]
        journals.advance(entry)
        if seq % 40 == 39:
            journals.tidy()
            journals._used_at["b"] = -1e9
            journals.tidy()
            assert not (tmp_path / "queue" / "b").exists()
    assert journals.num_waiting == kept
    journals.close()
    again = Journals(tmp_path, 200_000)
    assert again.sessions == {"a"}
    assert again.num_waiting == kept
    again.close()


def test_a_file_of_which_nothing_waits_is_given_up(tmp_path: Path) -> None:
    journals = Journals(tmp_path, 8 * MIB)
    for seq in range(64):
        journals.advance(journals.append(Kind.BATCH, "a", seq, 1, bytes(100_000)))
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.relay")) < 400_000
    last = journals.append(Kind.BATCH, "a", 64, 1, b"last")
    journals.close()
    again = Journals(tmp_path, 8 * MIB)
    (found,) = again.first(9, MIB)
    assert (found.seq, again.body(found)) == (64, b"last")
    assert found.taken_at == last.taken_at
    again.close()


def no_room_for_the_position(monkeypatch: pytest.MonkeyPatch) -> None:
    write_text = Path.write_text

    def write(self: Path, *args: Any) -> int:
        if self.name.startswith(POSITION):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_text(self, *args)

    monkeypatch.setattr(Path, "write_text", write)


def test_on_a_full_disk_what_is_delivered_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journals = Journals(tmp_path, 8 * MIB)
    entries = [journals.append(Kind.BATCH, "a", seq, 1, bytes(600_000)) for seq in range(6)]  # two in a file
    no_room_for_the_position(monkeypatch)
    for entry in entries[:3]:
        journals.advance(entry)
    assert len(list(tmp_path.rglob("*.relay"))) == 2
    assert [entry.seq for entry in journals.first(9, MIB)] == [3]
    journals.close()
    again = Journals(tmp_path, 8 * MIB)
    assert [entry.seq for entry in again.first(9, 8 * MIB)] == [2, 3, 4, 5], "one comes again: its key is known"
    for entry in again.first(9, 8 * MIB):
        again.advance(entry)
    assert not list(tmp_path.rglob("*.relay"))[1:]
    assert again.append(Kind.BATCH, "a", 6, 1, b"last").file > entries[-1].file
    again.close()


def test_on_a_full_disk_no_batch_is_sent_again(
    tmp_path: Path,
    collectors: list[FakeCollector],
    relays: Callable[..., Relay],
    agent_of: Callable[..., Agent],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = collectors[0]
    relay = relays(tmp_path, first.url, join_s=0.3)
    agents = [agent_of(relay, rank=rank) for rank in range(3)]
    no_room_for_the_position(monkeypatch)
    for step in range(1, 9):
        for agent in agents:
            agent.send(SITES, [step])
    until(lambda: relay.health()["waiting"] == 0, relay.health)
    assert [first.of("run-0", rank) for rank in range(3)] == [list(range(1, 9))] * 3
    assert first.repeated == 0
    assert relay.health()["problem"] == ""


def test_a_journal_whose_close_fails_is_closed_once(tmp_path: Path) -> None:
    journals = Journals(tmp_path, 8 * MIB)
    first = journals.append(Kind.BATCH, "a", 0, 1, bytes(300_000))
    with close_fails() as closed:
        journals.advance(first)
    with taken_over(tmp_path / "other", closed[0]):
        journals.advance(journals.append(Kind.BATCH, "a", 1, 1, bytes(300_000)))
        journals.append(Kind.BATCH, "a", 2, 1, b"last")
        with close_fails() as closed:
            journals.close()
        with taken_over(tmp_path / "another", closed[0]):
            journals.close()
    again = Journals(tmp_path, 8 * MIB)
    assert [entry.seq for entry in again.first(9, MIB)] == [2]
    again.close()


def test_what_an_earlier_relay_kept_in_one_journal_is_sent(
    tmp_path: Path, collectors: list[FakeCollector], relays: Callable[..., Relay], agent_of: Callable[..., Agent]
) -> None:
    """Frames of version 1: all sessions in the files of one folder, behind the place up to which they were delivered."""
    before = relays(tmp_path, NOWHERE)
    agents = [agent_of(before, rank=rank) for rank in range(2)]
    before.stop(0)
    frames = []
    for step in (1, 2, 3):
        for agent in agents:
            raw, name = agent.body(SITES, [step], fields=BROKEN if step == 3 else {}), agent.session.encode()
            head = struct.pack(
                "<4sBBHQIII", b"FP8R", 1, Kind.BATCH, len(name), step, 2, len(raw), zlib.crc32(name + raw)
            )  # as documented of version 1
            frames.append(head + struct.pack("<I", zlib.crc32(head)) + name + raw)
    folder = tmp_path / "relay"
    (folder / "00000007.relay").write_bytes(b"".join(frames))
    (folder / "delivered").write_text(f"7 {len(frames[0])}")
    after = relays(tmp_path, collectors[0].url)
    until(lambda: after.health()["waiting"] == 0, after.health)
    assert sorted(collectors[0].taken) == sorted(("run-0", rank, seq) for rank in (0, 1) for seq in (1, 2, 3))[1:]
    assert not list(folder.glob("*.relay"))


def test_several_are_named_with_commas(tmp_path: Path) -> None:
    assert read_collectors("http://a:1/, https://b:2", "--collector") == ["http://a:1", "https://b:2"]
    assert read_collectors("http://a:1", "--collector") == ["http://a:1"]
    for text, said in (
        ("http://a:1,", "must be an http:// or https:// URL"),
        ("http://a:1,b:2", "'b:2'"),
        ("http://a:1,http://a:1/", "named twice"),
        (",".join(f"http://a:{n}" for n in range(1, 18)), "17 collectors"),
        ("http://u:secret@a:1,http://b", "must not hold a password"),
    ):
        with pytest.raises(ValueError, match="(?s)--collector=.*;") as got:
            read_collectors(text, "--collector")
        assert said in str(got.value)
        assert "secret" not in str(got.value)
    with pytest.raises(ValueError, match="fp8watch relay"):
        AgentSettings.from_environ({"FP8WATCH_COLLECTOR": "http://a:1,http://b:2"})
    command = [sys.executable, "-m", "fp8watch_agent.relay", "--spool-dir", str(tmp_path)]
    for more, name in (({"FP8WATCH_COLLECTOR": "http://a,nonsense"}, "FP8WATCH_COLLECTOR="), ({}, "--collector=None")):
        done = subprocess.run(command, env=more, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert name in done.stderr
        assert "Traceback" not in done.stderr


def test_two_threads_that_take_from_one_session_lose_nothing(tmp_path: Path) -> None:
    """An entry that was delivered twice takes away itself alone."""
    journals = Journals(tmp_path, MIB)
    first, second = (journals.append(Kind.BATCH, "a", seq, 1, b"x") for seq in (1, 2))
    journals.advance(first)
    threads = [threading.Thread(target=journals.advance, args=(first,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert journals.first(9, MIB) == [second]
    journals.close()
