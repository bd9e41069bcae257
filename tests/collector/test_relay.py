"""A relay answers when a body is on disk; kill -9 of relay and collector loses nothing that it answered, counts nothing twice."""

from __future__ import annotations

import random
import sys
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from collector.killing import SITES, Crew, Store, kill_under_load, serve
from collector.kit import Agent, Serving

from fp8watch_agent import joined
from fp8watch_agent.batch import Kind
from fp8watch_agent.relay import Relay
from fp8watch_agent.relay_journal import SUFFIX, Full, Journal
from fp8watch_agent.settings import AgentSettings
from fp8watch_agent.transport import SESSION_KEY
from fp8watch_agent.wire import WireError

NOWHERE = "http://127.0.0.1:9"
MIB = 1 << 20


@pytest.fixture
def database_kind() -> str:
    """What the relay does is the same before either database."""
    return "sqlite"


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    made = Store(database_url)
    yield made
    made.close()


@contextmanager
def collecting(tmp_path: Path, database_url: str) -> Iterator[Serving]:
    serving = serve(tmp_path, database_url)
    try:
        yield serving
    finally:
        serving.kill()


def relay_at(folder: Path, *collectors: str, **given: Any) -> Relay:
    settings = AgentSettings(spool_dir=folder, token=given.pop("token", None))
    made = Relay(settings, collectors, **{"max_bytes": 64 * MIB, "join_s": 0.0, "port": 0, **given})
    made.start()
    return made


def delivered(relay: Relay, timeout_s: float = 20.0) -> None:
    until = time.monotonic() + timeout_s
    while relay.journals.num_waiting:
        assert time.monotonic() < until, relay.health()
        time.sleep(0.01)


def ranks(relay: Relay, num: int, **headers: str) -> list[tuple[Agent, httpx.Client]]:
    out = []
    for rank in range(num):
        client = httpx.Client(base_url=relay.url, trust_env=False, headers={SESSION_KEY: f"key{rank}", **headers})
        out.append((Agent(client, session=f"{rank:032x}", rank=rank).register(SITES), client))
    return out


def test_what_was_answered_outlives_the_relay_and_the_collector(
    tmp_path: Path, database_url: str, store: Store
) -> None:
    """Ranks register and send while there is no collector; another relay on the same folder delivers it, once."""
    first = relay_at(tmp_path, NOWHERE)
    sent = set()
    for agent, client in ranks(first, 3):
        for step in range(4):
            agent.send(SITES, [step])
            sent.add((agent.run, agent.rank, agent.seq))
        client.close()
    assert first.health()["delivered"] == 0
    first.stop(0)
    with collecting(tmp_path, database_url) as collector:
        second = relay_at(tmp_path, collector.url)
        delivered(second)
        assert store.keys() == sent
        assert second.health()["refused"] == 0
        assert second.health()["requests"] <= 2, "twelve batches go in one request"
        second.stop()
        third = relay_at(tmp_path, collector.url)
        assert third.health()["waiting"] == 0
        third.stop()


def test_a_broken_batch_waits_for_no_other(tmp_path: Path, database_url: str, store: Store) -> None:
    """Healthy ones wait for others to go with; the relay is another one when the collector comes."""

    def stored(seqs: set[int]) -> bool:
        until = time.monotonic() + 20
        while (found := {key[2] for key in sorted(store.keys())}) != seqs and time.monotonic() < until:
            time.sleep(0.02)
        return found == seqs

    first = relay_at(tmp_path, NOWHERE, join_s=60.0)
    ((agent, client),) = ranks(first, 1)
    agent.send(SITES, [1])
    agent.send(SITES, [2], fields={"num_nan": 3})
    client.close()
    first.stop(0)
    with collecting(tmp_path, database_url) as collector:
        second = relay_at(tmp_path, collector.url, join_s=60.0)
        assert stored({2})
        with httpx.Client(base_url=second.url, trust_env=False, headers={SESSION_KEY: "key0"}) as client:
            agent.client = client
            agent.send(SITES, [3])
            agent.send(SITES, [4], fields={"num_nan": 3})
            assert stored({2, 4})
        while second.health()["express"] < 2:
            time.sleep(0.01)
        assert second.health()["delivered"] == 0
        second.stop()
        assert stored({1, 2, 3, 4})
        assert (second.health()["delivered"], second.health()["refused"]) == (4, 0)


def test_each_session_shows_its_key_and_each_client_the_token(tmp_path: Path) -> None:
    relay = relay_at(tmp_path, NOWHERE, token="fp8w_" + "a" * 40)
    with httpx.Client(base_url=relay.url, trust_env=False) as nobody:
        assert Agent(nobody).register_run().status_code == 401
    ((agent, client),) = ranks(relay, 1, Authorization="Bearer fp8w_" + "a" * 40)
    assert agent.post(agent.body(SITES, [1])).status_code == 200
    client.headers[SESSION_KEY] = "another"
    assert agent.post(agent.body(SITES, [2])).status_code == 403
    assert agent.register_session().status_code == 403
    assert agent.register_sites(SITES).status_code == 403
    client.headers[SESSION_KEY] = "key0"
    agent.session = "b" * 32
    assert agent.post(agent.body(SITES, [3])).json()["error"] == "unknown-session"
    assert relay.health()["waiting"] == 1
    client.close()
    relay.stop(0)


