"""What a benchmark could have written, read off its program: the fixed words of its text, the columns and rows of its tables.

A part of a page that was changed by hand no longer fits the program, and would be lost the next time that it is run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

HERE = Path(__file__).parents[1]
NUMBER = r"[-+−]?(?:[\d.,]+(?:e[-+]?\d+)?|nan|inf)%?"
VALUE = r"[^\n|]{0,200}?"
NEW_LINE = re.escape("\n")
TABLE = r"(?:\|[^\n]*\|\n)*\|[^\n]*\|"


class Program:
    """A module, and what its expressions may come to as text."""

    def __init__(self, path: Path) -> None:
        self.tree = ast.parse(path.read_text())
        self.functions = {n.name: n for n in self.tree.body if isinstance(n, ast.FunctionDef)}
        self.given: dict[str, list[ast.expr]] = {}
        """Names of the function that is being read."""
        self.added: dict[str, list[ast.expr]] = {}

    def within(self, function: ast.FunctionDef, found: list[ast.expr]) -> str:
        """Of expressions of a function."""
        outer = self.given, self.added
        self.given, self.added = {}, {}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.given.setdefault(node.targets[0].id, []).append(node.value)
            elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                self.added.setdefault(node.target.id, []).append(node.value)
        pattern = _one_of(map(self.pattern, found))
        self.given, self.added = outer
        return pattern

    def pattern(self, node: ast.expr) -> str:
        """A regular expression of what it may come to."""
        match node:
            case ast.Constant(str(text)):
                return re.escape(text)
            case ast.JoinedStr(values):
                return "".join(map(self.pattern, values))
            case ast.FormattedValue(value, _, spec):
                return NUMBER if spec is not None else self.pattern(value)
            case ast.BinOp(left, ast.Add(), right):
                return self.pattern(left) + self.pattern(right)
            case ast.IfExp(_, one, other) | ast.BoolOp(_, [one, other]):
                return _one_of(map(self.pattern, (one, other)))
            case ast.Name(name) if all(map(_is_text, found := self.given.get(name, []))) and found:
                more = "".join(map(self.pattern, self.added.get(name, [])))
                return _one_of(map(self.pattern, found)) + more
            case ast.Call(ast.Attribute(_, "table") | ast.Name("table")):
                return TABLE
            case ast.Call(ast.Name(name)) if name in self.functions:
                return self.within(self.functions[name], list(_returned(self.functions[name])))
        return VALUE

    def texts(self) -> list[str]:
        """Of what is handed to `write`, a pattern for each function that does."""
        found = []
        for function in self.functions.values():
            calls = [n for n in ast.walk(function) if isinstance(n, ast.Call) and len(n.args) == 2]
            if written := [n.args[1] for n in calls if _name(n.func) == "write"]:
                found.append(self.within(function, written))
        return found

    def labels(self) -> Iterator[str]:
        """Of each piece of text in the program: a row or a column is named by one."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.JoinedStr):
                if "".join(str(v.value) for v in node.values if isinstance(v, ast.Constant)).strip():
                    yield self.pattern(node)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield re.escape(node.value)
            elif isinstance(node, ast.keyword) and node.arg:
                yield re.escape(node.arg)
            elif isinstance(node, ast.Attribute):  # torch.bfloat16
                yield re.escape(node.attr)

    def imported(self) -> list[Path]:
        """Rooms of tests that it takes something from."""
        nodes = [n for n in ast.walk(self.tree) if isinstance(n, ast.ImportFrom)]
        names = [f"{n.module}.{a.name}" for n in nodes for a in n.names] + [str(n.module) for n in nodes]
        return [p for name in names if (p := HERE / f"{name.replace('.', '/')}.py").is_file()]


def _returned(node: ast.AST) -> Iterator[ast.expr]:
    """By a function, and not by those inside of it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Return) and child.value is not None:
            yield child.value
        elif not isinstance(child, ast.FunctionDef | ast.Lambda):
            yield from _returned(child)


def _one_of(patterns: Iterable[str]) -> str:
    kinds = list(dict.fromkeys(patterns))
    return kinds[0] if len(kinds) == 1 else f"(?:{'|'.join(kinds)})"


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr | ast.BinOp | ast.Call) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


@cache
def _labels(path: Path) -> re.Pattern[str]:
    program = Program(path)
    found = {label for p in (path, *program.imported()) for label in Program(p).labels()}
    return re.compile("|".join(sorted(found | {NUMBER, ""}, key=len)), re.S)


def strangers(path: Path, text: str) -> list[str]:
    """What of a text the program of this file could not have written: lines where its words do not fit, else names of
    columns and rows."""
    patterns, lines = Program(path).texts(), text.strip().splitlines()
    whole = "\n".join(lines)
    if not any(re.fullmatch(pattern, whole + end) for pattern in patterns for end in ("", "\n", "\n\n")):
        known = [re.compile(line) for pattern in patterns for line in pattern.split(NEW_LINE) if _is_whole(line)]
        odd = [line for line in lines if line[:1] not in ("", "|") and not any(k.fullmatch(line) for k in known)]
        return odd or ["its tables and paragraphs stand in another order"]
    named, cells = _labels(path), []
    for before, line in zip(["", *lines], lines, strict=False):
        if line.startswith("|") and not re.fullmatch(r"[|-]+", line):
            found = line[2:-2].split(" | ")
            cells += found[:1] if before.startswith("|") else found
    return [cell for cell in cells if not named.fullmatch(cell.strip())]


def _is_whole(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True
