"""The docs say what the code does."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path
from xml.etree import ElementTree

import yaml
from benchmarks import capacity

from fp8watch.cli import main
from fp8watch_agent.record import FIELDS, Measured, StepPresent, TileFlag

DOCS = Path(__file__).parents[2] / "docs"


def test_the_glossary_lists_every_field_of_the_sketch():
    text = (DOCS / "glossary.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \| .*? \| (\w+) \| ([\w, ]+) \|", text.split("<!-- fields -->")[1], re.M)
    assert listed == [(f.name, f.merge, ", ".join(b.name.lower() for b in Measured if b in f.group)) for f in FIELDS]


def test_the_wire_page_has_the_bits_of_the_code():
    text = (DOCS / "wire.md").read_text().lower()
    for flags in (Measured, StepPresent):
        for bit in flags:
            assert f"{int(bit)} {bit.name.lower()}" in text
    for bit in TileFlag:
        assert f"{int(bit)} {bit.name.lower().replace('_', '-')}" in text


def test_links_between_pages_resolve():
    root = DOCS.parent
    wrong = []
    for page in [*root.glob("*.md"), *DOCS.rglob("*.md"), root / "examples" / "README.md"]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            if not (page.parent / target).exists():
                wrong.append((page.name, target))
    assert wrong == []


def test_the_page_of_examples_shows_every_example() -> None:
    """A line that is no snippet stands on the page as it is, and nobody who builds it is told."""
    shown = re.findall(r'^--8<-- "examples/(\w+\.py)"$', (DOCS / "examples.md").read_text(), re.M)
    assert sorted(shown) == sorted(path.name for path in (DOCS.parent / "examples").glob("*.py"))


def test_the_capacity_model_stands_on_its_page_as_it_is_computed() -> None:
    """And keeps the scalars of every rank for a day, as retention does: a month of them is of one rank."""
    written = (DOCS / "scale.md").read_text().split("<!-- capacity -->\n")[1].split("\n<!-- /capacity -->")[0]
    assert written == capacity.page(written.rpartition("|\n\n")[2])
    small, large = (capacity.of_fleet(n) for n in (1_000, 100_000))
    kept = "GB stored: a month of scalars of one rank"
    assert small[kept] == large[kept] < 1


def test_files_that_pages_name_exist() -> None:
    """Paths and modules in code marks. `<slug>` stands for any."""
    root = DOCS.parent
    wrong = []
    for page in [*root.glob("*.md"), *DOCS.rglob("*.md"), root / "examples" / "README.md"]:
        for name in re.findall(
            r"`((?:fp8watch|agent|server|tests|docs|examples|dashboards)/[^`\s:]*)`", page.read_text()
        ):
            if not any(root.glob(re.sub(r"<\w+>", "*", name.rstrip("/")))):
                wrong.append((page.name, name))
        for name in re.findall(r"`(fp8watch(?:_agent|_server)?(?:\.\w+)+)`", page.read_text()):
            if find_name(name) is None:
                wrong.append((page.name, name))
    assert wrong == []


def find_name(name: str) -> object:
    """A module, or something in one; None where there is none."""
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return None


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    nav = (DOCS.parent / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    listed = re.findall(r"(\S+\.md)$", nav, re.M)
    assert sorted(listed) == sorted(p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md"))


def test_the_picture_of_the_architecture_names_the_rooms_that_there_are() -> None:
    text = (DOCS / "images" / "architecture.svg").read_text()
    ElementTree.fromstring(text)
    assert not re.findall(r"""(?:href|src|url)\s*[=(]\s*["']?http""", text), "it loads nothing"
    rooms = re.findall(r'class="room"[^>]*>([^<]+)<', text)
    named = [r for line in rooms for r in _rooms(line)]
    assert len(named) >= 15
    assert [name for name in named if find_name(name) is None] == []


def _rooms(line: str) -> list[str]:
    """`fp8watch_agent.sender, .spool` names two."""
    parts = [p.strip() for p in line.split(",")]
    if not parts[0].startswith("fp8watch"):
        return []
    package = parts[0].split(".")[0]
    return [package + p if p.startswith(".") else p for p in parts]


def test_hooks_before_a_commit_have_the_versions_of_the_checks() -> None:
    root = DOCS.parent
    pinned = set((root / "constraints.txt").read_text().splitlines())
    hooks = yaml.safe_load((root / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    wanted = {d for hook in hooks for d in hook["additional_dependencies"]}
    assert {d for d in wanted if d.startswith("ruff")} <= pinned
    assert all("==" in d for d in wanted)


def test_every_command_says_what_it_does(capsys):
    assert main(["--help"]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert len(lines) >= 10
    assert [line for line in lines if len(line) < 2] == []
