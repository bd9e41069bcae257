"""What an installation brings along."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def resolved(extra, tmp_path):
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "-q", "--report", str(report)]
    out = subprocess.run([*command, f"{ROOT}{extra}"], capture_output=True, text=True)
    if out.returncode and ("No matching distribution" in out.stderr or "ConnectionError" in out.stderr):
        pytest.skip(f"no package registry reachable: {out.stderr.strip().splitlines()[-1]}")
    assert out.returncode == 0, out.stderr
    return {i["metadata"]["name"].lower() for i in json.loads(report.read_text())["install"]}


def test_the_server_extra_pulls_in_no_torch(tmp_path):
    names = resolved("[server]", tmp_path)
    assert {"fastapi", "sqlalchemy", "fp8watch"} <= names
    assert not {n for n in names if n.startswith(("torch", "nvidia", "triton"))}


def test_the_base_is_what_the_agent_needs(tmp_path):
    assert resolved("", tmp_path) == {"fp8watch", "numpy", "msgspec", "zstandard", "urllib3"}


def test_a_wheel_carries_everything_that_is_read_at_run_time(tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    import zipfile

    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for package, base in (("fp8watch", "."), ("fp8watch_agent", "agent"), ("fp8watch_server", "server")):
        folder = ROOT / base / package
        wanted = {
            f"{package}/{p.relative_to(folder)}"
            for p in folder.rglob("*")
            if p.is_file() and "__pycache__" not in p.parts
        }
        assert wanted - names == set()
    assert not {n for n in names if n.startswith("tests/")}
