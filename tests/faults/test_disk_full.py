"""A full disk stops nobody: training goes on, what fits waits in the ring, and the spool drains when space returns."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MOUNT = 'mount -t tmpfs -o size=1m none "$0" && exec "$@"'


def namespaces_work(folder: Path) -> bool:
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", "-Urm", "sh", "-c", MOUNT, str(folder), "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("how", ["tmpfs", "limit"])
def test_training_goes_on_and_the_spool_drains_when_space_returns(how: str, tmp_path: Path) -> None:
    if how == "tmpfs" and not namespaces_work(tmp_path):
        pytest.skip("needs user namespaces: unshare -Urm")
    command = [sys.executable, "-m", "faults.full_disk", str(tmp_path), how]
    if how == "tmpfs":
        command = ["unshare", "-Urm", "sh", "-c", MOUNT, str(tmp_path), *command]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    at = {one["station"]: one for one in map(json.loads, done.stdout.splitlines())}
    for name in ("full", "overrun", "room", "collector"):
        station = at[name]
        assert station["balanced"], station
        assert station["errors"] == {}, station
        assert station["produced"] == 60 * station["steps"], station
    assert at["full"]["spooled"] > 0
    assert at["full"]["queued"] > 0, "the disk was not full"
    assert at["full"]["used_bytes"] <= 1 << 20
    assert at["overrun"]["dropped"].keys() == {"ring_full"}, "the oldest go, and are counted"
    assert at["room"]["queued"] == 0
    assert at["room"]["spooled"] + sum(at["room"]["dropped"].values()) == at["room"]["produced"]
    assert at["collector"]["acknowledged"] + sum(at["room"]["dropped"].values()) == at["room"]["produced"]
    assert at["arrived"]["records"] == at["collector"]["acknowledged"]
