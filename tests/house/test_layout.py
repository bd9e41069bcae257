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


def stages() -> dict[str, dict[str, dict[str, str]]]:
    """Module -> upstream and downstream -> the other module -> how the data gets there, as its docstring says."""
    found = {}
    for name, path in modules().items():
        doc = ast.get_docstring(ast.parse(path.read_text())) or ""
        sides = {side: re.search(rf"^{side}:\s*(.*)$", doc, re.M) for side in ("Upstream", "Downstream")}
        if any(sides.values()):
            found[name] = {
                side: dict(re.findall(r"([\w.]+)(?: \(([^)]*)\))?", line[1])) if line else {}
                for side, line in sides.items()
            }
    return found


def relations() -> list[tuple[str, str, str]]:
    """(from, to, how) of every downstream line."""
    return [(a, b, how) for a, sides in stages().items() for b, how in sides["Downstream"].items()]


def test_the_chain_of_stages_is_told_from_both_sides() -> None:
    told = {(a, b, how) for b, sides in stages().items() for a, how in sides["Upstream"].items()}
    assert told == set(relations())


def imported(path: Path) -> set[str]:
    """Names of what a module imports, also inside of functions: of modules, and of what they hold."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            package = ".".join(module_of(path).split(".")[: -node.level]) + "." if node.level else ""
            names |= {package + node.module} | {f"{package}{node.module}.{alias.name}" for alias in node.names}
    return names


def module_of(path: Path) -> str:
    return next(name for name, other in modules().items() if other == path)


@pytest.mark.parametrize(("source", "target", "how"), relations())
def test_a_stage_hands_over_to_the_next(source: str, target: str, how: str) -> None:
    """By a call, which needs an import; or by what stands in parentheses."""
    paths = modules()
    assert {source, target} <= set(paths)
    if how == "HTTP":
        return
    if how.startswith("table "):
        table = how.removeprefix("table ")
        assert all(re.search(rf"\b{table}\b", paths[m].read_text().split('"""', 2)[2]) for m in (source, target))
    elif how.startswith("wired in "):
        assert {source, target} <= imported(paths[how.removeprefix("wired in ")])
    else:
        assert how == ""
        assert target in imported(paths[source]) or source in imported(paths[target])


def test_the_way_of_the_data_is_whole() -> None:
    """From attach to what people see: following Downstream reaches every end of the way."""
    graph: dict[str, list[str]] = {}
    for source, target, _ in relations():
        graph.setdefault(source, []).append(target)
    reached, todo = set(), ["fp8watch.session.attach"]
    while todo:
        name = todo.pop()
        if name not in reached:
            reached.add(name)
            todo += graph.get(name, [])
    ends = {
        "fp8watch.sketch.slab",
        "fp8watch_agent.ring",
        "fp8watch_agent.wire",
        "fp8watch_agent.sender",
        "fp8watch_server.ingest.routes",
        "fp8watch_server.detect.engine",
        "fp8watch_server.incidents.fold",
        "fp8watch_server.notify.outbox",
        "fp8watch_server.api.routes",
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


def test_no_file_holds_both_sides_of_a_merge() -> None:
    out = subprocess.run(
        ["git", "grep", "-nIE", r"^(<<<<<<< |>>>>>>> |\|\|\|\|\|\|\| )"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert out.returncode in (0, 1), out.stderr
    assert out.stdout == ""
