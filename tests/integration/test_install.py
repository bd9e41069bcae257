"""What an installation brings along."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]


def brought_along(extra):
    """Names of all that an extra needs, by what is installed here: no registry is asked, and no version is chosen."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"].get(extra, [])]
    todo = [wanted for wanted in map(Requirement, lines) if is_needed(wanted, "")]
    seen = set()
    while todo:
        wanted = todo.pop()
        if str(wanted) in seen:
            continue
        seen.add(str(wanted))
        todo += [
            other
            for other in map(Requirement, requires(wanted.name) or [])
            if any(is_needed(other, name) for name in ("", *wanted.extras))
        ]
    return {canonicalize_name(Requirement(line).name) for line in seen}


def is_needed(wanted, extra):
    return wanted.marker is None or wanted.marker.evaluate({"extra": extra})


def resolved(extra, tmp_path):
    """Names of what the registry would install."""
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "-q", "--report", str(report)]
    out = subprocess.run([*command, f"{ROOT}[{extra}]" if extra else str(ROOT)], capture_output=True, text=True)
    if out.returncode and ("No matching distribution" in out.stderr or "ConnectionError" in out.stderr):
        pytest.skip(f"no package registry reachable: {out.stderr.strip().splitlines()[-1]}")
    assert out.returncode == 0, out.stderr
    return {i["metadata"]["name"].lower() for i in json.loads(report.read_text())["install"]} - {"fp8watch"}


# By metadata with every change; by the registry, which chooses the versions that a user gets, with the long tests.
WAYS = [
    pytest.param(lambda extra, _: brought_along(extra), id="installed"),
    pytest.param(resolved, marks=pytest.mark.long),
]


@pytest.mark.parametrize("way", WAYS)
def test_the_server_extra_pulls_in_no_torch(way, tmp_path):
    names = way("server", tmp_path)
    assert {"fastapi", "sqlalchemy", "starlette"} <= names
    assert not {n for n in names if n.startswith(("torch", "nvidia", "triton"))}


@pytest.mark.parametrize("way", WAYS)
def test_the_base_is_what_the_agent_needs(way, tmp_path):
    assert way("", tmp_path) == {"numpy", "msgspec", "zstandard", "urllib3"}


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
