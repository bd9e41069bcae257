"""What is published is made at attach's defaults; another setting is a second column, and is named."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.detection.score import ALWAYS, RAREST
from benchmarks.operating_point import REFUSED, SETTINGS, attaches, headed, made_by, settings_of
from benchmarks.table import ORDER, parts_of
from stacks import heads

from fp8watch.session.overhead_budget import MAX_EVERY

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "benchmarks.md").read_text()
DETECTION = (ROOT / "docs" / "detection.md").read_text()
INTEGRATIONS = (ROOT / "docs" / "integrations.md").read_text()
PARTS = parts_of(PAGE)
MEASURE = [*(ROOT / "tests" / "benchmarks").rglob("*.py"), *(ROOT / "tests" / "stacks").glob("*.py")]


@pytest.mark.parametrize("family", PARTS)
def test_a_part_of_the_benchmarks_names_its_command_and_its_settings(family: str) -> None:
    """Read off the program: one that is made to pass another setting no longer fits the page."""
    assert family in ORDER
    assert PARTS[family].splitlines()[2] == made_by(family)


@pytest.mark.parametrize("family", [f for f in PARTS if settings_of(ROOT / "tests" / "benchmarks" / f"{f}.py")])
def test_another_setting_stands_beside_the_defaults(family: str) -> None:
    assert re.search(r"^\| (?:\*\*)?as attached", PARTS[family], re.M)


@pytest.mark.parametrize(
    ("line", "settings"),
    [
        ("attach(model)", ()),
        ("attach(model, every=1, overhead_budget=0.01)", ()),
        ("attach(model, every=64)", ("every=64",)),
        ("attach(model, every=n)", ("every=…",)),
        ("attach(model, **{'overhead_budget': None})", ("overhead_budget=None",)),
        ("options['hash_every'] = 0; attach(model, **options)", ("hash_every=0",)),
        ("Fp8WatchCallback(overhead_budget=None)", ("overhead_budget=None",)),
        ("attach_deepspeed(engine, every=8)", ("every=8",)),
        ("os.environ['FP8WATCH_EVERY'] = '64'; attach(model)", ("FP8WATCH_EVERY='64'",)),
        ("subprocess.run(x, env={**os.environ, 'FP8WATCH_EVERY': '64'}); attach(model)", ("FP8WATCH_EVERY='64'",)),
    ],
)
def test_a_setting_is_found_however_a_program_gives_it(tmp_path: Path, line: str, settings: tuple[str, ...]) -> None:
    program = tmp_path / "program.py"
    program.write_text(line)
    assert settings_of(program) == settings


@pytest.mark.parametrize("name", REFUSED)
def test_nothing_is_published_from_a_shell_of_another_setting(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "64")
    with pytest.raises(SystemExit, match=f"{name}.*attach's defaults"):
        headed("steps", "## A training step")


MAKE = ["benchmarks.run", "benchmarks.detection.score", "benchmarks.detection.long_runs", "benchmarks.detection.long_score",
        "benchmarks.detection.record", "benchmarks.loss_impact", "stacks.families", "stacks.trainers"]  # fmt: skip


@pytest.mark.parametrize("program", MAKE)
def test_what_measures_refuses_such_a_shell_before_it_begins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str
) -> None:
    monkeypatch.setenv("FP8WATCH_EVERY", "64")
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = [str(tmp_path / "made")] if program.endswith(("long_runs", "long_score", "record")) else []
    monkeypatch.setattr(sys, "argv", [program, *folder])
    with pytest.raises(SystemExit, match="FP8WATCH_EVERY.*attach's defaults"):
        importlib.import_module(program).main()
    assert not list(tmp_path.iterdir())


def test_no_program_that_attaches_can_be_started_without_asking() -> None:
    """By itself, or by `headed` where it writes a page; one that `trainers.py` starts has an environment without variables."""
    started = [p for p in MEASURE if attaches(p) and "\ndef main" in p.read_text() and p.name != "trainer_runs.py"]
    assert len(started) > 8
    asks = re.compile(r"^ +refuse_other_settings\(\)$|\bwrite\(\s*\"", re.M)
    assert [p.name for p in started if not asks.search(p.read_text())] == []


def test_a_page_that_names_a_program_names_its_settings() -> None:
    named = [
        (page.name, program.stem, settings)
        for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
        for program in MEASURE
        if re.search(rf"(?:benchmarks|detection|stacks)[./]{program.stem}\b", text := page.read_text())
        for settings in settings_of(program)
        if f"`{settings}`" not in text
    ]
    assert named == []


@pytest.mark.parametrize(
    ("markers", "head"),
    [(heads.FAMILIES, lambda versions: heads.families(versions, 6)), (heads.TRAINERS, heads.trainers)],
)
def test_a_table_of_integrations_begins_as_its_program_writes_it(
    markers: tuple[str, str], head: Callable[[str], list[str]]
) -> None:
    """Command, settings of attach and columns; behind them rows alone."""
    [part] = re.findall(rf"{re.escape(markers[0])}.*?\n{re.escape(markers[1])}", INTEGRATIONS, re.S)
    [versions] = re.findall(r"^Made by `make \w+` \((.*?); CPU", part, re.M)
    lines, fixed = part.splitlines(), head(versions)
    assert lines[: len(fixed)] == fixed
    assert "Not at attach's defaults: `overhead_budget=None`." in part
    assert all(line.startswith("| ") for line in lines[len(fixed) : -1])


def test_what_the_demo_and_the_proving_ground_pass_to_attach_is_no_setting() -> None:
    programs = [*(ROOT / "fp8watch" / "demo").glob("*.py"), *(ROOT / "tests" / "proving").rglob("*.py")]
    assert len(programs) > 40
    assert [(p.name, found) for p in programs if (found := settings_of(p))] == []
    given = [  # Training(attach={…}): what a family's user has to give
        (p.name, key.value)
        for p in programs
        for node in ast.walk(ast.parse(p.read_text()))
        if isinstance(node, ast.Call)
        for word in node.keywords
        if word.arg == "attach" and isinstance(word.value, ast.Dict)
        for key in word.value.keys
        if isinstance(key, ast.Constant)
    ]
    assert [g for g in given if g[1] in SETTINGS] == []


def test_the_engine_is_scored_where_attach_gives_least_and_beside_it_where_it_gives_most() -> None:
    assert (RAREST, ALWAYS) == (MAX_EVERY, 1)
    [settings] = settings_of(ROOT / "tests" / "benchmarks" / "detection" / "record.py")
    assert (
        f"recorded at `{settings}`, replayed with full statistics in each step and thinned to once in {RAREST}"
        in DETECTION
    )


def test_figures_of_the_readme_say_at_which_setting() -> None:
    """Shares of a step, and faults that were found or named."""
    bullets = re.split(r"\n(?=- |\n)", (ROOT / "README.md").read_text())
    figures = [b for b in bullets if re.search(r"\d\.\d+ of a step|(?:found|named) \d+|\d+ of \d+ (?:faults|runs)", b)]
    assert len(figures) >= 2
    assert [b for b in figures if "defaults" not in b and not any(f"`{s}=" in b for s in SETTINGS)] == []
