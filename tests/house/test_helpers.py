"""Helpers of tests lie beside them, or in tests/support: a test that imports another one fails with it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_no_test_imports_another_one() -> None:
    found = []
    for path in sorted(TESTS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found += [
                f"{path.relative_to(TESTS)}:{node.lineno} imports {name}"
                for name in names
                if any(part.startswith("test_") for part in name.split("."))
            ]
    assert not found, "move what they share to a module of helpers in the room: " + "; ".join(found)


def test_what_all_rooms_share_lies_in_support() -> None:
    assert [path.name for path in TESTS.glob("*.py")] == ["conftest.py"]


def test_no_test_takes_a_port_by_its_number() -> None:
    """Rooms run beside each other: two that meet at one port are one failure, now and then."""
    taken = re.compile(r"""MASTER_PORT["']?\s*[:=,]\s*["']?[1-9]\d+""")
    assert [
        str(path.relative_to(TESTS)) for path in sorted(TESTS.rglob("*.py")) if taken.search(path.read_text())
    ] == []
