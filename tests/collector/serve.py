"""`fp8watch serve` with fakes in place of the detectors and the pages: what the process tests start."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from collector.kit import Recorder

from fp8watch_server import command
from fp8watch_server.app import create_app

if __name__ == "__main__":
    detection = Recorder().detection()
    command.create_app = lambda settings: create_app(
        settings, detection=detection, dispatcher=lambda engine, settings: None, pages=False
    )
    sys.exit(command.main(sys.argv[1:]))
