"""`bisect`: which layers, and which of their operands, must leave FP8 for a failure to go.

Shapes:     "module:function" -> Bisection
Thread:     the caller's; each trial is a process of its own

The function trains a few steps, from a checkpoint or from the start, as often as it takes: it must fail alike each time.
Finished trials are kept in a file, so that a bisection that was interrupted goes on where it was.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fp8watch.diagnose.answer_pictures import bisection_picture
from fp8watch.diagnose.bisect_search import fewest
from fp8watch.diagnose.tell_incident import tell_incident
from fp8watch.recipe import OPERANDS

VERSION = 1
Ranking = Callable[[list[str]], Iterable[str]] | Sequence[str]
"""Names in the order of suspicion, or a function that puts them into it. Names that it leaves out come last."""


class TrialError(RuntimeError):
    """A trial that says nothing: killed, out of time or memory, without a model or a loss, or with an error of the program.
    Trials before it are kept."""


@dataclass(frozen=True)
class TrialResult:
    """One trial."""

    leave: tuple[str, ...]
    """What stayed in high precision."""
    failed: bool
    said: str
    seconds: float = 0.0


@dataclass(frozen=True)
class Bisection:
    """What was found. `print(found)` says it in a sentence."""

    verdict: str
    """fp8: leaving `culprits` out helps. shared: it fails without any FP8 as well. not-reproduced: it does not fail."""
    culprits: tuple[str, ...]
    """ "module.operand", or "module" where no single operand of it is enough."""
    modules: tuple[str, ...]
    trials: tuple[TrialResult, ...]

    @property
    def culprit_modules(self) -> tuple[str, ...]:
        """Modules of the culprits."""
        return tuple(dict.fromkeys(module_of(name) for name in self.culprits))

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "sentence": str(self)}

    def as_svg(self) -> str:
        """A picture: what stayed in high precision in each trial, and what came of it."""
        return bisection_picture(self)

    def send(self, incident: str, collector: str | None = None, token: str | None = None) -> None:
        """Attach this to an incident, whose page then shows it.

        Args:
            incident: its id, or the address of its page.
            collector: URL, for an id; else FP8WATCH_COLLECTOR.
            token: with scope ingest; else FP8WATCH_TOKEN, or what is in FP8WATCH_TOKEN_FILE.

        Raises:
            ValueError: no collector is named.
            OSError: it cannot be reached, or refuses; the message says why.
        """
        tell_incident("bisection", self.as_json(), incident, collector, token)

    def __str__(self) -> str:
        num = f"{len(self.trials)} trial{'' if len(self.trials) == 1 else 's'}, {len(self.modules)} modules in FP8"
        if self.verdict == "not-reproduced":
            return f"It does not fail ({self.trials[0].said}): nothing to bisect; {num}."
        if self.verdict == "shared":
            return f"It fails with every module in high precision too ({self.trials[-1].said}): FP8 is not the cause; {num}."
        return f"With {' and '.join(self.culprits)} in high precision it does not fail, with all in FP8 it does; {num}."


def module_of(name: str) -> str:
    """The module of "module.operand" or "module"."""
    module, _, operand = name.rpartition(".")
    return module if operand in OPERANDS else name


def bisect(
    target: str | Callable[..., Any],
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    recipe: str | None = None,
    limit: float | None = None,
    ranking: Ranking | None = None,
    operands: bool = True,
    nproc: int = 1,
    state: str | os.PathLike[str] | None = None,
    timeout_s: float | None = None,
    on_progress: Callable[[TrialResult, int], None] | None = None,
) -> Bisection:
    """Find the fewest layers and operands that must leave FP8 for a failure to go.

    Args:
        target: "module:function", or a function that a module has under that name. It is given a `Trial`, on which it
            calls `trial.attach(model)`; it returns True where training failed, or its losses. A training that raises has
            failed, but for errors of names, types, imports, files and memory.
        checkpoint: path that the function finds as `trial.checkpoint`.
        recipe: name of a recipe that wins over the function's own.
        limit: a loss above it is a failure; None: only one that is not finite.
        ranking: which modules to suspect first, such as those that an incident names; None: the order of the model.
        operands: name the operands as well, in up to 3 trials more for each module.
        nproc: above 1 each trial runs under torchrun, with so many processes on this machine; a failure of one rank counts.
        state: file that keeps finished trials; None: nothing is kept.
        timeout_s: for a trial.
        on_progress: is told of each trial as it ends, and how many there are by then.

    Returns:
        The Bisection.

    Raises:
        ValueError, TypeError: an argument that cannot work, with value, rule and remedy.
        TrialError: a trial ended without a result; with `state` the next call goes on behind the last one that had one.
    """
    name = _name_of(target)
    if isinstance(nproc, bool) or not isinstance(nproc, int) or nproc < 1:
        raise ValueError(f"nproc={nproc!r}: must be a whole number of processes, 1 or more")
    if limit is not None and math.isnan(limit):
        raise ValueError("limit=nan: no loss is above it; give a number, or None")
    if timeout_s is not None and not timeout_s > 0:
        raise ValueError(f"timeout_s={timeout_s!r}: must be above 0, or None")
    asked: dict[str, Any] = {
        "target": name,
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "recipe": recipe,
    }
    asked |= {"limit": limit, "nproc": nproc, "version": VERSION}
    trials = _Trials(asked, None if state is None else Path(state), timeout_s, on_progress)
    if not trials.run(frozenset()).failed:
        return trials.found("not-reproduced", ())
    modules = trials.modules
    if trials.run(frozenset(modules)).failed:
        return trials.found("shared", ())
    order = _ranked(modules, ranking)
    left = fewest(order, lambda leave: not trials.run(leave).failed, ranked=ranking is not None)
    if operands:
        left = _operands_of(left, lambda leave: not trials.run(leave).failed)
    return trials.found("fp8", tuple(left))


def _operands_of(modules: list[str], helps: Callable[[frozenset[str]], bool]) -> list[str]:
    """Of each module the operand that is enough, or the module: two operands of it are all of its GEMMs."""
    left, inputs = list(modules), [f"{module}.{OPERANDS[0]}" for module in modules]
    if len(left) > 1 and helps(frozenset(inputs)):  # several that fail together mostly fail alike
        return inputs
    for i, module in enumerate(modules):
        for part in (f"{module}.{operand}" for operand in OPERANDS):
            if helps(frozenset([*left[:i], part, *left[i + 1 :]])):
                left[i] = part
                break
    return left


def _name_of(target: str | Callable[..., Any]) -> str:
    if isinstance(target, str):
        if target.count(":") != 1:
            raise ValueError(f"{target!r}: must be 'module:function', such as 'train:one_trial'")
        return target
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", "<")
    if not module or module == "__main__" or "<" in name:
        raise ValueError(f"{target!r}: each trial imports it anew; give one of a module, or 'module:function'")
    return f"{module}:{name}"


def _ranked(modules: list[str], ranking: Ranking | None) -> list[str]:
    wanted = [] if ranking is None else list(ranking(list(modules)) if callable(ranking) else ranking)
    first = [name for name in dict.fromkeys(map(module_of, wanted)) if name in modules]
    return [*first, *(name for name in modules if name not in first)]


class _Trials:
    """Runs trials, each set once."""

    def __init__(
        self,
        asked: dict[str, Any],
        state: Path | None,
        timeout_s: float | None,
        on_progress: Callable[[TrialResult, int], None] | None,
    ) -> None:
        self._asked, self._state, self._timeout_s, self._on_progress = asked, state, timeout_s, on_progress
        self.modules: list[str] = []
        self._kept: dict[frozenset[str], TrialResult] = {}
        self._used: dict[frozenset[str], TrialResult] = {}
        if state is not None and state.exists():
            self._load(state)
        try:
            self._save()  # not behind the first trial, which would be lost
        except OSError as e:
            raise ValueError(f"state={str(state)!r}: cannot be written ({e}); give another file") from e

    def _load(self, state: Path) -> None:
        try:
            kept = json.loads(state.read_text())
            before = {k: kept[k] for k in self._asked}
            results = [TrialResult(tuple(r["leave"]), r["failed"], r["said"], r["seconds"]) for r in kept["trials"]]
        except (ValueError, KeyError, TypeError, OSError) as e:
            raise ValueError(f"state={str(state)!r}: no state of a bisection ({e}); give another file") from e
        for name, value in self._asked.items():
            if before[name] != value:
                rule = f"is of {name}={before[name]!r}, not {value!r}"
                raise ValueError(f"state={str(state)!r}: {rule}; give another file")
        self.modules = list(kept["modules"])
        self._kept = {frozenset(r.leave): r for r in results}

    def run(self, leave: frozenset[str]) -> TrialResult:
        """The result of a trial with these left in high precision."""
        known = self._used.get(leave) or self._kept.get(leave)
        if known is None:
            known = self._kept[leave] = self._run(leave)
            self._save()
        if leave not in self._used:
            self._used[leave] = known
            if self._on_progress is not None:
                self._on_progress(known, len(self._used))
        return known

    def _run(self, leave: frozenset[str]) -> TrialResult:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="fp8watch-bisect-") as folder:
            request = Path(folder) / "request.json"
            given = {**self._asked, "leave": sorted(leave), "modules": self.modules, "out": folder}
            request.write_text(json.dumps(given))
            ended = self._process(request)
            answers = [json.loads(p.read_text()) for p in sorted(Path(folder).glob("rank*.json"))]
        broken = next((a for a in answers if a["failed"] is None and a["raised"]), None)
        failed = next((a for a in answers if a["failed"]), None)
        if failed is None and len(answers) < self._asked["nproc"]:
            broken = broken or {"said": ended}
        told = next((a for a in answers if a["failed"] is not None), None)
        if broken is not None or told is None:
            why = (broken or answers[0])["said"]
            raise TrialError(f"a trial ended without a result ({why}), with {_named(leave)} in high precision")
        if not self.modules:
            self.modules = next((a["modules"] for a in answers if a["modules"]), [])
        if not self.modules:
            why = f" ({failed['said']})" if failed is not None else ""
            raise TrialError(
                f"the function took no module to FP8{why}; call trial.attach(model), or trial.announce(names)"
            )
        said = (failed or told)["said"]
        return TrialResult(tuple(sorted(leave)), failed is not None, said, round(time.monotonic() - began, 2))

    def _process(self, request: Path) -> str:
        """Run it; returns how it ended, in words."""
        many = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self._asked['nproc']}"]
        command = [sys.executable, *(many if self._asked["nproc"] > 1 else []), "-m", "fp8watch.diagnose.bisect_trial"]
        # the compute path alone: a trial is no run that somebody watches
        environ = {**os.environ, "FP8WATCH_DISABLED": "stats"}
        process = subprocess.Popen([*command, str(request)], env=environ, stdout=sys.stderr)
        try:
            return f"exit status {process.wait(self._timeout_s)}"
        except subprocess.TimeoutExpired:
            return f"not within {self._timeout_s:g} s"
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def _save(self) -> None:
        if self._state is None:
            return
        kept = {**self._asked, "modules": self.modules, "trials": [asdict(r) for r in self._kept.values()]}
        part = self._state.with_name(self._state.name + ".part")
        part.write_text(json.dumps(kept, indent=1))
        part.replace(self._state)

    def found(self, verdict: str, culprits: tuple[str, ...]) -> Bisection:
        """The result, with the trials that it follows from."""
        return Bisection(verdict, culprits, tuple(self.modules), tuple(self._used.values()))


def _named(leave: frozenset[str]) -> str:
    names = sorted(leave)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "nothing"
