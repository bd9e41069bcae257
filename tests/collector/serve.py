"""`fp8watch serve` with fakes in place of the detectors and the pages: what the process tests start."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from collector.kit import Recorder

from fp8watch_server import cli
from fp8watch_server.app import create_app
from fp8watch_server.ingest import group_commit
from fp8watch_server.pipeline import engine_restore
from fp8watch_server.store import compact


def answer_late(seconds: float) -> None:
    """Wait between a commit and its answers: a crash point of some width."""
    settle = group_commit.answer_all

    def late(answers: list[object]) -> None:
        time.sleep(seconds)
        settle(answers)

    group_commit.answer_all = late


def main(argv: list[str]) -> int:
    """Serve until told to stop; with FP8WATCH_TEST_WHOLE nothing is a fake."""
    deadline_s = os.environ.get("FP8WATCH_TEST_DEADLINE_S")
    if deadline_s:
        cli.LIMITS = replace(cli.LIMITS, header_s=float(deadline_s), idle_s=float(deadline_s))
    if os.environ.get("FP8WATCH_TEST_WHOLE"):
        return cli.main(argv)
    detection = Recorder().detection()
    cli.create_app = lambda settings: create_app(
        settings, detection=detection, dispatcher=lambda engine, settings: None, pages=False
    )
    answer_late(float(os.environ.get("FP8WATCH_TEST_ANSWER_LATE_S", "0")))
    engine_restore.REPLAY_SAMPLES = int(os.environ.get("FP8WATCH_TEST_REPLAY_SAMPLES", engine_restore.REPLAY_SAMPLES))
    if os.environ.get("FP8WATCH_TEST_KEEPS_BATCHES"):  # however long a busy machine takes, each is there to be compared
        compact.CLOSE_AFTER_STEPS = 1 << 40
    return cli.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
