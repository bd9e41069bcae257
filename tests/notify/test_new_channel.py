"""A new kind of channel is one file: the one of docs/how-to is put into a copy of the server, and used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from notify.receiver import Receiver

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "add-a-notification-channel.md"
RUN = """
import sys
from fp8watch_server.notify.command import main
wrong, slack, right = sys.argv[1:]
assert [main(argv) for argv in (["check", wrong], ["check", slack], ["check", right], ["test"])] == [1, 1, 0, 0]
"""
NTFY = 'kind = "ntfy"\nurl_env = "URL"\ntoken_env = "TOKEN"\n'


def test_the_channel_of_the_how_to_works_as_one_file(tmp_path: Path, receiver_of: Callable[..., Receiver]) -> None:
    shutil.copytree(ROOT / "server" / "fp8watch_server", tmp_path / "fp8watch_server")
    code = PAGE.read_text().split("<!-- example -->\n```python\n")[1].split("```\n<!-- /example -->")[0]
    (tmp_path / "fp8watch_server" / "notify" / "channels" / "ntfy.py").write_text(code)
    wrong, slack, right = (tmp_path / f"{name}.toml" for name in ("wrong", "slack", "right"))
    wrong.write_text(f'[channels.phone]\n{NTFY}priority = 9\nmin_interval = "1 s"\n')
    slack.write_text('[channels.a]\nkind = "slack"\nurl_env = "URL"\ntoken_env = "TOKEN"\n')
    right.write_text(f"[channels.phone]\n{NTFY}priority = 4\n")
    receiver = receiver_of()
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT / 'agent'}", "FP8WATCH_ROUTES": str(right)}
    environ |= {"URL": f"{receiver.url}hidden", "TOKEN": "token-hidden"}
    command = [sys.executable, "-c", RUN, str(wrong), str(slack), str(right)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[channels.phone] priority: 9 must be a whole number from 1 (lowest) to 5" in done.stderr
    assert "min_interval: ntfy takes a message in 5 seconds at most; give 5 s or more" in done.stderr
    assert 'a slack channel takes no token; take it out, or use kind = "ntfy"' in done.stderr
    assert "phone: http://127.0.0.1/…, 60 messages an hour" in done.stdout
    assert "phone: delivered" in done.stdout
    assert "hidden" not in done.stdout + done.stderr
    (got,) = receiver.got
    assert (got.body["topic"], got.body["priority"]) == ("fp8watch", 4)
    assert got.headers["Authorization"] == "Bearer token-hidden"
