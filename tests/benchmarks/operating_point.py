"""At which settings of attach a published figure was made, read off the program that makes it.

attach's defaults are what people run, so they are what is published; another setting is a second column and is named
beside it. What a program passes to attach is found in its text: no figure can forget to say it.
"""

from __future__ import annotations

import ast
import os
from pathlib import Path

SETTINGS = ("every", "overhead_budget", "tile_maps", "probes", "sites", "windows", "hash_every")
"""Arguments of attach that decide how much is looked at, and when."""
VARIABLES = ("FP8WATCH_EVERY", "FP8WATCH_MERGE_STEPS")
"""The same from the environment."""
REFUSED = (*VARIABLES, "FP8WATCH_RECIPE", "FP8WATCH_DISABLED")
"""Variables that nobody may have set where a published figure is made: what is computed, and what is switched off, as well."""

HERE = Path(__file__).parent
DEFAULTS = ", at attach's defaults"
COMMANDS = {"gpu": "make bench-gpu"}


def settings_of(program: Path) -> tuple[str, ...]:
    """Settings of attach that a program passes and that are not its defaults, as they are written in a call; none of one
    that never attaches.

    A value that is not written out is `…`: `every=…`. Calls of helpers that hand their arguments on count as well, and
    so do arguments in a dict and variables of the environment.
    """
    if not attaches(program):
        return ()
    defaults = _defaults()
    found = set()
    for name, given in _given(ast.parse(program.read_text())):
        try:
            value = ast.literal_eval(given)
        except ValueError:
            found.add(f"{name}=…")
            continue
        if name not in defaults or value != defaults[name]:
            found.add(f"{name}={value!r}")
    return tuple(sorted(found))


def _given(tree: ast.Module) -> list[tuple[str, ast.expr]]:
    """Settings and variables that a program gives, and what it gives them."""
    pairs: list[tuple[str | None, ast.expr]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            pairs += [(word.arg, word.value) for word in node.keywords]
        elif isinstance(node, ast.Dict):
            keys = zip(node.keys, node.values, strict=True)
            pairs += [(str(k.value), v) for k, v in keys if isinstance(k, ast.Constant)]
        elif isinstance(node, ast.Assign):
            places = [t.slice for t in node.targets if isinstance(t, ast.Subscript)]
            pairs += [(str(place.value), node.value) for place in places if isinstance(place, ast.Constant)]
    return [(name, value) for name, value in pairs if name in SETTINGS + VARIABLES]


def refuse_other_settings() -> None:
    """Figures of a shell that says what to look at, or how often, are not those of attach's defaults. What measures asks
    this first, before hours are lost; what writes a page asks it as well.

    Raises:
        SystemExit: one of REFUSED is set.
    """
    if here := [name for name in REFUSED if os.environ.get(name)]:
        raise SystemExit(f"{', '.join(here)}: published figures are made at attach's defaults; unset it")


def _defaults() -> dict[str, object]:
    """Setting -> its default, where that is written out in attach's signature."""
    tree = ast.parse((HERE.parents[1] / "fp8watch" / "session" / "attach.py").read_text())
    [attach] = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "attach"]
    given = zip(attach.args.kwonlyargs, attach.args.kw_defaults, strict=True)
    return {a.arg: d.value for a, d in given if a.arg in SETTINGS and isinstance(d, ast.Constant)}


def attaches(program: Path) -> bool:
    """Whether a program attaches at all, by attach itself, a helper or an adapter of a trainer."""
    calls = [n.func for n in ast.walk(ast.parse(program.read_text())) if isinstance(n, ast.Call)]
    names = [f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "") for f in calls]
    return any(n in ("attach", "attached") or n.startswith(("attach_", "Fp8Watch")) for n in names)


def made_by(family: str) -> str:
    """The line that a part of docs/benchmarks.md begins with: its command, and its settings of attach."""
    program = HERE / f"{family}.py"
    command = COMMANDS.get(family, f'make bench ARGS="{family}"')
    settings = ", ".join(f"`{s}`" for s in settings_of(program))
    if settings:
        return f"Made by `{command}`. Not at attach's defaults where a row says so: {settings}."
    return f"Made by `{command}`{DEFAULTS if attaches(program) else ''}."


def not_at_defaults(*programs: Path) -> str:
    """What a page says of programs that pass another setting, in a sentence; nothing of those that pass none."""
    settings = sorted({s for program in programs for s in settings_of(program)})
    return f"Not at attach's defaults: {', '.join(f'`{s}`' for s in settings)}." if settings else ""


def headed(family: str, text: str) -> str:
    """A part with this line under its first heading.

    Raises:
        SystemExit: it was made in an environment of other settings.
    """
    refuse_other_settings()
    heading, _, rest = text.strip().partition("\n")
    return f"{heading}\n\n{made_by(family)}\n{rest}"
