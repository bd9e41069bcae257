"""The parts of docs/detection.md that need no training: long healthy trainings, out of what `long_score` kept, and the thresholds.

    PYTHONPATH=tests python -m benchmarks.detection.page [--print]

Each stands between two markers, as what `make prove` and `make prove-forecasts` write does; all else on the page is prose.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.detection.long_score import HELD_OUT, RESULTS
from benchmarks.detection.public_rules import RULES
from benchmarks.detection.scoring import upper_bound
from benchmarks.operating_point import not_at_defaults

from fp8watch_server.detect.thresholds import TABLE

PAGE = Path(__file__).parents[3] / "docs" / "detection.md"
BEGIN, END = "<!-- proving ground -->", "<!-- end of proving ground -->"
LONG = "<!-- long healthy trainings -->", "<!-- end of long healthy trainings -->"
THRESHOLDS = "<!-- thresholds -->", "<!-- end of thresholds -->"
LONG_RUNS = Path(__file__).with_name("long_runs.py")


def long_runs(runs: list[dict[str, Any]]) -> str:
    """Long real healthy runs, a row a kind; those that thresholds were chosen on have a row of their own."""
    held, chosen = [r for r in runs if r["seed"] >= HELD_OUT], [r for r in runs if r["seed"] < HELD_OUT]
    steps, pages, warnings = _steps(held), _told(held, "critical"), _told(held, "warning")
    lines = [
        "## Long healthy trainings",
        "",
        "Made by `python -m benchmarks.detection.long_runs FOLDER` and `python -m benchmarks.detection.long_score FOLDER` (with `PYTHONPATH=tests`).",
        f"{not_at_defaults(LONG_RUNS)} They were recorded before full statistics took turns, and replayed through the engine.",
        "",
        "Real trainings of one small model in FP8 on the CPU, 2,000 steps each, those named after it 5,000: LR warm-up, after 35 % a re-warm-up from a",
        "tenth, after 55 % twice the batch and half the length, after 75 % another domain. The last eight steps of a run are not in its file.",
        "",
        f"Held out: **{pages} pages and {warnings} warnings in {steps} steps**: {1000 * pages / steps:.3f} and {1000 * warnings / steps:.3f} per 1000 (95 % bounds "
        f"{upper_bound(pages, steps):.3f} and {upper_bound(warnings, steps):.3f}; goals 0.1 and 0.5). The public rules raised, per 1000 steps: "
        + ", ".join(f"{name} {1000 * sum(r['rules'][name] for r in held) / steps:.1f}" for name in RULES)
        + ".",
        "",
        "| kind | runs | steps | pages | warnings | said |",
        "|---|---|---|---|---|---|",
        *(_row(kind, [r for r in held if r["kind"] == kind]) for kind in sorted({r["kind"] for r in held})),
        _row("for choosing, of all kinds", chosen),
    ]
    return "\n".join(lines)


def _row(name: str, runs: list[dict[str, Any]]) -> str:
    said = Counter(f"{i['mode']} at step {i['step']} ({i['severity']})" for r in runs for i in r["said"])
    words = ", ".join(text if num == 1 else f"{text} ×{num}" for text, num in said.items()) or "nothing"
    return f"| {name} | {len(runs)} | {_steps(runs)} | {_told(runs, 'critical')} | {_told(runs, 'warning')} | {words} |"


def _steps(runs: list[dict[str, Any]]) -> int:
    return sum(r["num_steps"] for r in runs)


def _told(runs: list[dict[str, Any]], severity: str) -> int:
    return sum(i["severity"] == severity for r in runs for i in r["said"])


def thresholds() -> str:
    """The engine's table."""
    lines = [
        "## Thresholds",
        "",
        "Made by `python -m benchmarks.detection.page` (with `PYTHONPATH=tests`). `fp8watch rules list` prints them; a rules file changes them for some",
        "runs, `fp8watch rules check FILE` checks it.",
        "",
        "| name | default | unit | from | source |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| `{t.name}` | {t.default:g} | {t.unit} | {t.low:g} … {t.high:g} | {t.source} |" for t in TABLE]
    return "\n".join(lines)


def made() -> dict[tuple[str, str], str]:
    """Markers -> what stands between them."""
    return {LONG: long_runs(json.loads(RESULTS.read_text())), THRESHOLDS: thresholds()}


def put(page: str, markers: tuple[str, str], text: str) -> str:
    """The page with this between its markers.

    Raises:
        ValueError: it does not have them.
    """
    begin, end = map(re.escape, markers)
    page, num = re.subn(f"{begin}.*{end}", lambda _: f"{markers[0]}\n{text}\n{markers[1]}", page, flags=re.S)
    if num != 1:
        raise ValueError(f"{PAGE} has no {markers[0]}")
    return page


def write() -> None:
    """Both parts."""
    page = PAGE.read_text()
    for markers, text in made().items():
        page = put(page, markers, text)
    PAGE.write_text(page)


def main() -> None:
    """Write, or print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", action="store_true", help="write nothing")
    if parser.parse_args().print:
        sys.stdout.write("\n\n".join(made().values()) + "\n")
    else:
        write()


if __name__ == "__main__":
    main()
