"""The proving ground's part of docs/detection.md, between two markers."""

from __future__ import annotations

import math
import platform
import statistics
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from typing import Any

from benchmarks.detection.page import BEGIN, END
from proving.judge import LOUD, Judged
from proving.run import ROOT
from proving.score import (
    INVARIANTS,
    LOUD_LEVELS,
    Score,
    cause,
    delays,
    fp8,
    interval,
    place,
    precision,
    recall,
    score,
    upper_bound,
)
from proving.split import (
    CONCEALED_FAMILIES,
    CONCEALED_GENERATORS,
    DEV_FAMILIES,
    DEV_GENERATORS,
    FRESH_FAMILIES,
    FRESH_GENERATORS,
    HELD_OUT_FAMILIES,
    HELD_OUT_GENERATORS,
    SEALED_FAMILIES,
    SEALED_GENERATORS,
    UNSEEN_FAMILIES,
    UNSEEN_GENERATORS,
    VEILED_FAMILIES,
    VEILED_GENERATORS,
)

PAGE = ROOT / "docs" / "detection.md"
SPLITS = ("concealed", "veiled", "sealed", "unseen", "fresh", "held-out", "crossed", "dev")
Measure = Callable[[Sequence[Judged]], float]


def number(value: float) -> str:
    """Two digits, or a dash where there is nothing to say it of."""
    return "–" if math.isnan(value) else f"{value:.2f}"


def ranged(judged: Sequence[Judged], measure: Measure) -> str:
    """A share with its 95 % interval."""
    value = measure(judged)
    if math.isnan(value):
        return "–"
    low, high = interval(judged, measure)
    return f"{value:.2f} ({low:.2f}–{high:.2f})"


def per_thousand(got: Score, severity: str) -> str:
    """False incidents per 1000 healthy steps, with the 95 % upper bound."""
    steps, events = got.num_healthy_steps, len(got.false(severity))
    if not steps:
        return "–"
    return f"{1000 * events / steps:.2f} ({events} in {steps}; at most {1000 * upper_bound(events) / steps:.2f})"


def middle(values: Sequence[int]) -> str:
    """Median of whole numbers."""
    return f"{statistics.median(values):g} (of {len(values)})" if values else "–"


def leads(judged: Sequence[Judged]) -> str:
    """Median lead over the loss where the loss shows the fault; how often it does not."""
    if not judged:
        return "–"
    shown = [j.lead for j in judged if j.lead is not None]
    silent = sum(j.found and j.loss_step is None for j in judged)
    return f"{middle(shown)}; loss never showed {silent}"


