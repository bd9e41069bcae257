"""`fp8watch serve` with fakes in place of the detectors and the pages: what the process tests start."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from collector.kit import Recorder

from fp8watch_server import command, committer, rebuild
from fp8watch_server.app import create_app


def answer_late(seconds: float) -> None:
    """Wait between a commit and its answers: a crash point of some width."""
    settle = committer.settle

    def late(answers: list[object]) -> None:
        time.sleep(seconds)
        settle(answers)

    committer.settle = late


def main(argv: list[str]) -> int:
    """Serve until told to stop; with FP8WATCH_TEST_WHOLE nothing is a fake."""
    deadline_s = os.environ.get("FP8WATCH_TEST_DEADLINE_S")
    if deadline_s:
        command.LIMITS = replace(command.LIMITS, header_s=float(deadline_s), idle_s=float(deadline_s))
    if os.environ.get("FP8WATCH_TEST_WHOLE"):
        return command.main(argv)
    detection = Recorder().detection()
    command.create_app = lambda settings: create_app(
        settings, detection=detection, dispatcher=lambda engine, settings: None, pages=False
    )
    answer_late(float(os.environ.get("FP8WATCH_TEST_ANSWER_LATE_S", "0")))
    rebuild.REPLAY_SAMPLES = int(os.environ.get("FP8WATCH_TEST_REPLAY_SAMPLES", rebuild.REPLAY_SAMPLES))
    return command.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
