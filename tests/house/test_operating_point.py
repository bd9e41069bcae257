"""What is published is made at attach's defaults; another setting is a second column, and is named."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from benchmarks.detection.long_score import RESULTS
from benchmarks.detection.score import ALWAYS, RAREST
from benchmarks.operating_point import SETTINGS, VARIABLES, headed, made_by, settings_of
from benchmarks.table import ORDER

from fp8watch.session.overhead_budget import MAX_EVERY

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "benchmarks.md").read_text()
DETECTION = (ROOT / "docs" / "detection.md").read_text()
PARTS = dict(re.findall(r"<!-- (\w+) -->\n(.*?)\n<!-- /\1 -->", PAGE, re.S))
NO_STEP = {"agent"}
"""Parts about what is sent of a step, which no setting of attach makes dearer: each row says what its records hold."""


@pytest.mark.parametrize("family", PARTS)
def test_a_part_of_the_benchmarks_names_its_command_and_its_settings(family: str) -> None:
    """Read off the program: one that is made to pass another setting no longer fits the page."""
    assert family in ORDER
    assert PARTS[family].splitlines()[2] == made_by(family)


@pytest.mark.parametrize("family", [f for f in PARTS if settings_of(ROOT / "tests" / "benchmarks" / f"{f}.py")])
def test_another_setting_stands_beside_the_defaults(family: str) -> None:
    assert family in NO_STEP or re.search(r"^\| (?:\*\*)?as attached", PARTS[family], re.M)


@pytest.mark.parametrize(
    ("line", "settings"),
    [
        ("attach(model)", ()),
        ("attach(model, every=1, overhead_budget=0.01)", ()),
        ("attach(model, every=64)", ("every=64",)),
        ("attach(model, every=n)", ("every=…",)),
        ("attach(model, **{'overhead_budget': None})", ("overhead_budget=None",)),
        ("options['hash_every'] = 0; attach(model, **options)", ("hash_every=0",)),
        ("os.environ['FP8WATCH_EVERY'] = '64'; attach(model)", ("FP8WATCH_EVERY='64'",)),
        ("subprocess.run(x, env={**os.environ, 'FP8WATCH_EVERY': '64'}); attach(model)", ("FP8WATCH_EVERY='64'",)),
    ],
)
def test_a_setting_is_found_however_a_program_gives_it(tmp_path: Path, line: str, settings: tuple[str, ...]) -> None:
    program = tmp_path / "program.py"
    program.write_text(line)
    assert settings_of(program) == settings


@pytest.mark.parametrize("name", VARIABLES)
def test_nothing_is_published_from_a_shell_of_another_setting(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "64")
    with pytest.raises(SystemExit, match=f"{name}.*attach's defaults"):
        headed("steps", "## A training step")


def test_a_page_that_names_a_program_names_its_settings() -> None:
    named = [
        (page.name, program.stem, settings)
        for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
        for program in (ROOT / "tests" / "benchmarks").glob("*.py")
        if re.search(rf"benchmarks\.{program.stem}\b", text := page.read_text())
        for settings in settings_of(program)
        if f"`{settings}`" not in text
    ]
    assert named == []


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


def test_detection_is_scored_where_attach_gives_least_and_beside_it_where_it_gives_most() -> None:
    assert (RAREST, ALWAYS) == (MAX_EVERY, 1)
    assert f"here once in {RAREST}, in turns over the sites" in DETECTION
    assert f"| | goal | full statistics once in {RAREST} steps | in each step |" in DETECTION
    recorded = settings_of(ROOT / "tests" / "benchmarks" / "detection" / "record.py")
    assert "every=1, overhead_budget=None" in DETECTION
    assert recorded == ("overhead_budget=None",)


def test_the_long_runs_say_that_they_are_of_another_setting() -> None:
    settings = settings_of(ROOT / "tests" / "benchmarks" / "detection" / "long_runs.py")
    assert f"Operating point: `{', '.join(settings)}`, not attach's defaults" in DETECTION
    assert RESULTS.exists()


@pytest.mark.parametrize("part", ["Proving ground", "Test of the engine", "Long healthy trainings"])
def test_a_part_of_the_page_of_detection_names_its_command(part: str) -> None:
    [text] = re.findall(rf"^##+ {part}[^\n]*\n\n([^\n]+)", DETECTION, re.M) or [f"no {part}"]
    assert re.match(r"(?:Not run yet|Made by `(?:make|python) )", text)


def test_figures_of_the_readme_say_at_which_setting() -> None:
    """Shares of a step, and faults that were found or named."""
    bullets = re.split(r"\n(?=- |\n)", (ROOT / "README.md").read_text())
    figures = [b for b in bullets if re.search(r"\d\.\d+ of a step|(?:found|named) \d+|\d+ of \d+ (?:faults|runs)", b)]
    assert len(figures) >= 2
    assert [b for b in figures if "defaults" not in b and not any(f"`{s}=" in b for s in SETTINGS)] == []
