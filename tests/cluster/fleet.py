"""The ranks of `fp8watch load` as a process of its own, so that they share no interpreter with whoever measures.

Each acknowledged batch is a line on its standard output: run, session, rank, sequence number, hash of the body.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.account import Key
from cluster.kit import eventually


class Fleet:
    """Ranks in runs, one URL each.

    Args:
        runs: run id -> URL that its ranks send to.
        num_ranks: of all runs together.
        rate: steps a second of each rank; a batch is one step of 20 sites.
    """

    def __init__(self, runs: dict[str, str], num_ranks: int, rate: float) -> None:
        self.runs = list(runs)
        self.acked: dict[Key, bytes] = {}
        self.acked_at: list[float] = []
        given = json.dumps({"runs": runs, "num_ranks": num_ranks // len(runs), "rate": rate})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cluster.fleet", given],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, daemon=True)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            run, session, rank, seq, digest = line.split()
            self.acked[run, session, int(rank), int(seq)] = bytes.fromhex(digest)
            self.acked_at.append(time.time())

    def __enter__(self) -> Fleet:
        self._reader.start()
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            failed = self._process.wait(120)
        finally:
            self._process.kill()
        self._reader.join(20)
        if self._process.stdout is not None:
            self._process.stdout.close()
        assert exc[0] is not None or failed == 0

    def goes_on(self, num: int, timeout_s: float = 180.0) -> None:
        """So many more batches are acknowledged."""
        wanted = len(self.acked) + num
        eventually(
            lambda: self._process.poll() is not None or len(self.acked) >= wanted,
            timeout_s,
            lambda: f"{len(self.acked)}",
        )


def main(given: dict[str, Any]) -> None:
    """Send until the standard input ends."""
    from fp8watch_server.load.drive import run_load
    from fp8watch_server.load.stream import Body, LoadPlan, RankStream

    stop, told, failed = threading.Event(), threading.Lock(), list[BaseException]()

    def send(number: int, run: str, url: str) -> None:
        plan = LoadPlan(
            num_ranks=given["num_ranks"],
            num_sites=20,
            num_steps=1 << 20,
            run=run,
            seed=number,
            step_s=1 / given["rate"],
        )
        sessions = {rank: RankStream(plan, rank).session for rank in range(plan.num_ranks)}

        def on_ack(rank: int, body: Body) -> None:
            digest = hashlib.sha256(body.data).hexdigest()[:32]
            with told:
                print(run, sessions[rank], rank, body.seq, digest, flush=True)

        try:
            run_load(plan, url, rate=given["rate"], num_senders=8, stop=stop, on_ack=on_ack)
        except BaseException as e:
            failed.append(e)

    threads = [
        threading.Thread(target=send, args=(number, run, url))
        for number, (run, url) in enumerate(given["runs"].items())
    ]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    stop.set()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def quantile(values: Sequence[float], share: float) -> float:
    """Value that `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
