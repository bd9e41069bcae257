"""Checks on other people's packages: which of them a change runs in CI, within a budget; what is left out is named.

    python tests/support/real_packages.py te       names of versions, to stdout
    python tests/support/real_packages.py stacks   names of checks

`make test-te` and `make test-stacks` run all; their scripts run this part of them where they are called with --part.
Some are always among them, then come those whose files the commit changed, then others in turn: the commit chooses, so
a run can be repeated, and the next one takes others. A cost is what installing takes on a clean machine (once for what
several checks share) and half of what the check takes on one core, because two run at a time.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))

from support.planted_selection import ROOT, Changed, changed

REQUIREMENTS = ROOT / "tests" / "stacks" / "requirements.txt"


@dataclass(frozen=True)
class Room:
    """The checks of a room, and what they cost.

    Args:
        seconds: of each check on one core.
        budget_s: of a part, by the clock.
        always: what every part has.
        installing: seconds of each package that some need and others do not.
        needs: the packages of a check.
        files: what a check rests on, beside its own file.
    """

    seconds: Mapping[str, float]
    budget_s: float
    always: tuple[str, ...] = ()
    installing: Mapping[str, float] = field(default_factory=dict)
    needs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def cost_s(self, names: list[str]) -> float:
        """Of these together, by the clock."""
        packages = {package for name in names for package in self.needs.get(name, ())}
        return sum(self.installing[p] for p in packages) + sum(self.seconds[name] for name in names) / 2


def needs(text: str) -> dict[str, tuple[str, ...]]:
    """Check -> packages, as the comments in the requirements say it. Raises ValueError where one says nothing."""
    found: dict[str, list[str]] = {}
    for line in filter(None, (line.strip() for line in text.splitlines())):
        if line.startswith("#"):
            continue
        if not (row := re.fullmatch(r"([\w-]+)==\S+\s+# ([\w ]+)", line)):
            raise ValueError(f"{line!r} names no checks; write package==version  # check ...")
        for name in row[2].split():
            found.setdefault(name, []).append(row[1])
    return {name: tuple(packages) for name, packages in found.items()}


TE = Room(
    seconds=dict.fromkeys(("2.9.0", "2.11.0", "2.12.0", "2.16.1", "2.17.1", "2.20.2"), 30.0),
    budget_s=60.0,
    always=("2.9.0", "2.20.2"),
)
STACKS = Room(
    seconds={
        "accelerate": 5.0,
        "adapters": 5.0,
        "attention": 8.0,
        "deepspeed": 14.0,
        "families": 10.0,
        "fix_files": 8.0,
        "lightning": 10.0,
        "megatron": 8.0,
        "mirrors": 8.0,
        "names": 4.0,
        "opacus": 4.0,
        "roles": 10.0,
        "sharded": 30.0,
        "torchtitan": 40.0,
        "transformers": 14.0,
    },
    budget_s=120.0,
    installing={
        "transformers": 25.0,
        "accelerate": 6.0,
        "peft": 2.0,
        "lightning": 20.0,
        "deepspeed": 30.0,
        "megatron-core": 8.0,
        "torchtitan": 20.0,
        "tensorboard": 4.0,
        "wandb": 5.0,
        "mlflow-skinny": 4.0,
        "opacus": 8.0,
    },
    needs=needs(REQUIREMENTS.read_text()),
    files={
        "adapters": ("fp8watch/selection", "agent/fp8watch_agent/roles.py"),
        "attention": ("fp8watch/layers/attention_calls.py", "fp8watch/observer/attention_logits.py"),
        "families": ("fp8watch/layers", "fp8watch/selection"),
        "sharded": ("fp8watch/layers",),
        "fix_files": ("server/fp8watch_server/incidents",),
        "roles": ("fp8watch/selection", "agent/fp8watch_agent/roles.py"),
    },
)
ROOMS = {"te": TE, "stacks": STACKS}


def choose(room: Room, what: Changed | None) -> list[str]:
    """Names of what is run, in the order of the room."""
    commit = what.commit if what is not None else ""
    by_head = what.by_head if what is not None and not what.is_shallow else frozenset()

    def rests_on(name: str) -> bool:
        own = (f"tests/stacks/check_{name}.py", f"fp8watch/integrations/{name}.py", *room.files.get(name, ()))
        return any(file == path or file.startswith(f"{path}/") for path in own for file in by_head)

    def turn(name: str) -> tuple[bool, str]:
        return not rests_on(name), hashlib.sha256(f"{commit} {name}".encode()).hexdigest()

    taken = list(room.always)
    for name in sorted(set(room.seconds) - set(taken), key=turn):
        if room.cost_s([*taken, name]) <= room.budget_s:
            taken.append(name)
    return [name for name in room.seconds if name in taken]


def main(argv: list[str]) -> int:
    """Print the names, and on stderr what is left out."""
    if len(argv) != 1 or argv[0] not in ROOMS:
        print(f"which room? one of {', '.join(ROOMS)}", file=sys.stderr)
        return 2
    room, what = ROOMS[argv[0]], changed()
    names = choose(room, what)
    why = f"chosen by commit {what.commit[:9]}" if what is not None else "without a git history to choose by"
    print(f"{argv[0]}: {len(names)} of {len(room.seconds)}, {why}: {' '.join(names)}", file=sys.stderr)
    for name in (name for name in room.seconds if name not in names):
        print(f"  left out: {name} (make test-{argv[0]} runs all)", file=sys.stderr)
    print("\n".join(names))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
