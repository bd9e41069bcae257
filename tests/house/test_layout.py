"""The house: the stages of the way of the data name each other, and no file is a hall."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "fp8watch": ROOT / "fp8watch",
    "fp8watch_agent": ROOT / "agent" / "fp8watch_agent",
    "fp8watch_server": ROOT / "server" / "fp8watch_server",
}


def modules() -> dict[str, Path]:
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join((package, *(p for p in parts if p != "__init__")))
            found[name] = path
    return found


def stages() -> dict[str, tuple[list[str], list[str]]]:
    """Module -> (upstream, downstream), as its docstring says."""
    found = {}
    for name, path in modules().items():
        doc = ast.get_docstring(ast.parse(path.read_text())) or ""
        up = re.search(r"^Upstream:\s*(.*?)(?:\s{2,}Downstream:|$)", doc, re.M)
        down = re.search(r"Downstream:\s*(.*)$", doc, re.M)
        if up or down:
            split = [[w.strip() for w in (m[1] if m else "").split(",") if w.strip()] for m in (up, down)]
            found[name] = (split[0], split[1])
    return found


def test_every_stage_names_modules_that_exist():
    known = set(modules())
    wrong = [
        (name, other)
        for name, sides in stages().items()
        for side in sides
        for other in side
        if not other.startswith("(") and other not in known
    ]
    assert wrong == []


def test_the_way_of_the_data_is_whole():
    """From attach to what people see: following Downstream reaches every end of the way."""
    graph = {name: down for name, (_, down) in stages().items()}
    reached, todo = set(), ["fp8watch.session.attach"]
    while todo:
        name = todo.pop()
        if name in reached:
            continue
        reached.add(name)
        for target in graph.get(name, []):
            todo.append(target)
            todo += [n for n in graph if n.startswith(target + ".")]  # a package stands for its modules
    ends = {
        "fp8watch.sketch.slab",
        "fp8watch_agent.ring",
        "fp8watch_agent.wire",
        "fp8watch_agent.sender",
        "fp8watch_server.ingest.routes",
        "fp8watch_server.detect.engine",
        "fp8watch_server.incidents.fold",
        "fp8watch_server.notify.outbox",
        "fp8watch_server.pages.routes",
        "fp8watch_server.observability.metrics",
    }
    assert ends - reached == set()


def test_files_are_rooms_not_halls():
    halls = {
        name: n
        for name, p in modules().items()
        if ".versions." not in name  # a migration is one act, however many tables it makes
        and (n := len(p.read_text().splitlines())) > 400
    }
    assert halls == {}


def test_the_repository_names_no_machine():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout: nothing to list")
    here = Path(__file__).resolve()
    pattern = re.compile(r"(?:^|[^A-Za-z0-9_./])/(?:work|farm|root)/", re.M)
    wrong = []
    for name in listed.stdout.decode().split("\0"):
        path = ROOT / name
        if name and path.is_file() and path.resolve() != here and path.suffix not in {".png"}:
            wrong += [name] if pattern.search(path.read_text(errors="ignore")) else []
    assert wrong == []


@pytest.mark.parametrize("package", ["fp8watch", "fp8watch_agent"])
def test_importing_loads_no_torch(package):
    code = f"import sys, {package}; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.strip() == "False"
