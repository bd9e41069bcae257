"""Planted bugs find their code after a file was moved or renamed, and say so where they cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.planted_place import file_of, find

CODE = """\
LIMIT = 3

class Outbox:
    @property
    def lease(self):
        return LIMIT

    def take(self):
        return LIMIT


def take():
    return LIMIT
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "server/fp8watch_server/notify").mkdir(parents=True)
    (tmp_path / "server/fp8watch_server/notify/outbox.py").write_text(CODE)
    return tmp_path


@pytest.mark.parametrize(
    ("at", "line"),
    [
        ("outbox:Outbox.lease", 6),
        ("outbox:Outbox.take", 9),
        ("notify.outbox:take", 13),
        ("fp8watch_server.notify.outbox:take", 13),
    ],
)
def test_the_function_that_is_named_is_meant(tree: Path, at: str, line: int) -> None:
    place = find(at, "return LIMIT", tree)
    before = (place.path.read_text()[: place.start] + place.text().partition("return LIMIT")[0]).count("\n")
    assert before + 1 == line
    assert file_of(at, "return LIMIT", tree) == "server/fp8watch_server/notify/outbox.py"


def test_a_module_alone_is_its_whole_file(tree: Path) -> None:
    assert find("outbox", "LIMIT = 3", tree).start == 0


@pytest.mark.parametrize("to", ["fp8watch/other/outbox.py", "server/fp8watch_server/delivery/dispatcher.py"])
def test_a_move_and_a_new_name_change_nothing(tmp_path: Path, to: str) -> None:
    (tmp_path / to).parent.mkdir(parents=True)
    (tmp_path / to).write_text(CODE)
    assert find("outbox:Outbox.lease", "return LIMIT", tmp_path).path == tmp_path / to


@pytest.mark.parametrize(
    ("at", "old", "what"),
    [
        ("outbox:Outbox.leave", "return LIMIT", "outbox.py has no Outbox.leave, and 0 others"),
        ("outbox:Outbox.lease", "return 4", "holds what the bug replaces 0 times"),
        ("outbox", "return LIMIT", "holds what the bug replaces 3 times"),
        ("inbox:give", "return LIMIT", "no module is called 'inbox', and 0 others"),
        ("inbox", "LIMIT = 3", "no module is called 'inbox'"),
    ],
)
def test_what_cannot_be_found_is_said(tree: Path, at: str, old: str, what: str) -> None:
    with pytest.raises(LookupError, match=what):
        find(at, old, tree)


def test_two_modules_of_one_name_are_told_apart(tree: Path) -> None:
    (tree / "fp8watch").mkdir()
    (tree / "fp8watch/outbox.py").write_text(CODE)
    with pytest.raises(LookupError, match="2 modules end in 'outbox'"):
        find("outbox:take", "return LIMIT", tree)
    assert find("fp8watch.outbox:take", "return LIMIT", tree).path == tree / "fp8watch/outbox.py"
