"""What to ask next about an incident: diagnoses, each as a command that can be pasted or a page that can be opened.

Shapes:     an incident, its site, the collector's address -> rows of a template
Thread:     any; pure functions

Commands run where the model is, against a function of the user's: MODULE:FUNCTION stays for that person to fill in.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from urllib.parse import quote

from fp8watch_server.pages.lookup import run_url, site_url
from fp8watch_server.store.rows import IncidentRow, RunRow, SiteRow

TARGET = "MODULE:FUNCTION"


@dataclass(frozen=True)
class Question:
    """One row."""

    asks: str
    command: str = ""
    url: str = ""
    opens: str = ""
    """What the link says."""


def questions(
    incident: IncidentRow, run: RunRow, site: SiteRow | None, own_url: str, before: tuple[str, str] | None = None
) -> list[Question]:
    """In the order in which they narrow it down.

    Args:
        own_url: of the collector, as people reach it.
        before: id and name of the run to hold this one against.
    """
    module = incident["place"]["module"]
    page = f"{own_url}/incidents/{quote(incident['id'], safe='')}"
    only = f" --only {shlex.quote(module)}" if module else ""
    suspect = f" --suspect {shlex.quote(module)}" if module else ""
    asked = [
        Question(
            "Would BF16 do the same, on the same batches?",
            f'fp8watch.diagnose.compare_bf16(model, batches, loss_fn).send("{page}")',
        ),
        _beside(run, before),
    ]
    if incident["verdict"] != "shared":  # else no layer has to leave FP8 for it
        command = f"fp8watch diagnose bisect {TARGET}{suspect} --incident {page}"
        asked.append(Question("Which layers must leave FP8 for it to go?", command))
    if site is not None:
        at = f"{site_url(run['id'], site['id'])}?step={incident['first_step']}"
        asked.append(Question("What did the operand look like before, and where does it lead?", "", at, "its site"))
    return [
        *asked,
        Question(
            "What does FP8 cost, layer by layer?",
            f"fp8watch diagnose loss-impact {TARGET}{only} --measure",
            f"{run_url(run['id'])}#costs",
            "as turns measured it",
        ),
        Question(
            "What would another format do?",
            f"fp8watch diagnose what-if --run {shlex.quote(run['id'])} --collector {own_url}",
        ),
        Question(
            "May I resume from this checkpoint?",
            "fp8watch check-checkpoint PATH",
            f"{run_url(run['id'])}#checkpoints",
            "those of the run",
        ),
        Question("Which recipe would fit this model?", f"fp8watch calibrate {TARGET} -o recipe.toml"),
        Question(
            "What else is kept in few bits, and would moments do with fewer?",
            f"fp8watch diagnose moments {TARGET}",
            f"{run_url(run['id'])}#coverage",
            "what attach saw",
        ),
        Question(
            "Would collectives do with fewer bits?", f"fp8watch diagnose collectives {TARGET} --ranks {_ranks(run)}"
        ),
    ]


def _ranks(run: RunRow) -> int:
    """As many as the run has; of one alone, a number to try."""
    return run["world_size"] if run["world_size"] > 1 else 8


def _beside(run: RunRow, before: tuple[str, str] | None) -> Question:
    """Side by side with the run before; where none is, with one to choose."""
    this = quote(run["id"], safe="")
    if before is None:
        return Question("Is there a run without it?", "", f"/compare?a={this}", "two runs side by side")
    run_id, name = before
    words = run_id if name in ("", run["name"]) else name
    return Question("What differs from the run before?", "", f"/compare?a={quote(run_id, safe='')}&b={this}", words)
