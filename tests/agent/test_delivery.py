"""What is recorded arrives, bit for bit and once, whatever the collector answers on the way."""

from __future__ import annotations

import gc
import json
import logging
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.agents import (
    RULE,
    Collector,
    Reply,
    eventually,
    flat_map,
    make_ids,
    make_maps,
    make_rows,
    make_session,
    make_sites,
    make_step,
    record,
    serve,
)

from fp8watch_agent import sync, wire
from fp8watch_agent.batch import PROMPT_STEPS, Kind, Parcel, maps_parcel, rekeyed
from fp8watch_agent.folder_watch import FolderWatch
from fp8watch_agent.record import FIELD_BY_NAME, HISTOGRAMS, STEP, Measured, empty_rows
from fp8watch_agent.recorder import Recorder
from fp8watch_agent.session import Registration, Session
from fp8watch_agent.settings import AgentSettings
from fp8watch_agent.tile_map_queue import MapQueue
from fp8watch_agent.transport import Answer, ResponseMeaning, Transport
from fp8watch_agent.uploader import Uploader
from fp8watch_agent.wire import decode_histogram, encode_histogram


def test_steps_arrive_bit_for_bit_with_nan_and_inf(
    collector: Collector, settings: AgentSettings, session: Session
) -> None:
    recorder = Recorder(replace(settings, collector=collector.url), session)
    recorder.register_sites(make_sites(7))
    steps = [make_step(s, loss=float("nan"), grad_norm=float("-inf"), lr=0.5) for s in range(5)]
    for s, step in enumerate(steps):
        recorder.record_step(step, make_ids(7), make_rows(7, s), {"aux": float("inf")} if s else {}, f"batch-{s}")
    assert recorder.flush(10)
    recorder.close()
    got = collector.batches()
    rows = np.concatenate([make_rows(7, s) for s in range(5)])
    for name in FIELD_BY_NAME:
        columns = np.concatenate([b.column(name) for b in got])
        if name in HISTOGRAMS:
            np.testing.assert_array_equal(columns, decode_histogram(encode_histogram(rows[name])))
        elif rows[name].dtype == np.float64:
            np.testing.assert_allclose(columns, rows[name], rtol=2.0**-13, atol=0)
        else:
            assert columns.tobytes() == rows[name].tobytes(), name
    assert np.concatenate([b.site for b in got]).tobytes() == np.tile(make_ids(7), 5).tobytes()
    sent = np.concatenate([b.steps for b in got])
    for name in STEP.names or ():
        assert sent[name].tobytes() == np.array([s[name] for s in steps]).tobytes(), name
    assert [v for b in got for v in b.header.logs["aux"]] == [None] + [float("inf")] * 4
    assert [v for b in got for v in b.header.batch_ids] == [f"batch-{s}" for s in range(5)]
    assert collector.runs["run-1"]["name"] == "<script>"
    assert collector.sessions[session.session]["mesh"] == {"dp": 8}
    assert not list(settings.spool_dir.iterdir()), "nothing is left on disk after a clean end"


def test_a_step_without_records_arrives(collector: Collector, settings: AgentSettings, session: Session) -> None:
    recorder = Recorder(replace(settings, collector=collector.url), session)
    recorder.record_step(make_step(4, loss=1.0), make_ids(0), make_rows(0))
    assert recorder.flush(10)
    recorder.close()
    assert collector.steps() == [4]


MORE = make_ids(7)[[1, 4]]
FIRST = make_ids(7)[[0, 2, 3, 5, 6]]


def test_more_of_a_step_is_in_it_in_the_order_of_sites(
    collector: Collector, settings: AgentSettings, session: Session
) -> None:
    recorder = Recorder(replace(settings, collector=collector.url, batch_interval_s=60), session)
    recorder.register_sites(make_sites(7))
    rows = [make_rows(7, s) for s in range(3)]
    recorder.record_step(make_step(0, loss=1.0), make_ids(7), rows[0])
    recorder.record_step(make_step(1, loss=2.0), FIRST, rows[1][[0, 2, 3, 5, 6]], {"aux": 1.0}, "named")
    recorder.record_more(MORE, rows[1][[1, 4]])
    recorder.record_step(make_step(2, loss=3.0), make_ids(7), rows[2])
    assert recorder.flush(10)
    assert recorder.health().num_steps == 3
    recorder.close()
    [got] = collector.batches()
    assert got.steps["loss"].tolist() == [1.0, 2.0, 3.0]
    assert got.header.per_step == 7  # one order of sites: what is cheapest to send
    assert got.header.logs == {"aux": [None, 1.0, None]}
    assert got.header.batch_ids == [None, "named", None]
    assert got.site.tobytes() == np.tile(make_ids(7), 3).tobytes()
    assert got.step.tolist() == [0] * 7 + [1] * 7 + [2] * 7
    assert got.column("num_tiles").tobytes() == np.concatenate(rows)["num_tiles"].tobytes()


