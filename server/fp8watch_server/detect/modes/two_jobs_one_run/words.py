"""What is said of two-jobs-one-run: title, cause, and what to change."""

from __future__ import annotations

from fp8watch_server.detect.finding import Finding, SiteFacts
from fp8watch_server.detect.remedies import Fix, Place


def words(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    """Title and cause."""
    newer, older = f.extra.get("newer", "a session"), f.extra.get("older", "another one")
    what = "Two attaches of one process" if f.extra.get("same_process") else "Two jobs"
    return (
        f"{what} send as rank {f.rank} of this run",
        f"{newer} and {older} have both sent steps of rank {f.rank} for {f.extra.get('overlap_s', 0):.0f} s. Of a step that both "
        "have, charts and statistics show the newer session's, so neither is shown whole.",
    )


def fixes(p: Place) -> list[Fix]:
    """What to change, most likely first."""
    own = Fix("env", "Give each job a run of its own: FP8WATCH_RUN, or the id of the launcher (TORCHELASTIC_RUN_ID).")
    if p.extra.get("same_process"):
        return [
            Fix("code", "Attach to one module that holds both models, or detach the first watch before the second.")
        ]
    return [
        own,
        Fix(
            "flag",
            "Bind tokens to runs, so that no job can write into another's: fp8watch token create --runs PATTERN.",
        ),
    ]