def goals(splits: dict[str, Score]) -> list[str]:
    """The table of goals, a column for each split."""
    rows: list[tuple[str, str, Callable[[Score], str]]] = [
        ("recall, medium and severe", "≥ 0.90", lambda s: ranged(s.scored, recall)),
        ("recall with a warning or page", "", lambda s: ranged(s.scored, lambda x: _share(j.loud for j in x))),
        ("recall, mild", "", lambda s: ranged([j for j in s.faulty if j.line["severity"] == "mild"], recall)),
        ("cause right (first thing said)", "≥ 0.85", lambda s: ranged(s.scored, cause)),
        ("place right", "≥ 0.90", lambda s: ranged(s.scored, place)),
        ("FP8-or-not right", "≥ 0.95", lambda s: ranged(s.scored, fp8)),
        (
            "first step not before the fault",
            "",
            lambda s: ranged([j for j in s.scored if j.found], lambda x: _share(bool(j.dated) for j in x)),
        ),
        ("precision of warnings and pages in faulty runs", "≥ 0.95", lambda s: ranged(s.faulty, precision)),
        ("false pages per 1000 healthy steps", "≤ 0.1", lambda s: per_thousand(s, "critical")),
        ("false warnings per 1000 healthy steps", "≤ 0.5", lambda s: per_thousand(s, "warning")),
        ("information per 1000 healthy steps", "", lambda s: per_thousand(s, "info")),
        ("median delay in steps, invariants", "≤ 1", lambda s: middle(delays(s.scored, True))),
        ("median delay in steps, statistics", "≤ 8", lambda s: middle(delays(s.scored, False))),
        ("median lead over the loss, in steps", "", lambda s: leads(s.scored)),
        ("incidents per found fault", "", lambda s: number(_mean(len(j.about) for j in s.scored if j.found))),
        (
            "faulty runs / distinct faults",
            "",
            lambda s: f"{len(s.scored)} / {len({j.line['change'] for j in s.scored})}" if s.scored else "–",
        ),
    ]
    head = [
        "| | goal | concealed | veiled | sealed | unseen | fresh | held out | crossed | dev |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    return head + [f"| {name} | {goal} | {' | '.join(f(splits[s]) for s in SPLITS)} |" for name, goal, f in rows]


def _share(values: Iterable[bool]) -> float:
    return _mean(float(v) for v in values)


def _mean(values: Iterable[float]) -> float:
    kept = list(values)
    return sum(kept) / len(kept) if kept else math.nan


def by_mode(judged: Sequence[Judged]) -> list[str]:
    """What each mode's figure rests on."""
    rows = [
        "| right name | distinct faults | runs | recall | cause | place | median delay |",
        "|---|---|---|---|---|---|---|",
    ]
    for mode in sorted({j.line["expected"]["modes"][0] for j in judged}):
        these = [j for j in judged if j.line["expected"]["modes"][0] == mode]
        faults = len({j.line["change"] for j in these})
        late = middle(delays(these, mode in INVARIANTS))
        rows.append(
            f"| {mode} | {faults} | {len(these)} | {number(recall(these))} | {number(cause(these))} | {number(place(these))} | {late} |"
        )
    return rows


def by_fault(judged: Sequence[Judged]) -> list[str]:
    """Each fault in the families that it was put into, and what was said."""
    rows = ["| fault | severity: family (what was said first, delay) |", "|---|---|"]
    for fault in sorted({j.line["change"] for j in judged}):
        said = []
        for j in sorted((j for j in judged if j.line["change"] == fault), key=lambda j: j.line["id"]):
            mark = "" if j.cause or not j.found else " ✗"
            late = f", {j.delay}" if j.found else ""
            said.append(f"{j.line['severity']}: {j.line['family']} ({j.said}{mark}{late})")
        rows.append(f"| {fault} | {'; '.join(said)} |")
    return rows


def alarms(got: Score) -> list[str]:
    """Every false warning and page, run by run."""
    loud = got.false(*LOUD)
    rows = [
        f"| {line['family']} | {line['change']} | {i['mode']} ({i['severity']}) at step {i['first_step']} |"
        for line, i in loud
    ]
    return ["| family | healthy event | said |", "|---|---|---|", *rows] if rows else ["None."]


def newer(name: str, got: Score) -> list[str]:
    """The sections of the concealed, the veiled, the sealed, the unseen or the fresh set; nothing before it has been run."""
    if not (got.faulty or got.healthy):
        return []
    return [
        f"### By mode, {name}",
        "",
        *by_mode(got.scored),
        "",
        f"### By fault, {name}",
        "",
        *by_fault(got.faulty),
        "",
        f"### False warnings and pages, {name}",
        "",
        *alarms(got),
        "",
    ]


def part(lines: Sequence[dict[str, Any]]) -> str:
    """The whole part, markers apart."""
    splits = {name: score(lines, name) for name in SPLITS}
    held = splits["held-out"]
    broken = [line["id"] for line in lines if "broken" in line]
    traps = sorted({line["change"] for line in lines if line["kind"] == "trap"})
    text = [
        "## Proving ground: faults in real trainings",
        "",
        f"Made by `make prove` at attach's defaults (Python {platform.python_version()}, torch {version('torch')}, CPU). Each run is a",
        "training of its own process against a real collector; what is judged are the incidents of its API. A fault is put into the",
        "training at a drawn step, site and size, and the loss reacts by itself; each faulty run has its healthy twin, and what the",
        "twin says too does not count. Raw results: [detection/proving.jsonl](detection/proving.jsonl), one line a run, made from",
        "`build/proving/results.jsonl`, which holds each loss as well.",
        "",
        "*Held out*: neither the family nor the generator of the fault was used to choose anything. *Crossed*: one of the two was.",
        "*Fresh*: faults and healthy events that nobody had tuned on when they were made, see below; *unseen*: such ones made after the fresh",
        "ones had been read; *sealed*: made like unseen, after the unseen set had been read, by an author who had not seen the detectors;",
        "*veiled*: made like sealed, after the sealed set had been read, by an author who had seen no detector and no incident;",
        "*concealed*: made like veiled, after the veiled set had been read, and the newest: the set to believe.",
        "A dash where none of them has been run.",
        f"*Dev* families: {', '.join(DEV_FAMILIES)}; held out: {', '.join(HELD_OUT_FAMILIES)};",
        f"fresh: {', '.join(FRESH_FAMILIES)}; unseen: {', '.join(UNSEEN_FAMILIES)};",
        f"sealed: {', '.join(SEALED_FAMILIES)}; veiled: {', '.join(VEILED_FAMILIES)};",
        f"concealed: {', '.join(CONCEALED_FAMILIES)}. *Dev* generators:",
        f"{', '.join(g for g in DEV_GENERATORS if g != 'planted')}; held out: {', '.join(HELD_OUT_GENERATORS)};",
        f"fresh: {', '.join(FRESH_GENERATORS)}; unseen: {', '.join(UNSEEN_GENERATORS)};",
        f"sealed: {', '.join(SEALED_GENERATORS)}; veiled: {', '.join(VEILED_GENERATORS)};",
        f"concealed: {', '.join(CONCEALED_GENERATORS)}.",
        "Intervals are 95 %, by resampling clusters (family × fault). *Delay* is from the first wrong step to the newest step that",
        "the incident rested on; *lead* is to the first step at which the loss is 6 σ off its twin's. An incident's first step lies",
        "before the fault where a site is looked at in turns: it is the step after the last look that was good.",
        "",
        *goals(splits),
        "",
        *newer("concealed", splits["concealed"]),
        *newer("veiled", splits["veiled"]),
        *newer("sealed", splits["sealed"]),
        *newer("unseen", splits["unseen"]),
        *newer("fresh", splits["fresh"]),
        "### By mode, held out",
        "",
        *by_mode(held.scored),
        "",
        "### By fault, held out",
        "",
        "✗: a name that is not accepted.",
        "",
        *by_fault(held.faulty),
        "",
        "### False warnings and pages, held out",
        "",
        f"Healthy events: {', '.join(traps)}.",
        "",
        *alarms(held),
        "",
        f"Runs: {len(lines)}; broken by the proving ground itself and not scored: {', '.join(broken) if broken else 'none'}.",
        f"Severities {' and '.join(LOUD_LEVELS)} are scored; mild ones have their own row.",
    ]
    return "\n".join(text)


def put(text: str) -> None:
    """Between the markers of the page, or behind its end where there are none yet."""
    page = PAGE.read_text()
    if BEGIN not in page:
        page = f"{page.rstrip()}\n\n{BEGIN}\n{END}\n"
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")
