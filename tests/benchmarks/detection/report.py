"""What `make bench-detect` prints: the engine on made-up and recorded traces. A developer's look; no page shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from benchmarks.detection.public_rules import RULES
from benchmarks.detection.scoring import Healthy, Outcome, upper_bound
from detect.scenarios import BY_NAME


def _rate(values: Sequence[bool]) -> str:
    return f"{np.mean(values):.2f}" if len(values) else "–"


def _recall(runs: Sequence[Outcome]) -> str:
    """With the count, and the exact bound where all were found."""
    found, num = sum(o.found for o in runs), max(len(runs), 1)
    bound = f"; 95 % lower bound {0.05 ** (1 / num):.2f}" if found == num else ""
    return f"{found / num:.2f} ({found} of {num}{bound})"


def _median(values: Sequence[int | None]) -> str:
    known = [v for v in values if v is not None]
    return f"{np.median(known):g}" if known else "–"


@dataclass(frozen=True)
class Point:
    """What was measured at one operating point."""

    every: int  # full statistics of a site once in so many steps
    made: list[Outcome]
    quiet: list[Healthy]
    real: list[Outcome]
    real_quiet: list[Healthy]


def report(rarest: Point, always: Point, cost: dict[str, float], split: str, num_seeds: int) -> str:
    """All of it, as Markdown."""
    parts = [
        _intro(rarest.every, split, num_seeds),
        _goals(rarest, always),
        _modes(rarest.made),
        _confusion(rarest.made),
        _recorded(rarest, always),
        _healthy(rarest.quiet),
        _rules(rarest.made, rarest.quiet),
        _cost(cost),
    ]
    return "\n\n".join(parts) + "\n"


def _intro(every: int, split: str, num_seeds: int) -> str:
    return f"""## The engine on traces

