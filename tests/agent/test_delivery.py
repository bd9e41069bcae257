"""What is recorded arrives, bit for bit, once, whatever the collector answers on the way."""

from __future__ import annotations

from dataclasses import replace

from agent_support import make_ids, make_rows, make_sites, make_step
from fp8watch_agent.recorder import Recorder


def test_arrives(collector, settings, session):
    recorder = Recorder(replace(settings, collector=collector.url), session)
    recorder.register_sites(make_sites(7))
    for s in range(30):
        recorder.record_step(make_step(s, loss=float("nan")), make_ids(7), make_rows(7, s), {"aux": 1.5}, "b")
    assert recorder.flush(5)
    print(recorder.health())
    assert collector.steps() == list(range(30))
    recorder.close()
    print(recorder.health(), list(settings.spool_dir.iterdir()))