def test_without_room_nothing_is_answered_for(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 200_000)
    taken = 0
    with pytest.raises(Full):
        for seq in range(100):
            journal.append(Kind.BATCH, "a" * 32, seq, 1, bytes(9_000))
            taken += 1
    assert journal.num_waiting == taken > 10
    journal.advance(journal.first(99)[-1])
    journal.close()


def test_a_journal_that_was_cut_or_damaged_is_read_as_far_as_it_is_intact(tmp_path: Path) -> None:
    journal = Journal(tmp_path, MIB)
    for seq in range(9):
        journal.append(Kind.BATCH, "a" * 32, seq, 1, bytes([seq]) * 50)
    entries = journal.first(99)
    journal.advance(entries[1])
    journal.close()
    (path,) = tmp_path.glob(f"*{SUFFIX}")
    whole = path.read_bytes()
    rng = random.Random(3)
    for _ in range(40):
        raw = bytearray(whole)
        at = rng.randrange(entries[2].at, len(raw))
        raw[at] ^= 1 << rng.randrange(8)
        cut = rng.choice([len(raw), rng.randrange(entries[2].at, len(raw))])
        path.write_bytes(raw[:cut])
        want = [e.seq for e in entries[2:] if e.at + e.num_bytes <= cut and not e.at <= at < e.at + e.num_bytes]
        again = Journal(tmp_path, MIB)
        assert [e.seq for e in again.first(99)] == want, (at, cut)
        assert [again.body(e) for e in again.first(99)] == [bytes([seq]) * 50 for seq in want]
        again.close()
        for other in tmp_path.glob(f"*{SUFFIX}"):
            if other != path:
                other.unlink()


def test_of_joined_batches_each_is_answered_by_itself(tmp_path: Path, database_url: str, store: Store) -> None:
    with (
        collecting(tmp_path, database_url) as collector,
        httpx.Client(base_url=collector.url, trust_env=False) as client,
    ):
        agent = Agent(client).register(SITES)
        good, other = agent.body(SITES, [1]), agent.body(SITES, [1], seq=1, fields={"amax_max": 3.0})
        stranger = Agent(client, run="nowhere").body(SITES, [1])
        kind = {"Content-Type": joined.JOINED_CONTENT_TYPE}

        def post(*bodies: bytes, **headers: str) -> Any:
            raw = joined.join_bodies([("", body) for body in bodies])
            return client.post(joined.JOINED_PATH, content=raw, headers={**kind, **headers})

        answers = post(good, b"junk", other, stranger, agent.body(SITES, [2]), good).json()["answers"]
        assert [a["status"] for a in answers] == [200, 400, 409, 424, 200, 200]
        assert [a.get("acked") for a in answers] == [1, None, None, None, 2, 1]
        assert len(store.keys()) == 2
        owner = Agent(client, session="c" * 32, rank=1)
        client.headers[SESSION_KEY] = "right"
        owner.register(SITES)
        body = owner.body(SITES, [1])
        for key, status in (("wrong", 403), ("", 403), ("right", 200)):
            (answer,) = client.post(joined.JOINED_PATH, content=joined.join_bodies([(key, body)]), headers=kind).json()[
                "answers"
            ]
            assert answer["status"] == status, key
        assert client.post(joined.JOINED_PATH, content=b"junk", headers=kind).status_code == 400
        assert post(**{"Content-Type": "text/plain"}).status_code == 415
        assert post(*[good] * (joined.MAX_JOINED + 1)).status_code == 400
        assert client.post(joined.JOINED_PATH, content=msgspec.msgpack.encode([]), headers=kind).status_code == 400


@pytest.mark.parametrize(("num_kills", "seed"), [(3, 1), pytest.param(8, 2, marks=pytest.mark.long)])
@pytest.mark.timeout(300)
def test_kill_9_of_the_relay_under_load(
    tmp_path: Path, database_url: str, store: Store, num_kills: int, seed: int
) -> None:
    """The collector is killed, too, with every third kill. It answers late, so that kills fall between commit and answer."""
    collectors: list[Serving] = []

    def relay() -> Serving:
        if len(collectors) == 0 or num_started[0] % 3 == 0:
            port = "0" if not collectors else collectors[-1].url.rsplit(":", 1)[1]
            if collectors:
                collectors[-1].kill()
            collectors.append(serve(tmp_path, database_url, "--port", port))
        num_started[0] += 1
        command = [sys.executable, "-m", "fp8watch_agent.relay", "--collector", collectors[-1].url]
        more = ["--spool-dir", str(tmp_path / "node"), "--port", "0", "--join", "0.02"]
        return Serving(tmp_path, *more, command=command).start()

    num_started = [0]
    crew, tally = kill_under_load(
        lambda url_of: Crew(4, 2, url_of),
        relay,
        store.keys,
        num_kills=num_kills,
        acks_between=8,
        rng=random.Random(seed),
    )
    last = relay()
    until = time.monotonic() + 30
    with httpx.Client(base_url=last.url, trust_env=False) as client:
        while (health := client.get("/healthz").json())["waiting"]:
            assert time.monotonic() < until, health
            time.sleep(0.05)
    assert health["refused"] == 0
    assert last.kill(15)[0] == 0
    collectors[-1].kill()
    store.check(crew.senders)
    assert tally.num_unsure > 0, "the kills hit nobody"
    print(tally, sum(len(s.acked) for s in crew.senders), "acknowledged")


def test_the_number_of_joined_bodies_is_checked_before_they_are_decoded() -> None:
    raw = b"\xdd" + (2_000_000).to_bytes(4, "big") + bytes.fromhex("92a0c400") * 2_000_000
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            joined.split_bodies(raw)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