Made up: {len(BY_NAME)} scenarios of {len({s.expected.mode for s in BY_NAME.values()})} modes after a calibration on one real training (`tests/detect`), {num_seeds} seed{"s" if num_seeds > 1 else ""} of the
*{split}* split; thresholds were chosen on other seeds. Faults act on columns, and no model trains behind them: this shows that the
engine tells what it is given, not how often real failures look like that. Recorded: real trainings of 184 steps (`record.py`), in
sample. Full statistics of a site come once in {every} steps, the rarest that attach chooses, and in a second column in each step.
*Delay* is in steps, from the fault to the first step of the incident; *lead* is against a loss that the scenario lets rise."""


def _measured(point: Point) -> list[str]:
    """A column of the goals."""
    made, quiet, real_quiet = point.made, point.quiet, point.real_quiet
    mild = [o for o in made if o.level == 0]
    rest = [o for o in made if o.level > 0]
    found = [o for o in made if o.found]
    true, false = len(found), sum(o.num_false for o in made)
    steps = sum(h.num_steps for h in quiet)
    pages, warnings = sum(h.pages for h in quiet), sum(h.warnings for h in quiet)
    real_steps = sum(h.num_steps for h in real_quiet)
    real_pages, real_warnings = sum(h.pages for h in real_quiet), sum(h.warnings for h in real_quiet)
    invariant = [o.delay for o in found if BY_NAME[o.name].invariant]
    statistic = [o.delay for o in found if not BY_NAME[o.name].invariant and not BY_NAME[o.name].slow]
    leads = [o.lead for o in found if o.lead is not None]

    def per_thousand(count: int) -> str:
        return (
            f"{1000 * count / steps:.3f} ({count} in {steps}; 95 % bound {upper_bound(count, steps):.3f})"
            if steps
            else "–"
        )

    return [
        _recall(rest),
        _recall(mild),
        f"{true / max(true + false, 1):.3f}",
        per_thousand(pages),
        per_thousand(warnings),
        f"{real_pages} in {real_steps} (95 % bound {upper_bound(real_pages, real_steps):.2f})",
        f"{real_warnings} in {real_steps} (95 % bound {upper_bound(real_warnings, real_steps):.2f})",
        _median(invariant),
        _median(statistic),
        _median(leads),
        _rate([o.said == o.mode for o in made if o.said != "nothing"]),
        _rate([o.place for o in found]),
        _rate([o.verdict for o in found]),
        f"{np.mean([o.num_incidents for o in found]) if found else 0:.2f}",
    ]


GOALS = (
    ("recall, medium and severe", "≥ 0.97"),
    ("recall, mild", "≥ 0.90"),
    ("precision of incidents in faulty runs", "≥ 0.97"),
    ("false pages per 1000 healthy steps (made up)", "≤ 0.1"),
    ("false warnings per 1000 healthy steps (made up)", "≤ 0.5"),
    ("the same, recorded: pages", "≤ 0.1"),
    ("the same, recorded: warnings", "≤ 0.5"),
    ("median delay, invariants", "0"),
    ("median delay, statistics", "≤ 4"),
    ("median lead over the loss, slow modes", "≥ 20"),
    ("cause right (first thing said)", "≥ 0.90"),
    ("place right", "≥ 0.95"),
    ("FP8-or-not right", "≥ 0.98"),
    ("incidents per fault", "≤ 1.3"),
)


def _goals(rarest: Point, always: Point) -> str:
    lines = [
        "### Goals",
        "",
        f"| | goal | full statistics once in {rarest.every} steps | in each step |",
        "|---|---|---|---|",
    ]
    columns = zip(_measured(rarest), _measured(always), strict=True)
    return "\n".join(lines + [f"| {a} | {b} | {c} | {d} |" for (a, b), (c, d) in zip(GOALS, columns, strict=True)])


def _modes(made: list[Outcome]) -> str:
    lines = [
        "### By mode",
        "",
        "| scenario | recall mild / medium / severe | delay mild / medium / severe | lead | place | verdict | incidents |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in BY_NAME:
        mine = [o for o in made if o.name == name]
        if not mine:
            continue
        by = [[o for o in mine if o.level == k] for k in range(3)]
        found = [o for o in mine if o.found]
        recall = " / ".join(_rate([o.found for o in part]) for part in by)
        delay = " / ".join(_median([o.delay for o in part]) for part in by)
        incidents = f"{np.mean([o.num_incidents for o in found]):.1f}" if found else "–"
        lead = _median([o.lead for o in found])
        lines.append(
            f"| {name} | {recall} | {delay} | {lead} | {_rate([o.place for o in found])} | {_rate([o.verdict for o in found])} | {incidents} |"
        )
    return "\n".join(lines)


def _confusion(made: list[Outcome]) -> str:
    wrong: Counter[tuple[str, str]] = Counter((o.mode, o.said) for o in made if o.said != o.mode)
    lines = ["### What was said instead", ""]
    if not wrong:
        return "\n".join([*lines, "In every faulty run the first incident had the right name."])
    lines += ["| fault | the first incident in its place | runs |", "|---|---|---|"]
    lines += [f"| {mode} | {said} | {n} |" for (mode, said), n in wrong.most_common()]
    lines += ["", "An incident may be taken over later by the cause that explains it; this table is of the first name."]
    return "\n".join(lines)


def _recorded(rarest: Point, always: Point) -> str:
    lines = [
        "### Recorded trainings",
        "",
        f"| run | fault | found, once in {rarest.every} steps | delay | place | incidents | found, in each step | delay |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for o, other in zip(rarest.real, always.real, strict=True):
        place = "right" if o.place else "wrong" if o.found else "–"
        lines.append(
            f"| {o.name} | {o.mode} | {_found(o)} | {_late(o)} | {place} | {o.num_incidents} | {_found(other)} | {_late(other)} |"
        )
    lines += ["", "Healthy, and the healthy part of the faulty ones:", ""]
    lines += ["| run | steps | pages | warnings | information |", "|---|---|---|---|---|"]
    lines += [f"| {h.name} | {h.num_steps} | {h.pages} | {h.warnings} | {h.infos} |" for h in rarest.real_quiet]
    return "\n".join(lines)


def _found(o: Outcome) -> str:
    return "yes" if o.found else f"no; said {o.said}"


def _late(o: Outcome) -> str:
    return "–" if o.delay is None else str(o.delay)


def _healthy(quiet: list[Healthy]) -> str:
    lines = [
        "### Healthy runs that look ill (made up)",
        "",
        "| run | steps | pages | warnings | information | said |",
        "|---|---|---|---|---|---|",
    ]
    for h in quiet:
        said = ", ".join(f"{m} ×{n}" for m, n in Counter(h.named).most_common()) or "nothing"
        lines.append(f"| {h.name} | {h.num_steps} | {h.pages} | {h.warnings} | {h.infos} | {said} |")
    return "\n".join(lines)


def _rules(made: list[Outcome], quiet: list[Healthy]) -> str:
    steps = max(sum(h.num_steps for h in quiet), 1)
    lines = [
        "### Beside the public rules (made-up runs)",
        "",
        "| rule | recall | median delay | false alarms per 1000 healthy steps |",
        "|---|---|---|---|",
    ]
    mine = sum(h.pages + h.warnings for h in quiet)
    lines.append(
        f"| **fp8watch** | {_rate([o.found for o in made])} | {_median([o.delay for o in made])} | {1000 * mine / steps:.2f} |"
    )
    delays: Callable[[str], list[int | None]] = lambda rule: [o.rules.get(rule) for o in made]  # noqa: E731
    for rule in RULES:
        got = delays(rule)
        false = sum(h.rules.get(rule, 0) for h in quiet)
        lines.append(
            f"| {rule} | {_rate([d is not None for d in got])} | {_median(got)} | {1000 * false / steps:.1f} |"
        )
    lines += [
        "",
        "A rule is credited with any alarm after the fault that it does not raise in the twin, whatever it calls it; alarms on loss and gradient norm that the fault itself sets to NaN count for it.",
    ]
    return "\n".join(lines)


def _cost(cost: dict[str, float]) -> str:
    return f"""### Cost

1120 sites (32 layers), batches of eight steps, CPU time, decoding not counted: invariants on every record of every rank {cost["invariants"]:.2f} µs
a record (goal 0.5), everything {cost["everything"]:.2f} µs a
record on one rank. Statistics run on the roll-up over ranks, once a step, so their share falls with the number of ranks. The state of a run takes
{cost["state_kib"]:.0f} KiB."""