def test_of_more_numbers_than_a_step_may_name_the_shortest_names_stay(
    collector: Collector, settings: AgentSettings, session: Session
) -> None:
    """A model with many attention modules logs the logits of each under its name, and training names a few."""
    recorder = Recorder(replace(settings, collector=collector.url), session)
    recorder.register_sites(make_sites(2))
    logs = {f"max_attention_logit/model.language_model.layers.{i}.self_attn": float(i) for i in range(400)}
    recorder.record_step(make_step(0), make_ids(2), make_rows(2, 0), {**logs, "kl": 0.5}, "é" * 512)
    assert recorder.flush(10)
    health = recorder.health()
    recorder.close()
    [got] = collector.batches()
    kept = {name: values[0] for name, values in got.header.logs.items()}
    assert kept["kl"] == 0.5
    assert 150 < len(kept) < 401
    assert kept.items() <= {**logs, "kl": 0.5}.items()
    assert got.header.batch_ids == ["é" * 512]
    assert health.internal_errors == {"logs": 1}


def test_more_of_a_step_that_has_left_is_that_step_in_the_next_batch(
    collector: Collector, settings: AgentSettings, session: Session
) -> None:
    recorder = Recorder(replace(settings, collector=collector.url, batch_interval_s=60), session)
    recorder.register_sites(make_sites(7))
    recorder.record_step(make_step(1, loss=2.0), FIRST, make_rows(5))
    assert recorder.flush(10)
    recorder.record_more(MORE, make_rows(2))
    recorder.record_step(make_step(2, loss=3.0), make_ids(7), make_rows(7))
    assert recorder.flush(10)
    recorder.close()
    one, other = collector.batches()
    assert one.steps.tobytes() == other.steps[:1].tobytes()
    assert other.steps["step"].tolist() == [1, 2]
    assert one.site.tobytes() == FIRST.tobytes()
    assert other.site.tobytes() == np.concatenate([MORE, make_ids(7)]).tobytes()
    assert collector.num_records() == 14


def test_repeated_and_descending_steps_go_into_batches_of_their_own(
    collector: Collector, settings: AgentSettings, session: Session
) -> None:
    recorder = Recorder(replace(settings, collector=collector.url, batch_interval_s=60), session)
    order = [5, 6, 6, 0, 1, 2]
    for s in order:
        record(recorder, [s])
    assert recorder.flush(10)
    recorder.close()
    assert [int(s) for b in collector.batches() for s in b.steps["step"]] == order


def healthy_rows(num_rows: int) -> np.ndarray:
    rows = empty_rows(num_rows)
    rows["measured"], rows["amax_max"] = int(Measured.COUNTS | Measured.AMAX), 1.0
    return rows


def test_a_batch_waits_for_eight_steps_but_not_for_what_broke(
    collector: Collector, settings: AgentSettings, session: Session
) -> None:
    settings = replace(settings, collector=collector.url, poll_interval_s=3600.0, batch_interval_s=1.0)
    recorder = Recorder(settings, session)
    sender, sent = recorder._sender, 0

    def leaves(steps: list[int], waited_s: float, loss: float = 1.0) -> bool:
        nonlocal sent
        for s in steps:
            recorder.record_step(make_step(s, loss=loss), make_ids(3), healthy_rows(3))
        sender._due_since = time.monotonic() - waited_s
        sender.tick()
        before, sent = sent, len(collector.steps())
        return sent > before

    recorder.register_sites(make_sites(3))
    assert not leaves([0], 0.5)
    assert leaves([], 1.5), "the first steps of a session leave after an interval"
    assert leaves(list(range(1, PROMPT_STEPS)), 1.5)
    assert not leaves([20, 21, 22], 5.0)
    assert leaves([23, 24, 25, 26, 27], 5.0), "eight steps"
    assert not leaves([30, 31], 5.0)
    assert leaves([32], 1.5, loss=float("nan"))
    assert collector.steps()[-3:] == [30, 31, 32], "with the steps before it"
    assert not leaves([40], 7.5)
    assert leaves([], 8.5), "it waits eight intervals at most"
    assert not leaves([50], 5.0)
    recorder.hurry()
    assert leaves([], 1.5)
    recorder.record_step(make_step(60), make_ids(3), healthy_rows(3))
    sender._due_since = time.monotonic() - 5.0
    sender.tick()
    assert recorder.health().records.queued == 3
    assert recorder.flush(10), "flush does not wait, nor forget what is being put together"
    assert collector.steps()[-1] == 60
    recorder.close()


