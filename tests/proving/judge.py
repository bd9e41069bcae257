"""What is counted of one run: found or not, by which name, where, after how many steps, and what else was said.

Judged is what people would see: incidents of the API. What the healthy twin says too, of the same mode and module, does
not count. A run and its twin are the same training up to the fault, so what is opened from then on, and not in the twin, is
about the fault. Its first step may lie before: where a site is looked at in turns, it is the step after the last look that
was good; whether it names the fault's own step is counted apart. Delay is to the newest step that the incident rested on
when it was opened, not to its onset.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Line = Mapping[str, Any]
"""A line of results."""

LOUD = ("warning", "critical")
EARLY_STEPS = 1
"""An incident may be opened this much before the first wrong step and be about it: the step that was under way."""

BEFORE_STEPS = 32
LOSS_SIGMA = 6.0


@dataclass
class Judged:
    """One faulty run."""

    line: Line
    found: bool = False
    loud: bool = False
    """A warning or a page, not information alone."""
    said: str = "nothing"
    """Mode that was opened first."""
    cause: bool = False
    """That mode is accepted."""
    place: bool | None = None
    """None: the fault has no place, or was not found."""
    fp8: bool | None = None
    """None: cannot be told, or was not found."""
    dated: bool | None = None
    """Its first step is not before the fault; None: not found."""
    delay: int | None = None
    loss_step: int | None = None
    """First step at which the loss is off its twin; None: it never is."""
    lead: int | None = None
    about: list[dict[str, Any]] = field(default_factory=list)
    """Incidents of this run from the onset on."""
    early: list[dict[str, Any]] = field(default_factory=list)
    """Incidents that were opened before the onset: false."""


def module_of(incident: Mapping[str, Any]) -> str | None:
    """The module that an incident names; DDP's prefix is not part of it."""
    name = incident["place"]["module"]
    return None if name is None else str(name).removeprefix("module.")


def key(incident: Mapping[str, Any]) -> tuple[str, str | None]:
    """By which an incident of the twin is the same."""
    return incident["mode"], module_of(incident)


def opened_step(incident: Mapping[str, Any]) -> int:
    """Newest step that it rested on when it was opened; where that is not known, its first."""
    return int(incident["first_step"] if incident.get("opened_step") is None else incident["opened_step"])


def _plain(name: str) -> str:
    """A module's name without what peft puts around it: the watch leaves it out, faults are drawn with it."""
    return name.removeprefix("base_model.model.").replace(".base_layer", "")


def _within(name: str | None, prefixes: Sequence[str]) -> bool:
    wanted = [_plain(p) for p in prefixes]
    return name is not None and any(_plain(name) == p or _plain(name).startswith(f"{p}.") for p in wanted)


def place_is_right(incident: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    """Module inside one of the expected ones, and the operand where one is expected and one is named."""
    operand, said = expected["operand"], incident["place"]["operand"]
    right_operand = operand is None or said is None or operand == said
    return right_operand and _within(module_of(incident), expected["modules"])


def loss_shows(loss: Sequence[float | None], twin: Sequence[float | None], step: int) -> int | None:
    """First step from `step` on at which the loss is 6 σ off the twin's, or not finite; None where it never is.

    σ is the twin's own spread around its course over the 32 steps before, from the median absolute deviation.
    """
    usual = np.array([np.nan if v is None else v for v in twin[max(0, step - BEFORE_STEPS) : step]])
    course = np.polyval(np.polyfit(np.arange(len(usual)), usual, 1), np.arange(len(usual))) if len(usual) > 8 else usual
    spread = 1.4826 * float(np.nanmedian(np.abs(usual - course))) if len(usual) else 0.0
    for i in range(step, min(len(loss), len(twin))):
        ours, theirs = loss[i], twin[i]
        if ours is None and theirs is not None:
            return i
        if ours is not None and theirs is not None and abs(ours - theirs) > LOSS_SIGMA * max(spread, 1e-6):
            return i
    return None


def judge(line: Line, twin: Line) -> Judged:
    """Judge a faulty run by its twin's side."""
    expected, step = line["expected"], line["step"]
    known = {key(i) for i in twin["incidents"]}
    new = [i for i in line["incidents"] if key(i) not in known]
    about = sorted((i for i in new if opened_step(i) >= step - EARLY_STEPS), key=lambda i: i["opened_at"])
    out = Judged(line, about=about, early=[i for i in new if opened_step(i) < step - EARLY_STEPS])
    if "loss_step" in line:
        out.loss_step = line["loss_step"]
    else:
        out.loss_step = loss_shows(line["loss"], twin["loss"], step)
        if out.loss_step is None and "died" in line:
            out.loss_step = line["steps"]
    if not about:
        return out
    accepted = [i for i in about if i["mode"] in expected["modes"]]
    first = about[0]
    out.found, out.loud = True, any(i["severity"] in LOUD for i in about)
    out.said, out.cause = first["mode"], first["mode"] in expected["modes"]
    best = accepted[0] if accepted else first
    if expected["modules"] is not None:
        out.place = place_is_right(best, expected)
    if expected["fp8"] is not None:
        out.fp8 = best["verdict"] == ("fp8" if expected["fp8"] else "shared")
    out.dated = first["first_step"] >= step - EARLY_STEPS
    opened = opened_step(first)
    out.delay = max(0, opened - step)
    if out.loss_step is not None:
        out.lead = out.loss_step - opened
    return out


def same_until_onset(line: Line, twin: Line) -> bool:
    """Whether the run and its twin are the same training up to the fault: else one of the two has told nothing."""
    before = slice(0, line["step"])
    return bool(list(line["loss"][before]) == list(twin["loss"][before]))
