"""`fp8watch sync` may be killed at any point, and run any number of times: the collector ends up with the same."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from support.agents import Collector, make_maps, make_session, record

from fp8watch_agent.recorder import Recorder
from fp8watch_agent.settings import AgentSettings

POINTS = (
    "fp8watch_agent.sync:recover:before:1",
    "fp8watch_agent.sync:recover:after:1",
    "fp8watch_agent.spool_segment:SegmentWriter.append:before:1",
    "fp8watch_agent.spool_segment:SegmentWriter.append:after:1",
    "fp8watch_agent.spool_segment:SegmentWriter.close:after:1",
    "os:replace:before:1",
    "os:replace:after:1",
    "fp8watch_agent.sync:Sync._send_segment:before:1",
    "fp8watch_agent.sync:Sync._send_segment:before:2",
    "fp8watch_agent.uploader:Uploader.register:after:1",
    "fp8watch_agent.transport:Transport.post:before:1",
    "fp8watch_agent.transport:Transport.post:after:1",
    "fp8watch_agent.transport:Transport.post:after:3",
    "fp8watch_agent.sync:Sync._send_segment:after:1",
    "fp8watch_agent.sync:Sync.run:after:1",
)


def test_killed_at_each_point_and_run_again_it_delivers_the_same(tmp_path: Path, collector: Collector) -> None:
    left, copies = tmp_path / "left", tmp_path / "copies"
    settings = AgentSettings(spool_dir=left, ring_bytes=1 << 20, poll_interval_s=0.01, batch_interval_s=0.01)
    recorder = Recorder(settings, make_session())
    for s in range(4):
        record(recorder, [s])
        assert recorder.flush(10)
    recorder.record_tile_maps(make_maps(2))
    assert recorder.flush(10)
    with recorder._sender.lock:  # these stay in the ring, as they would at a SIGKILL
        record(recorder, range(4, 9))
        shutil.copytree(left, tmp_path / "killed")
    recorder.close(0.3)
    copies.mkdir()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    arguments = [str(tmp_path / "killed"), str(copies), collector.url, *POINTS]
    command = [sys.executable, "-m", "faults.sync_killed", *arguments]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for point in POINTS:
            one = json.loads(process.stdout.readline())
            assert one["point"] == point
            assert one["killed"], "a point that is not reached proves nothing"
            assert one["again"] == [0, 0], one
            assert one["rest"] == [], one
            # Three runs over the same folder: each body came under its one key, with its one content.
            assert collector.num_conflicts == 0
            assert (collector.steps(), collector.num_records()) == (list(range(9)), 27), one
            assert len(collector.maps) == 1
            collector.stored.clear()
            collector.maps.clear()
            process.stdin.write("\n")
            process.stdin.flush()
        assert process.wait(60) == 0