def test_a_collector_that_forgot_is_told_again(collector: Collector, settings: AgentSettings, session: Session) -> None:
    recorder = Recorder(replace(settings, collector=collector.url), session)
    record(recorder, range(3))
    assert recorder.flush(10)
    collector.forget()
    record(recorder, range(3, 6))
    assert recorder.flush(10)
    recorder.close()
    assert collector.steps() == list(range(6))
    assert len(collector.sites) == 3
    assert 424 in [status for _, _, status in collector.requests]
    assert recorder.health().records.acknowledged == 18


def test_records_of_sites_that_were_never_registered_do_not_block_the_next(
    collector: Collector, settings: AgentSettings, session: Session
) -> None:
    recorder = Recorder(replace(settings, collector=collector.url), session)
    recorder.record_step(make_step(0), make_ids(3), make_rows(3))
    assert recorder.flush(10)
    record(recorder, [1])
    assert recorder.flush(10)
    recorder.close()
    assert collector.steps() == [1]
    assert recorder.health().records.dropped == {"unregistered": 3}


def test_sites_that_the_collector_refuses_are_why_their_batch_is(
    collector: Collector, settings: AgentSettings, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    collector.refuse_sites = True
    recorder = Recorder(replace(settings, collector=collector.url), session)
    record(recorder, [0])
    assert recorder.flush(10)
    recorder.close()
    assert recorder.health().records.dropped == {"unregistered": 3}
    assert "refused: HTTP 422" in caplog.text


def test_text_that_a_collector_would_refuse_is_made_to_fit(
    collector: Collector, settings: AgentSettings, session: Session
) -> None:
    odd = "x" * 300 + "é\0\ud800" + "y" * 300
    facts: dict[str, Any] = {odd: odd, "number": 1}
    recorder = Recorder(replace(settings, collector=collector.url), replace(session, run_name="a\0\ud800", facts=facts))
    [site] = make_sites(1)
    recorder.register_sites([replace(site, module=odd)])
    recorder.update_facts({"late": "\ud800", "long": "é" * 70_000})
    recorder.record_step(make_step(0), make_ids(1), make_rows(1, 0))
    assert recorder.flush(10)
    assert recorder.health().records.acknowledged == 1
    recorder.close()
    said = collector.sessions[session.session]["facts"]
    [name] = (name for name in said if name.startswith("x"))
    assert (len(name), name[:300], name[-200:]) == (511, "x" * 255 + "…" + "y" * 44, "y" * 200)
    assert said[name] == "x" * 300 + "é\\0\\ud800" + "y" * 300
    assert (len(said["long"]), said["number"], said["late"]) == (65_535, 1, "\\ud800")
    assert collector.runs[session.run_id]["name"] == "a\\0\\ud800"


@pytest.mark.parametrize(("num", "chars", "most"), [(400, 300, 128), (3, 60_000, 4096), (9000, 3, 128)])
def test_a_session_that_says_too_much_of_itself_is_recorded_with_what_fits(
    collector: Collector, settings: AgentSettings, session: Session, num: int, chars: int, most: int
) -> None:
    facts: dict[str, Any] = {"number": 1, "short": "x"} | {f"flag.{i}": "é" * chars for i in range(num)}
    recorder = Recorder(replace(settings, collector=collector.url), replace(session, facts=facts))
    recorder.register_sites(make_sites(1))
    recorder.record_step(make_step(0), make_ids(1), make_rows(1, 0))
    assert recorder.flush(10)
    recorder.close()
    said = collector.sessions[session.session]["facts"]
    assert (said["number"], said["short"]) == (1, "x")
    assert {len(v) for k, v in said.items() if k.startswith("flag.")} == {min(chars, most - 1)}
    left_out = len(facts) - (len(said) - 1)
    became = (
        f"{num} of {num + 2} were cut" if not left_out else f"{left_out} of {num + 2} were left out, the others cut"
    )
    assert said["facts_cut"] == f"what this session says of itself is too long: {became} to {most} characters"


def test_sites_that_another_session_was_refused_are_no_reason() -> None:
    class Strict(Transport):
        sites_are = 422

        def put(self, path: str, value: object, key: str = "") -> Answer:
            return Answer(self.sites_are, RULE) if path.endswith("/sites") else Answer(200)

        def post(self, *_: Any, **__: Any) -> Answer:
            return Answer(424)

    transport = Strict("http://127.0.0.1:9")
    uploader = Uploader(transport)

    def reason(of: Session) -> int:
        return uploader.send(Parcel(Kind.BATCH, 0, b"", 3), Registration(of, make_sites(1))).answer.status

    assert reason(make_session()) == 422
    transport.sites_are = 200
    assert reason(make_session()) == 424


def test_a_batch_whose_key_was_taken_goes_under_another_one_and_twice_is_counted(
    collector: Collector, settings: AgentSettings, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    collector.script = [Reply(409)]
    recorder = Recorder(replace(settings, collector=collector.url), session)
    with caplog.at_level(logging.WARNING, "fp8watch"):
        record(recorder, [0])
        assert recorder.flush(10)
    assert "taken by another body" in caplog.text
    assert recorder.health().records.dropped == {}
    collector.script = [Reply(409), Reply(409)]
    record(recorder, [1])
    assert recorder.flush(10)
    recorder.close()
    health = recorder.health()
    assert collector.steps() == [0]
    assert health.records.dropped == {"http_409": 3}
    assert health.records.balanced
    assert len(list((settings.spool_dir / "refused").iterdir())) == 1


@pytest.mark.parametrize("status", [400, 415, 422])
def test_a_refused_batch_is_counted_and_kept_and_the_next_goes_on(
    collector: Collector, settings: AgentSettings, session: Session, status: int
) -> None:
    collector.script = [Reply(status)]
    recorder = Recorder(replace(settings, collector=collector.url), session)
    record(recorder, [0])
    assert recorder.flush(10)
    record(recorder, [1])
    assert recorder.flush(10)
    recorder.close()
    health = recorder.health()
    assert collector.steps() == [1]
    assert health.records.dropped == {f"http_{status}": 3}
    assert health.records.balanced
    kept = [wire.decode_batch(p.read_bytes()) for p in (settings.spool_dir / "refused").iterdir()]
    assert [int(b.steps["step"][0]) for b in kept] == [0]


def test_server_errors_are_tried_again_with_the_same_bytes(
    collector: Collector, settings: AgentSettings, session: Session
) -> None:
    collector.script = [Reply(500, commit=True), Reply(503), Reply(408), Reply(500, commit=True)]
    recorder = Recorder(replace(settings, collector=collector.url), session)
    record(recorder, [0])
    assert eventually(lambda: recorder.flush(1))
    recorder.close()
    assert collector.steps() == [0]
    assert collector.num_conflicts == 0
    assert recorder.health().records.acknowledged == 3
    assert recorder.health().num_retries == 4


def test_retry_after_is_obeyed(collector: Collector, settings: AgentSettings, session: Session) -> None:
    collector.script = [Reply(429, {"Retry-After": "0.6"})]
    recorder = Recorder(replace(settings, collector=collector.url), session)
    record(recorder, [0])
    assert eventually(lambda: not collector.script)
    start = time.monotonic()
    assert not recorder.flush(0.2), "flush says so, and does not knock again"
    assert collector.num_records() == 0
    assert eventually(lambda: collector.num_records() == 3)
    assert time.monotonic() - start > 0.5
    recorder.close()


def test_a_body_too_large_is_split_by_steps_and_then_by_records(
    collector: Collector, settings: AgentSettings, session: Session
) -> None:
    recorder = Recorder(replace(settings, collector=collector.url, batch_interval_s=60), session)
    recorder.register_sites(make_sites(20))
    for s in range(4):
        recorder.record_step(make_step(s, loss=s), make_ids(20), make_rows(20, s), {"aux": s})
    collector.max_body_bytes = 2500
    assert recorder.flush(10)
    recorder.close()
    got = collector.batches()
    assert len(got) > 4
    assert recorder.health().records.acknowledged == 80
    seen = {
        (int(step), int(site)): row
        for b in got
        for step, site, row in zip(b.step, b.site, wire.rows_of(b), strict=True)
    }
    assert len(seen) == 80
    for s in range(4):
        for site, row in zip(make_ids(20), make_rows(20, s), strict=True):
            assert seen[s, int(site)]["amax_max"].tobytes() == row["amax_max"].tobytes()


def test_a_single_record_that_is_too_large_is_counted(
    collector: Collector, settings: AgentSettings, session: Session
) -> None:
    collector.max_body_bytes = 10
    recorder = Recorder(replace(settings, collector=collector.url), session)
    record(recorder, range(2))
    assert recorder.flush(10)
    recorder.close()
    assert recorder.health().records.dropped == {"http_413": 6}


def test_maps_past_the_limits_of_the_format_are_refused_and_counted(collector: Collector, session: Session) -> None:
    """They cannot be split, for the agent does not read them either; those that come behind them do."""
    uploader, registration = Uploader(Transport(collector.url)), Registration(session, make_sites(1))
    large = maps_parcel(session, 0, [flat_map(4097, 4096)])
    receipt = uploader.send(large, registration)
    assert (receipt.verdict, receipt.refused) == (ResponseMeaning.ACKNOWLEDGED, {"http_413": 1})
    assert rekeyed(large) is None
    assert uploader.send(maps_parcel(session, 1, make_maps(2)), registration).verdict is ResponseMeaning.ACKNOWLEDGED
    assert list(collector.maps) == [1]


def test_a_map_that_no_collector_takes_does_not_leave_and_is_counted(
    collector: Collector, settings: AgentSettings, session: Session
) -> None:
    recorder = Recorder(replace(settings, collector=collector.url), session)
    recorder.register_sites(make_sites(1))
    recorder.record_tile_maps([flat_map(4097, 4096), *make_maps(2)])
    assert recorder.flush(10)
    recorder.close()
    assert recorder.health().maps.dropped == {"map_too_large": 1}
    assert recorder.health().maps.acknowledged == 2
    assert len(collector.maps) == 1


def test_a_large_map_leaves_alone() -> None:
    """If it is refused, no other is."""
    queue = MapQueue(1 << 30)
    for step, shape in enumerate([(4, 6), (4, 6), (4096, 4096), (4, 6)]):
        queue.push(flat_map(*shape, step))
    claimed = [queue.claim(2 << 20) for _ in range(4)]
    assert [[m.step for m in maps] for maps in claimed] == [[0, 1], [2], [3], []]


def test_a_wrong_token_holds_and_warns_once(
    collector: Collector, settings: AgentSettings, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    collector.always = Reply(401)
    with caplog.at_level(logging.WARNING, "fp8watch"):
        recorder = Recorder(replace(settings, collector=collector.url, token="fp8w_wrong"), session)
        for s in range(5):
            record(recorder, [s])
            assert not recorder.flush(0.1)
        assert eventually(lambda: recorder.health().records.queued == 0)
        recorder.close()
    assert [r.getMessage() for r in caplog.records if "FP8WATCH_TOKEN" in r.getMessage()] == [
        "the collector refuses this agent: HTTP 401; check FP8WATCH_TOKEN; until then data is spooled"
    ]
    assert recorder.health().records.spooled == 15
    assert "Bearer fp8w_wrong" in collector.tokens
    assert [p for _, p, _ in collector.requests].count("/v1/batches") == 1, "held, not hammered"


def test_answers_to_registrations_that_are_refused_are_not_kept(session: Session) -> None:
    answers: list[weakref.ref[Answer]] = []

    class Refusing(Transport):
        def put(self, path: str, value: Any, key: str = "") -> Answer:
            answer = Answer(422, b'{"rule": "' + b"x" * 1000 + b'"}')
            answers.append(weakref.ref(answer))
            return answer

        def post(self, path: str, body: bytes, content_type: str, key: str = "") -> Answer:
            return Answer(424)

    uploader = Uploader(Refusing("http://127.0.0.1:9"))
    for seq in range(20):
        uploader.send(Parcel(Kind.BATCH, seq, b"", 3), Registration(session, make_sites(2)))
    assert len(answers) >= 20
    gc.collect()
    assert sum(answer() is not None for answer in answers) < 3


def test_a_rotated_token_file_is_read_again(
    collector: Collector, settings: AgentSettings, session: Session, tmp_path: Path
) -> None:
    path = tmp_path / "token"
    path.write_text("fp8w_old\n")
    collector.script = [Reply(403)]
    recorder = Recorder(replace(settings, collector=collector.url, token_file=path), session)
    assert eventually(lambda: recorder.health().state == "up")
    path.write_text("fp8w_new\n")
    record(recorder, [0])
    assert eventually(lambda: recorder.health().state == "held")
    recorder._sender._away_until = 0.0
    assert recorder.flush(10)
    recorder.close()
    assert collector.tokens[0] == "Bearer fp8w_old"
    assert collector.tokens[-1] == "Bearer fp8w_new"


@pytest.mark.parametrize("body", [b"<html>log in</html>", b'{"acked": 999}', b""])
def test_a_200_that_does_not_acknowledge_is_not_believed(
    collector: Collector, settings: AgentSettings, session: Session, body: bytes
) -> None:
    collector.script = [Reply(200, body=body)]
    recorder = Recorder(replace(settings, collector=collector.url), session)
    record(recorder, [0])
    assert eventually(lambda: recorder.flush(1))
    recorder.close()
    assert collector.steps() == [0]


def test_what_was_spooled_while_nobody_listened_is_sent_when_somebody_does(
    refused_url: str, settings: AgentSettings, session: Session
) -> None:
    recorder = Recorder(replace(settings, collector=refused_url), session)
    for s in range(4):
        record(recorder, [s])
        recorder.flush(0.03)
    assert eventually(lambda: recorder.health().records.spooled == 12)
    assert recorder.health().state == "away"
    with serve(port=int(refused_url.rsplit(":", 1)[1])) as collector:
        assert eventually(lambda: recorder.flush(1), timeout_s=20)
        recorder.close()
        assert collector.steps() == list(range(4))
    assert recorder.health().records.acknowledged == 12
    assert not list(settings.spool_dir.iterdir())


def test_without_a_url_everything_goes_to_disk(settings: AgentSettings, session: Session) -> None:
    recorder = Recorder(settings, session)
    record(recorder, range(5))
    recorder.record_tile_maps(make_maps(2))
    assert recorder.flush(10)
    recorder.close()
    health = recorder.health()
    assert (health.records.spooled, health.maps.spooled) == (15, 2)
    assert health.records.balanced
    assert health.maps.balanced
    assert [p.suffix for p in settings.spool_dir.iterdir()] == [".spool"]


def test_capture_requests_are_read_from_the_acknowledgement(
    collector: Collector, settings: AgentSettings, session: Session
) -> None:
    ids = [int(i) for i in make_ids(3)]
    collector.captures = [{"site": ids[0], "steps": [0, 100]}, {"site": ids[1], "steps": [0, 0]}]
    collector.captures += [{"site": ids[2], "steps": [5000, 5016]}]
    recorder = Recorder(replace(settings, collector=collector.url), session)
    assert recorder.wanted_captures() == frozenset()
    record(recorder, [1])
    assert recorder.flush(10)
    assert recorder.wanted_captures() == {ids[0]}, (
        "the others asked for a step that is over, and for one that is far ahead"
    )
    recorder.close()


def test_tile_maps_arrive_bit_for_bit(collector: Collector, settings: AgentSettings, session: Session) -> None:
    recorder = Recorder(replace(settings, collector=collector.url), session)
    maps = make_maps(3)
    recorder.record_tile_maps(maps)
    assert recorder.flush(10)
    recorder.close()
    got = [m for _, body in sorted(collector.maps.items()) for m in wire.decode_tile_maps(body).maps]
    assert [m.scale_inv.tobytes() for m in got] == [m.scale_inv.tobytes() for m in maps]
    assert recorder.health().maps.acknowledged == 3


def test_a_collector_without_tile_maps_still_gets_the_steps(
    collector: Collector, settings: AgentSettings, session: Session
) -> None:
    collector.script = [Reply(404)]
    recorder = Recorder(replace(settings, collector=collector.url), session)
    recorder.record_tile_maps(make_maps(1))
    assert recorder.flush(10)
    record(recorder, [0])
    assert recorder.flush(10)
    recorder.close()
    assert collector.steps() == [0]
    assert recorder.health().maps.dropped == {"http_404": 1}


def test_each_batch_carries_the_books(collector: Collector, settings: AgentSettings, session: Session) -> None:
    recorder = Recorder(replace(settings, collector=collector.url), session)
    recorder.set_gauge("overhead_ratio", 0.004)
    record(recorder, [0])
    assert recorder.flush(10)
    record(recorder, [1])
    assert recorder.flush(10)
    recorder.close()
    first, second = (b.header.health for b in collector.batches())
    assert (first["produced"], first["acknowledged"], first["queued"]) == (3, 0, 3)
    assert (second["produced"], second["acknowledged"], second["queued"]) == (6, 3, 3)
    assert first["overhead_ratio"] == 0.004
    json.dumps(first)


def test_close_says_that_the_session_ended(collector: Collector, settings: AgentSettings, session: Session) -> None:
    recorder = Recorder(replace(settings, collector=collector.url), session)
    record(recorder, [0])
    assert recorder.flush(10)
    assert collector.farewells() == []
    recorder.close()
    (farewell,) = collector.farewells()
    assert farewell.header.health["ended"] == 1.0


def test_what_is_recorded_while_a_poll_ends_is_sent_by_close(
    collector: Collector, settings: AgentSettings, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_its_end, go_on = threading.Event(), threading.Event()
    recorder = Recorder(replace(settings, collector=collector.url, batch_interval_s=60.0), session)
    assert eventually(lambda: bool(collector.sessions))

    def look(self: FolderWatch) -> None:
        at_its_end.set()
        go_on.wait(10)

    monkeypatch.setattr(FolderWatch, "look", look)
    assert at_its_end.wait(10)
    record(recorder, [0])  # the poll has looked for steps already
    threading.Timer(0.1, go_on.set).start()
    recorder.close(10)
    assert collector.steps() == [0]
    assert len(collector.farewells()) == 1
    assert not list(settings.spool_dir.glob("*.*"))


@pytest.mark.parametrize("status", [429, 503, 401])
def test_an_end_that_is_not_taken_is_spooled(
    collector: Collector, settings: AgentSettings, session: Session, status: int
) -> None:
    recorder = Recorder(replace(settings, collector=collector.url), session)
    record(recorder, [0])
    assert recorder.flush(10)
    collector.always = Reply(status, {"Retry-After": "60"})
    recorder.close(10)
    assert collector.farewells() == []
    collector.always = None
    assert sync.main(["--spool-dir", str(settings.spool_dir), "--collector", collector.url]) == 0
    (farewell,) = collector.farewells()
    assert farewell.header.health["ended"] == 1.0


def test_an_end_that_is_not_taken_in_time_is_left_to_whoever_has_taken_over(
    collector: Collector, settings: AgentSettings, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(replace(settings, collector=collector.url), session)
    record(recorder, [0])
    assert recorder.flush(10)
    sender = recorder._sender
    assert sender is not None
    assert sender.uploader is not None
    send, kept = sender.uploader.send, []

    def late(*args: Any) -> Any:
        receipt = send(*args)
        sender.abandoned = True  # `close` waited no longer
        return receipt

    monkeypatch.setattr(sender.uploader, "send", late)
    monkeypatch.setattr(sender, "_keep", kept.append)
    collector.always = Reply(503, {"Retry-After": "60"})
    recorder.close(10)
    assert kept == []


def test_a_session_that_is_registered_and_never_sent_a_step_says_its_end_too(
    collector: Collector, settings: AgentSettings, session: Session
) -> None:
    recorder = Recorder(replace(settings, collector=collector.url), session)
    assert eventually(lambda: bool(collector.sessions))
    recorder.close()
    (farewell,) = collector.farewells()
    assert (farewell.header.health["ended"], farewell.header.num_records) == (1.0, 0)


def test_facts_that_only_running_shows_travel_without_a_batch(
    collector: Collector, settings: AgentSettings, session: Session
) -> None:
    recorder = Recorder(replace(settings, collector=collector.url), session)
    assert eventually(lambda: session.session in collector.sessions)
    recorder.update_facts({"no_step_ended": "call watch.step()"})
    told = {"ok": True, "no_step_ended": "call watch.step()"}
    assert eventually(lambda: collector.sessions[session.session]["facts"] == told)
    num_requests = len(collector.requests)
    time.sleep(10 * settings.poll_interval_s)
    assert len(collector.requests) == num_requests  # once
    assert collector.batches() == []
    recorder.close()
