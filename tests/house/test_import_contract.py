"""The order of the rooms, as pyproject.toml has it: it holds, and each contract fails when an import breaks it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("fp8watch", "agent/fp8watch_agent", "server/fp8watch_server")
LINT = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"


def lint(tree: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(str(tree / part) for part in (".", "agent", "server"))}
    return subprocess.run(
        [sys.executable, "-c", LINT], cwd=tree, env=env, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("tree")
    shutil.copy(ROOT / "pyproject.toml", tree)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__", "static"))
    return tree


def test_the_rooms_keep_their_order(copy: Path) -> None:
    done = lint(copy)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("path", "line", "contract"),
    [
        (
            "server/fp8watch_server/settings/__init__.py",
            "import fp8watch.numerics.formats",
            "Training library and collector share the agent, and nothing else",
        ),
        ("agent/fp8watch_agent/ring.py", "def late():\n    import torch", "Agent and collector have no torch"),
        (
            "fp8watch/session/identity.py",
            "if TYPE_CHECKING:\n    from fp8watch.session.watch import Watch",
            "No circle of files or of folders",
        ),
        (
            "fp8watch/recipe/spec.py",
            "def late():\n    from fp8watch.kernels import registry",
            "The way of an operand through the training library",
        ),
        (
            "server/fp8watch_server/detect/step_view.py",
            "from fp8watch_server.store import fields",
            "Detection knows no database",
        ),
        (
            "server/fp8watch_server/store/fields.py",
            "from fp8watch_server.detect import finding",
            "The way of a batch through the collector",
        ),
    ],
)
def test_an_import_against_the_order_is_told(copy: Path, path: str, line: str, contract: str) -> None:
    file = copy / path
    good = file.read_text()
    file.write_text(f"{good}\n{line}\n")
    try:
        done = lint(copy)
    finally:
        file.write_text(good)
    assert done.returncode == 1
    assert f"{contract} BROKEN" in " ".join(done.stdout.split())
