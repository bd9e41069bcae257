"""The docs say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

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
    for page in [root / "README.md", root / "CONTRIBUTING.md", *DOCS.glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            if not (page.parent / target).exists():
                wrong.append((page.name, target))
    assert wrong == []


def test_every_command_says_what_it_does(capsys):
    assert main(["--help"]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert len(lines) >= 10
    assert [line for line in lines if len(line) < 2] == []
