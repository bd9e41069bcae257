"""Parts of the pages between markers are what a command writes: nothing is typed into them, and nothing in them is old."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmarks import table
from benchmarks.detection import page as of_detection
from house.written_by import strangers
from proving import forecast_score, score
from proving import page as of_proving
from proving.run import read

ROOT = Path(__file__).parents[2]
BENCHMARKS = (ROOT / "docs" / "benchmarks.md").read_text()
DETECTION = (ROOT / "docs" / "detection.md").read_text()
PARTS = table.parts_of(BENCHMARKS)
VERSIONS = re.compile(r"\(Python [\w.]+, torch [\w.+]+, CPU\)")
"""Of where it was made, and not of where it is made again."""


def between(begin: str, end: str) -> str:
    """What stands between two markers of the page of detection, which has each of them once."""
    [part] = re.findall(rf"^{re.escape(begin)}\n(.*?)\n{re.escape(end)}$", DETECTION, re.M | re.S)
    return str(part)


def test_the_part_of_the_proving_ground_is_made_from_its_raw_lines() -> None:
    made = of_proving.part(list(read(score.KEPT).values()))
    have = between(of_proving.BEGIN, of_proving.END)
    assert VERSIONS.search(have)
    assert VERSIONS.sub("", have).splitlines() == VERSIONS.sub("", made).splitlines(), (
        "PYTHONPATH=tests python -m proving.score --kept writes it"
    )


def test_the_part_of_the_forecasts_is_made_from_its_raw_lines() -> None:
    made = forecast_score.part(list(read(forecast_score.KEPT).values()))
    have = f"{forecast_score.BEGIN}\n{between(forecast_score.BEGIN, forecast_score.END)}\n{forecast_score.END}"
    assert VERSIONS.search(have)
    assert VERSIONS.sub("", have).splitlines() == VERSIONS.sub("", made).splitlines(), (
        "PYTHONPATH=tests python -m proving.forecasts --print prints it"
    )


@pytest.mark.parametrize(("markers", "made"), of_detection.made().items(), ids=["long runs", "thresholds"])
def test_the_other_parts_of_detection_are_what_their_command_writes(markers: tuple[str, str], made: str) -> None:
    assert between(*markers).splitlines() == made.splitlines(), "python -m benchmarks.detection.page writes it"


def test_every_measured_section_of_detection_is_in_markers_and_names_its_command() -> None:
    parts = re.findall(r"^<!-- (?!end of )([\w ]+) -->\n## [^\n]+\n\nMade by `(?:make|python) ", DETECTION, re.M)
    assert parts == ["proving ground", "forecasts", "long healthy trainings", "thresholds"]
    assert DETECTION.count("<!-- end of ") == len(parts)
    outside = re.sub(r"^<!-- ([\w ]+) -->$.*?^<!-- end of \1 -->$", "", DETECTION, flags=re.M | re.S)
    assert "Made by" not in outside


@pytest.mark.parametrize("family", PARTS)
def test_a_part_of_the_benchmarks_is_one_that_its_program_could_have_written(family: str) -> None:
    heading, _, _, *rest = PARTS[family].splitlines()  # its command is read off the program in test_operating_point.py
    assert strangers(ROOT / "tests" / "benchmarks" / f"{family}.py", "\n".join([heading, *rest])) == []


PROGRAM = """
def main(names, took_s):
    cells = [(f"**{n}**, warm", f"{took_s:.1f}") for n in names] + [("copy", "1.0")]
    shown = table.table(("case", "seconds"), cells)
    text = f"## Copies\\n\\nOf {took_s:.1f} s in {names}.\\n\\n{shown}\\n"
    table.write("copies", text)
"""
WRITTEN = "## Copies\n\nOf 0.5 s in both.\n\n| case | seconds |\n|---|---|\n| **a**, warm | 0.5 |\n| copy | 1.0 |"


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("", "", []),
        ("0.5 s in both", "0.7 s in one", []),
        ("Of 0.5 s", "Of half a s", ["Of half a s in both."]),
        ("\n\n| case", "\n\nOther work ran.\n\n| case", ["Other work ran."]),
        ("| copy", "| copy before", ["copy before"]),
        ("| seconds", "| minutes", ["minutes"]),
        ("1.0 |", "1.0 |\n\nWhat misses its goal.", ["What misses its goal."]),
    ],
)
def test_what_was_typed_into_a_part_is_found(tmp_path: Path, old: str, new: str, found: list[str]) -> None:
    program = tmp_path / "copies.py"
    program.write_text(PROGRAM)
    assert strangers(program, WRITTEN.replace(old, new, 1)) == found


def test_a_remark_behind_a_part_stays_when_the_part_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(table, "OUT", tmp_path / "benchmarks.md")
    table.write("steps", "## Steps\n\nold")
    table.write("peers", "## Peers\n\nold")
    first = table.OUT.read_text().replace("<!-- /steps -->\n", "<!-- /steps -->\n\n*Remark.* The machine was busy.\n")
    table.OUT.write_text(first)
    capsys.readouterr()
    table.write("steps", "## Steps\n\nnew")
    assert "see whether it still holds:\n\n*Remark.* The machine was busy." in capsys.readouterr().out
    table.write("kernels", "## Kernels\n\nnew")
    text = table.OUT.read_text()
    assert list(table.parts_of(text)) == ["kernels", "steps", "peers"]
    assert table.notes_of(text) == {"steps": "*Remark.* The machine was busy."}
    assert text.count("## Not measured") == 1


def test_what_stands_between_the_parts_of_the_benchmarks_is_a_remark() -> None:
    assert BENCHMARKS.startswith(table.HEAD)
    assert [n for n, text in table.notes_of(BENCHMARKS).items() if not text.startswith("*Remark.*")] == []
