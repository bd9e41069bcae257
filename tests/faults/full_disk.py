"""Runs in a process of its own: records on a disk that is full, gets room, and then a collector.

Arguments: folder, how the disk is full ("tmpfs": the folder is a file system of 1 MiB of this mount namespace; "limit":
no file may grow beyond 256 KiB). Tells the books at each station as JSON.
"""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from support.agents import eventually, make_ids, make_rows, make_session, make_sites, make_step, serve

from fp8watch_agent.recorder import Recorder
from fp8watch_agent.settings import AgentSettings

SITES = 60


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def main() -> None:
    folder, how = Path(sys.argv[1]), sys.argv[2]
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if how == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 10, limit[1]))
    port = free_port()
    recorder = Recorder(
        AgentSettings(
            collector=f"http://127.0.0.1:{port}",
            spool_dir=folder,
            ring_bytes=4 << 20,
            poll_interval_s=0.005,
            batch_interval_s=0.01,
            batch_bytes=64 << 10,
        ),
        make_session(),
    )
    recorder.register_sites(make_sites(SITES))
    ids, step = make_ids(SITES), 0

    def train(num_steps: int) -> None:
        nonlocal step
        for _ in range(num_steps):
            recorder.record_step(make_step(step), ids, make_rows(SITES, step))
            step += 1

    def tell(station: str) -> None:
        health = recorder.health()
        used = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
        print(
            json.dumps(
                {
                    "station": station,
                    "steps": step,
                    "used_bytes": used,
                    "balanced": health.records.balanced,
                    "errors": health.internal_errors,
                    **asdict(health.records),
                }
            ),
            flush=True,
        )

    def stuck() -> bool:
        return recorder._sender.in_hand is not None and "spool" in recorder._sender._told

    for _ in range(200):  # until the disk is full
        train(4)
        if eventually(stuck, 0.02):
            break
    tell("full")
    train(200)  # the ring runs over; nobody waits for anybody
    tell("overrun")
    if how == "tmpfs":
        subprocess.run(["mount", "-o", "remount,size=64m", str(folder)], check=True)
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    eventually(lambda: recorder.health().records.queued == 0, 20)
    tell("room")
    with serve(port=port) as collector:
        eventually(lambda: recorder.flush(1), 40)
        tell("collector")
        recorder.close()
        print(json.dumps({"station": "arrived", "records": collector.num_records()}))


if __name__ == "__main__":
    main()
