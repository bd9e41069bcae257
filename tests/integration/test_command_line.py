"""The command line where something of its surroundings is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fp8watch_agent import relay


def test_a_reader_that_has_enough_is_no_error():
    command = [sys.executable, "-m", "fp8watch", "rules", "list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


@pytest.mark.parametrize("command", ["rules", "grafana", "replay"])
def test_help_needs_no_docstrings(command):
    done = subprocess.run(
        [sys.executable, "-OO", "-m", "fp8watch", command, "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_port_of_a_relay_is_one(capsys):
    assert relay.main(["--collector", "http://127.0.0.1:9", "--port", "99999"]) == 2
    assert "--port=99999" in capsys.readouterr().err
