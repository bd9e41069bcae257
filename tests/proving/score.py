"""Scores the results of the proving ground and writes its part of docs/detection.md.

python -m proving.score                      docs/detection/proving.jsonl out of build/proving/results.jsonl, and the page
python -m proving.score --kept               the page out of docs/detection/proving.jsonl alone
python -m proving.score --misses dev         what was missed, misnamed or falsely said, each with its command
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from proving.case import Case
from proving.judge import LOUD, Judged, judge, key, module_of, same_until_onset
from proving.run import RESULTS, ROOT, read

KEPT = ROOT / "docs" / "detection" / "proving.jsonl"
DROPPED = ("loss", "grad_norm", "legs", "seen_step", "step_ms")
LOUD_LEVELS = ("medium", "severe")
INVARIANTS = frozenset(
    [
        "nan-in-loss",
        "zero-tile-eps",
        "stale-weight-scale",
        "scale-rounding",
        "recipe-mismatch",
        "inf-laundering",
        "sensitive-layer-quantized",
        "kernel-output-fault",
        "nan-in-activation",
        "cross-rank-disagreement",
        "quantiser-fault",
        "accumulator-precision",
    ]
)
"""Modes that need no baseline: their delay has a goal of its own."""

RESAMPLES = 2000


def compact(lines: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines without their series, and with what was read off them; incidents without their texts."""
    out = []
    for line in sorted(lines.values(), key=lambda x: x["id"]):
        kept = {k: v for k, v in line.items() if k not in DROPPED}
        if line["kind"] == "fault" and "broken" not in line and (twin := lines.get(twin_id(line))):
            kept["loss_step"] = judge(line, twin).loss_step
            if not same_until_onset(line, twin):
                kept["broken"] = "the run and its twin differ before the fault"
        kept["incidents"] = [
            {k: i[k] for k in ("mode", "severity", "verdict", "first_step", "opened_step", "opened_at")}
            | {"place": {"module": module_of(i), "operand": i["place"]["operand"], "ranks": i["place"]["ranks"]}}
            for i in line.get("incidents", ())
        ]
        out.append(kept)
    return out


def twin_id(line: Mapping[str, Any]) -> str:
    """Of the run without a change."""
    return Case.of(line).twin.id


