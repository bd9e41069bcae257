"""What reads bytes of others runs none of them: no pickle, no Arrow, no torch.load; and SQL is never put together of text."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("server/fp8watch_server", "agent/fp8watch_agent")
EXECUTES = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "pyarrow", "torch", "numexpr"}
RAW_SQL = {"text", "exec_driver_sql", "literal_column", "TextClause"}
PUT_TOGETHER = {
    "db/fence.py",
    "moving/copying.py",
    "db/embedded.py",
    "db/planner_statistics.py",
    "db/row_security.py",
    "db/sql_views.py",
    "db/sql_chart_views.py",
    "db/sql_gain_view.py",
    "db/dialect.py",
}
"""Definitions of schemas, roles and settings: names of our own, or quoted by the dialect or the driver; no value and nobody's input."""


def trees() -> Iterator[tuple[str, ast.Module]]:
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            if "migrations/versions" not in path.as_posix():
                yield path.relative_to(ROOT / room).as_posix(), ast.parse(path.read_text())


def test_nothing_is_imported_that_executes_what_it_reads() -> None:
    for name, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                modules = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                modules = {(node.module or "").partition(".")[0]} if not node.level else set()
            else:
                continue
            writes = {"pyarrow"} if name.startswith("export/") else set()
            assert not modules & EXECUTES - writes, f"{name}: imports {modules & EXECUTES}"


def test_what_writes_parquet_reads_none_of_others() -> None:
    for name, tree in trees():
        if name.startswith("export/"):
            called = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
            assert not called & {"read_table", "read_schema", "ParquetDataset", "deserialize"}, name


def test_nothing_is_called_that_executes_what_it_reads() -> None:
    for name, tree in trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            assert not (isinstance(node.func, ast.Name) and called in ("eval", "exec")), (
                f"{name}:{node.lineno}: {called}"
            )
            assert "allow_pickle" not in {k.arg for k in node.keywords}, f"{name}:{node.lineno}"


def test_sql_is_bound_or_built_and_never_put_together() -> None:
    found: dict[str, list[int]] = {}
    for name, tree in trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if called in RAW_SQL and not isinstance(node.args[0], ast.Constant):
                found.setdefault(name, []).append(node.lineno)
    assert set(found) <= PUT_TOGETHER, found
