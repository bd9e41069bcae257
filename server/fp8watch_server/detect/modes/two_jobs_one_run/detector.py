"""Two sessions of one rank at work at the same time: mode 26, two-jobs-one-run.

Shapes:     batches of a run, facts of its sessions -> at most one finding a batch
Thread:     detect worker

Told with batches of the newest session alone: one incident, of its attempt.
"""

from __future__ import annotations

from collections.abc import Mapping

from fp8watch_agent.wire import Batch
from fp8watch_server.detect.finding import Evidence, Finding
from fp8watch_server.detect.modes.two_jobs_one_run.overlap import Beside, Overlap
from fp8watch_server.detect.sessions import SessionFacts

SLUG = "two-jobs-one-run"


class TwoJobs:
    """Of one run."""

    def __init__(self) -> None:
        self._overlap = Overlap()

    def observe(
        self, batch: Batch, at: float | None, sessions: Mapping[str, SessionFacts], *, newest: bool
    ) -> list[Finding]:
        """A batch came. `newest`: of the newest session of its rank."""
        beside = self._overlap.observe(batch, at)
        return [_finding(batch, beside, sessions)] if beside is not None and newest else []


def _finding(batch: Batch, beside: Beside, sessions: Mapping[str, SessionFacts]) -> Finding:
    h, step = batch.header, int(batch.steps["step"][-1])
    one, other = sessions.get(h.session), sessions.get(beside.session)
    newer, older = _who(h.session, one), _who(beside.session, other)
    same = one is not None and other is not None and one.pid > 0 and (one.host, one.pid) == (other.host, other.pid)
    return Finding(
        mode=SLUG,
        severity="warning",
        step=step,
        rank=h.rank,
        site=None,
        tile=None,
        element=None,
        evidence=(
            Evidence("session", newer, older, "", beside.since_step),
            Evidence("overlap_s", round(beside.seconds, 1), 0, "s", beside.since_step),
        ),
        verdict="shared",
        rank_in_flow=0,
        extra={
            "sites": [],
            "num_sites": 0,
            "newer": newer,
            "older": older,
            "same_process": same,
            "overlap_s": beside.seconds,
            "began": beside.since_step,
        },
    )


def _who(session: str, facts: SessionFacts | None) -> str:
    where = f" (process {facts.pid} on {facts.host})" if facts is not None and facts.host else ""
    return f"session {session[:8]}{where}"
