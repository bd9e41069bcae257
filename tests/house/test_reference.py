"""The reference pages list the commands, options and variables that there are.

`python tests/house/test_reference.py` writes their tables.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import fp8watch
from fp8watch.cli import HELP
from fp8watch_agent.settings import VARIABLES

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
WRITE = "run python tests/house/test_reference.py to write it"


class Parsed(Exception):
    """Carries a command's parser out of its `main`."""


def commands() -> dict[str, argparse.ArgumentParser]:
    """Command -> its parser, by calling each up to the point where it reads its arguments."""

    def stop(self: argparse.ArgumentParser, *_: object, **__: object) -> None:
        raise Parsed(self)

    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        for entry in sorted(entry_points(group="fp8watch.commands"), key=lambda e: e.name):
            with pytest.raises(Parsed) as caught:
                entry.load()([])
            found[entry.name] = caught.value.args[0]
    return found


def _rows(parser: argparse.ArgumentParser, prefix: str = "") -> Iterator[tuple[str, str]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for choice in action._choices_actions:
                yield f"{prefix}{choice.dest}", choice.help or ""
                yield from _rows(action.choices[choice.dest], f"{prefix}{choice.dest} ")
        elif not isinstance(action, argparse._HelpAction):
            shown = ", ".join(action.option_strings) or (
                action.metavar if isinstance(action.metavar, str) else action.dest.upper()
            )
            text = (action.help or "").replace("%(default)s", str(action.default))
            text = re.sub(r" *\(default: [^()]*/[^()]*\)", "", text)
            choices = f"one of {', '.join(map(str, action.choices))}" if action.choices else ""
            yield f"{prefix}{shown}", "; ".join(t for t in (text, choices) if t).replace("|", "\\|")


def commands_table() -> str:
    """Sections of commands.md."""
    out = []
    for name, parser in commands().items():
        rows = [] if name == "serve" else list(_rows(parser))
        table = [f"| `{shown}` | {text} |" for shown, text in rows]
        out += [f"## fp8watch {name}", "", HELP[name][0].upper() + HELP[name][1:] + ".", ""]
        out += [*(["| argument | meaning |", "|---|---|", *table, ""] if table else [])]
    return "\n".join(out).strip()


def variables_table() -> str:
    """Rows of agent.md."""
    rows = [f"| `{v.name}` | {v.default} | {v.help} |" for v in VARIABLES]
    return "\n".join(["| variable | default | meaning |", "|---|---|---|", *rows])


def _between(page: str, mark: str) -> str:
    return (REFERENCE / page).read_text().split(f"<!-- {mark} -->\n")[1].split(f"\n<!-- /{mark} -->")[0].strip()


def test_every_command_and_option_is_listed() -> None:
    assert _between("commands.md", "commands") == commands_table(), WRITE


def test_every_variable_of_the_agent_is_listed() -> None:
    assert _between("agent.md", "variables") == variables_table(), WRITE


def test_every_public_name_is_on_the_page() -> None:
    listed = re.findall(r"^::: fp8watch\.(\w+)$", (REFERENCE / "python.md").read_text(), re.M)
    assert sorted(listed) == sorted(set(fp8watch.__all__) - {"__version__"})


if __name__ == "__main__":
    for page, mark, text in (
        ("commands.md", "commands", commands_table()),
        ("agent.md", "variables", variables_table()),
    ):
        head, rest = (REFERENCE / page).read_text().split(f"<!-- {mark} -->\n")
        (REFERENCE / page).write_text(
            f"{head}<!-- {mark} -->\n\n{text}\n\n<!-- /{mark} -->{rest.split(f'<!-- /{mark} -->')[1]}"
        )
    sys.exit(0)
