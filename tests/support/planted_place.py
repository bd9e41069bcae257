"""Where a planted bug goes: a module and a function, found in the tree wherever they have moved to.

A place is `module:Class.method`, `module:function` or `module`, the module by the end of its dotted name as far as it is
the only one that ends so: `outbox:Outbox.lease`, `store.command:prune_main`. Where the file was renamed, or the function
went to another one, the only function of that name with what is to be replaced in it is meant. What is not Python has
its path.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

PACKAGES = ("fp8watch", "agent/fp8watch_agent", "server/fp8watch_server")


@dataclass(frozen=True)
class Place:
    """A file, and the part of its text, in characters, in which something is replaced."""

    path: Path
    start: int
    end: int

    def text(self) -> str:
        """What stands there."""
        return self.path.read_text()[self.start : self.end]


def find(at: str, old: str, root: Path) -> Place:
    """The place in a tree that an address means; `old` stands there once.

    Raises LookupError where there is none, or more than one.
    """
    if (root / at).is_file():
        return _checked(Place(root / at, 0, len((root / at).read_text())), at, old)
    return _checked(_find(at, old, root), at, old)


def file_of(at: str, old: str, root: Path) -> str:
    """The path of the file that an address means, from the root of the tree."""
    return at if at.endswith(".py") or (root / at).is_file() else _find(at, old, root).path.relative_to(root).as_posix()


def _find(at: str, old: str, root: Path) -> Place:
    name, _, function = at.partition(":")
    named = [path for module, path in _modules(root).items() if module == name or module.endswith(f".{name}")]
    if len(named) > 1:
        raise LookupError(
            f"{at}: {len(named)} modules end in {name!r}; write more of the name of the one that is meant"
        )
    if named and (place := _function(named[0], function)) is not None:
        return place
    elsewhere = [_function(path, function) for path in _modules(root).values()] if function else []
    holders = [place for place in elsewhere if place is not None and old in place.text()]
    if len(holders) != 1:
        where = f"{named[0].name} has no {function}" if named else f"no module is called {name!r}"
        raise LookupError(f"{at}: {where}, and {len(holders)} others have one with what is replaced; put it right")
    return holders[0]


def _checked(place: Place, at: str, old: str) -> Place:
    if (count := place.text().count(old)) != 1:
        raise LookupError(f"{at} holds what the bug replaces {count} times; put it where the code has gone")
    return place


@lru_cache(maxsize=8)
def _modules(root: Path) -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        folder = root / package
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder.parent).with_suffix("").parts
            found[".".join(p for p in parts if p != "__init__")] = path
    return found


def _function(path: Path, name: str) -> Place | None:
    """The lines of a function, method or class of a module, decorators included; the whole file without a name."""
    text = path.read_text()
    if not name:
        return Place(path, 0, len(text))
    lines = text.splitlines(keepends=True)
    for found, first, last in _definitions(path, text):
        if found == name:
            start = sum(len(line) for line in lines[: first - 1])
            return Place(path, start, start + sum(len(line) for line in lines[first - 1 : last]))
    return None


@lru_cache(maxsize=512)
def _definitions(path: Path, text: str) -> tuple[tuple[str, int, int], ...]:
    """(qualified name, first line, last line) of what a module defines; functions inside of functions are a part of them."""
    found = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
                found.append((f"{prefix}{child.name}", first, child.end_lineno or first))
                if isinstance(child, ast.ClassDef):
                    visit(child, f"{prefix}{child.name}.")
            else:
                visit(child, prefix)

    visit(ast.parse(text), "")
    return tuple(found)