@dataclass
class Score:
    """Everything of one split."""

    faulty: list[Judged]
    healthy: list[dict[str, Any]]
    """Twins and runs with traps."""
    said_by_twins: Mapping[str, set[tuple[str, str | None]]] = field(default_factory=dict)
    """Id of a twin of any split -> what it says; a fresh trap's may be of the held-out half."""

    @property
    def scored(self) -> list[Judged]:
        """Medium and severe ones."""
        return [j for j in self.faulty if j.line["severity"] in LOUD_LEVELS]

    @property
    def num_healthy_steps(self) -> int:
        return sum(line["steps"] for line in self.healthy)

    def false(self, *severities: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """(run, incident) of healthy runs. What the twin of a trap says too is counted with the twin."""
        return [
            (line, i)
            for line in self.healthy
            for i in line["incidents"]
            if i["severity"] in severities
            and (line["kind"] == "twin" or key(i) not in self.said_by_twins.get(twin_id(line), set()))
        ]


def score(lines: Iterable[dict[str, Any]], split: str) -> Score:
    """Judge the runs of a split. Twins are of the half that their family is in."""
    by_id = {line["id"]: line for line in lines if "broken" not in line and "incidents" in line}
    faulty = [
        judge(line, by_id[twin_id(line)])
        for line in by_id.values()
        if line["kind"] == "fault" and line["split"] == split and twin_id(line) in by_id
    ]
    twins = {line["id"]: {key(i) for i in line["incidents"]} for line in by_id.values() if line["kind"] == "twin"}
    return Score(faulty, [x for x in by_id.values() if x["kind"] != "fault" and x["split"] == split], twins)


def share(values: Sequence[bool]) -> float:
    """Of True; NaN of nothing."""
    return float(np.mean(values)) if len(values) else float("nan")


def interval(
    judged: Sequence[Judged], measure: Callable[[Sequence[Judged]], float], seed: int = 0
) -> tuple[float, float]:
    """95 % interval by resampling clusters (family × fault) with replacement."""
    clusters: dict[tuple[str, str], list[Judged]] = {}
    for j in judged:
        clusters.setdefault((j.line["family"], j.line["change"]), []).append(j)
    groups, rng = list(clusters.values()), np.random.default_rng(seed)
    if not groups:
        return float("nan"), float("nan")
    found = []
    for _ in range(RESAMPLES):
        drawn = rng.integers(len(groups), size=len(groups))
        found.append(measure([j for g in drawn for j in groups[g]]))
    low, high = np.nanpercentile(found, [2.5, 97.5])
    return float(low), float(high)


def recall(judged: Sequence[Judged]) -> float:
    return share([j.found for j in judged])


def cause(judged: Sequence[Judged]) -> float:
    """Of the found ones: what was said first is an accepted name."""
    return share([j.cause for j in judged if j.found])


def place(judged: Sequence[Judged]) -> float:
    """Of the found ones that have a place."""
    return share([j.place for j in judged if j.place is not None])


def fp8(judged: Sequence[Judged]) -> float:
    """Of the found ones of which it can be told."""
    return share([j.fp8 for j in judged if j.fp8 is not None])


def precision(judged: Sequence[Judged]) -> float:
    """Of warnings and pages in faulty runs: those with an accepted name. A second, wrong name counts against it."""
    named = [
        i["mode"] in j.line["expected"]["modes"] and i in j.about
        for j in judged
        for i in (*j.about, *j.early)
        if i["severity"] in LOUD
    ]
    return share(named)


def delays(judged: Sequence[Judged], invariant: bool) -> list[int]:
    """Of the found ones whose right name is (not) an invariant."""
    return [
        j.delay for j in judged if j.delay is not None and (j.line["expected"]["modes"][0] in INVARIANTS) == invariant
    ]


def upper_bound(events: int) -> float:
    """95 % upper bound of a Poisson mean after `events` of them: by bisection on the sum of probabilities."""
    low, high = 0.0, 10.0 + 3.0 * events
    for _ in range(60):
        mean = (low + high) / 2
        term, total = float(np.exp(-mean)), 0.0
        for k in range(events + 1):
            total += term
            term *= mean / (k + 1)
        low, high = (mean, high) if total > 0.05 else (low, mean)
    return high


def command(line: Mapping[str, Any]) -> str:
    """What runs this again."""
    severity = f" --severity {line['severity']}" if line["severity"] else ""
    return f'make prove ARGS="--only {line["family"]} --fault {line["change"]}{severity} --seed {line["seed"]} --again"'


def misses(lines: Iterable[dict[str, Any]], split: str) -> list[str]:
    """A table of everything that went wrong, the worst kind first."""
    got = score(lines, split)
    rows = [
        "| run | severity | step | expected | said (first step, opened) | wrong | loss shows at |",
        "|---|---|---|---|---|---|---|",
    ]
    for j in sorted(got.faulty, key=lambda j: (j.found, j.cause, j.line["change"])):
        wrong = [
            name
            for name, bad in (
                ("missed", not j.found),
                ("name", j.found and not j.cause),
                ("place", j.place is False),
                ("fp8", j.fp8 is False),
                ("before the fault", bool(j.early)),
            )
            if bad
        ]
        if not wrong:
            continue
        e = j.line["expected"]
        said = "; ".join(
            f"{i['mode']} ({i['severity']}, {i['verdict']}, {module_of(i)} {i['place']['operand'] or ''} @{i['first_step']}, {i.get('opened_step')})"
            for i in (*j.early, *j.about)
        )
        wanted = f"{'/'.join(e['modes'])} in {', '.join(e['modules'][:2]) if e['modules'] else 'no place'}, {e['operand'] or 'any'}, fp8={e['fp8']}"
        line = j.line
        rows.append(
            f"| {line['family']} {line['change']} seed {line['seed']} | {line['severity']} | {line['step']}–{line['until']} | {wanted} |"
            f" {said or 'nothing'} | **{', '.join(wrong)}** | {j.loss_step} |"
        )
    rows += ["", "Healthy runs:", "", "| run | step of the event | said |", "|---|---|---|"]
    for line, i in got.false("critical", "warning", "info"):
        rows.append(
            f"| {line['family']} {line['change']} seed {line['seed']} | {line.get('step')} | {i['mode']} ({i['severity']}, {module_of(i)} {i['place']['operand'] or ''}"
            f" @{i['first_step']}): {i.get('title', '')} |"
        )
    return rows


def main(argv: list[str]) -> int:
    """0; 1 where there is nothing to score."""
    parser = argparse.ArgumentParser(
        prog="python -m proving.score", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--kept", action="store_true", help="score what is in the tree")
    parser.add_argument("--misses", metavar="SPLIT")
    parser.add_argument("--print", action="store_true", help="print the page's part, write nothing")
    args = parser.parse_args(argv)
    lines: list[dict[str, Any]] = list(read(KEPT if args.kept else args.results).values())
    if not lines:
        print(f"{args.results} holds no run: python -m proving.run makes it", file=sys.stderr)
        return 1
    if args.misses:
        print("\n".join(misses(lines, args.misses)))
        return 0
    from proving.page import part, put

    if not args.kept:
        lines = compact(read(args.results))
        if not args.print:
            KEPT.parent.mkdir(parents=True, exist_ok=True)
            KEPT.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = part(lines)
    if args.print:
        print(text)
    else:
        put(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
