"""Versions that were tried are told once: in the table, the extras, the requirements of `make test-stacks`, and the docs.

`python tests/house/test_stacks.py` writes the table of docs/integrations.md.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from fp8watch.integrations import tested_versions
from fp8watch.integrations.tested_versions import STACKS, untested

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "integrations.md"
MARKS = "<!-- versions -->\n", "<!-- /versions -->"


def table() -> str:
    rows = [
        f"| {s.package} | {s.oldest if s.oldest == s.newest else f'{s.oldest}, {s.newest}'} | {s.how} | "
        + (f"`pip install 'fp8watch[{s.extra}]'` |" if s.extra else "|")
        for s in STACKS
    ]
    return "\n".join(["| package | versions | how | with fp8watch |", "|---|---|---|---|", *rows])


def test_the_page_has_the_table_of_the_code() -> None:
    text = PAGE.read_text().split(MARKS[0])[1].split(MARKS[1])[0]
    assert text.strip() == table(), "run python tests/house/test_stacks.py to write it"


def test_extras_begin_where_tests_began_and_end_behind_the_newest() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for stack in (s for s in STACKS if s.extra):
        (asked,) = (d for d in extras[stack.extra] if re.match(rf"{stack.package}\b(?!-)", d))
        low, high = re.fullmatch(rf"{stack.package}>=([\d.]+),<([\d.]+)", asked).groups()
        assert _release(stack.oldest)[: len(_release(low))] == _release(low), stack
        assert _release(stack.oldest) < _release(high) > _release(stack.newest), stack


def test_the_newest_versions_are_those_that_are_run() -> None:
    lines = (ROOT / "tests" / "stacks" / "requirements.txt").read_text().splitlines()
    pinned = dict(line.partition(" ")[0].split("==") for line in lines if "==" in line)
    run = {s.package: s.newest for s in STACKS if s.package != "transformer-engine"}
    assert {k: v for k, v in pinned.items() if k in run} == run
    versions = re.search(r"versions=\(([\d. ]+)\)", (ROOT / "tests" / "te" / "real" / "run.sh").read_text())[1].split()
    (engine,) = (s for s in STACKS if s.package == "transformer-engine")
    assert (versions[0], versions[-1]) == (engine.oldest, engine.newest)


def test_an_untested_version_is_said_once(monkeypatch) -> None:
    installed = {"transformers": "99.1.0", "lightning": STACKS[1].newest}

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError
        return installed[name]

    monkeypatch.setattr(tested_versions.metadata, "version", version)
    monkeypatch.setattr(tested_versions, "_said", set())
    (line,) = untested(["torch", "transformers", "lightning", "accelerate"])
    assert line.startswith("transformers 99.1.0 was not tested with this version of fp8watch; ")
    assert untested(["transformers"]) == []
    installed["transformers"] = STACKS[0].newest + "rc1"
    assert untested(["transformers"], again=True) == []


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in version.split("."))


if __name__ == "__main__":
    head, rest = PAGE.read_text().split(MARKS[0])
    PAGE.write_text(f"{head}{MARKS[0]}\n{table()}\n\n{MARKS[1]}{rest.split(MARKS[1])[1]}")
