"""What an installation brings along."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from fp8watch_agent.version import __version__

ROOT = Path(__file__).parents[2]
DASHBOARDS = ROOT / "dashboards" / "grafana" / "dashboards"


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
    pytest.param(resolved, marks=pytest.mark.heavy(8, "pyproject.toml")),
]


@pytest.mark.parametrize("way", WAYS)
def test_the_server_extra_pulls_in_no_torch(way, tmp_path):
    names = way("server", tmp_path)
    assert {"fastapi", "sqlalchemy", "starlette"} <= names
    assert not {n for n in names if n.startswith(("torch", "nvidia", "triton"))}


@pytest.mark.parametrize("way", WAYS)
def test_the_base_is_what_the_agent_needs(way, tmp_path):
    assert way("", tmp_path) == {"numpy", "msgspec", "zstandard", "urllib3"}


@pytest.mark.heavy(4, "pyproject.toml", first=True)
def test_a_wheel_carries_everything_that_is_read_at_run_time(tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
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
    shipped = "fp8watch_server/observability/shipped/"
    files = {n.removeprefix(shipped) for n in names if n.startswith(shipped)}
    assert {
        "docker-compose.yml",
        "dashboards/prometheus/fp8watch.rules.yml",
        "dashboards/prometheus/alertmanager.yml",
    } <= files
    assert all((ROOT / name).read_bytes() for name in files)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path / "installed")!r})
from fp8watch_server.observability.command import main
sys.exit(main(["files", {str(tmp_path / "files")!r}]) or 10 * main(["files", {str(tmp_path / "files")!r}]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("is there already")) == (10, 1), done.stderr
    written = {str(p.relative_to(tmp_path / "files")) for p in (tmp_path / "files").rglob("*") if p.is_file()}
    assert written == files | {f"dashboards/grafana/dashboards/{p.name}" for p in DASHBOARDS.glob("*.json")}
    assert all((tmp_path / "files" / name).read_bytes() == (ROOT / name).read_bytes() for name in written)
    compose = (tmp_path / "files/docker-compose.yml").read_text()
    assert all((tmp_path / "files" / name).exists() for name in re.findall(r"- \./(dashboards/[\w./-]+):", compose))


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """Folder of the sdist, and of the wheel that is made out of it, as a release makes them."""
    folder = tmp_path_factory.mktemp("release")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "build")], check=True)
    installed = subprocess.run(
        [str(folder / "build/bin/pip"), "install", "-q", "build"], capture_output=True, text=True
    )
    if installed.returncode:
        pytest.skip(f"no package registry reachable: {installed.stderr.strip().splitlines()[-1]}")
    build = [str(folder / "build/bin/python"), "-m", "build", "--outdir", str(folder / "dist"), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "dist"


@pytest.mark.heavy(15, "pyproject.toml")
@pytest.mark.timeout(600)
def test_a_source_distribution_holds_what_is_tracked(release):
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout: nothing to list")
    (sdist,) = release.glob("*.tar.gz")
    with tarfile.open(sdist) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    tracked = {name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()}
    assert {name for name in tracked - names if not name.startswith(".ci/")} == set()
    assert names - tracked <= {"PKG-INFO"}


@pytest.mark.heavy(15, "pyproject.toml")
@pytest.mark.timeout(600)
def test_a_wheel_out_of_the_source_distribution_is_whole(release):
    (wheel,) = release.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"fp8watch-{__version__}.dist-info/METADATA").decode()
    assert f"\nVersion: {__version__}\n" in metadata
    packages = ("fp8watch", "fp8watch_agent", "fp8watch_server")
    assert {name.split("/")[0] for name in names} == {*packages, f"fp8watch-{__version__}.dist-info"}
    for kind, least in {
        r"fp8watch/kernels/cpu_source/.+\.[ch]": 8,
        r"fp8watch_server/.*migrations/versions/\d+_\w+\.py": 1,
        r"fp8watch_server/.*migrations/script\.py\.mako": 1,
        r"fp8watch_server/pages/static/.+\.(js|css|svg)": 15,
        r"fp8watch_server/pages/templates/.+\.html": 10,
        r"fp8watch_server/.*dashboards/.+\.json": 5,
        r"fp8watch_server/.+\.md": 23,  # a runbook for each failure mode
        r"fp8watch(_agent|_server)?/py\.typed": 3,
    }.items():
        assert len([name for name in names if re.fullmatch(kind, name)]) >= least, kind


@pytest.mark.heavy(40, "pyproject.toml")
@pytest.mark.timeout(600)
def test_a_release_serves_from_an_empty_environment_without_torch(release, tmp_path):
    (wheel,) = release.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "env")], check=True)
    subprocess.run([str(tmp_path / "env/bin/pip"), "install", "-q", f"{wheel}[server]"], check=True)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("FP8WATCH", "PYTHON"))}
    env |= {"FP8WATCH_DATABASE_URL": f"sqlite:///{tmp_path / 'fp8watch.sqlite'}", "PYTHONUNBUFFERED": "1"}
    command = str(tmp_path / "env/bin/fp8watch")
    shown = subprocess.run([command, "--version"], cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == __version__
    demo = subprocess.run([command, "demo"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (demo.returncode, demo.stderr.strip()) == (2, "fp8watch: demo needs torch: pip install 'fp8watch[demo]'")
    serve = [command, "serve", "--port", "0"]
    with subprocess.Popen(serve, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = next(w.rstrip(".,;") for line in process.stdout for w in line.split() if w.startswith("http://"))
            for path in ("/", "/healthz", "/runbooks/inf-laundering", "/metrics"):
                with urllib.request.urlopen(url + path, timeout=30) as answer:
                    assert answer.status == 200, path
        finally:
            process.terminate()
            process.wait(20)
