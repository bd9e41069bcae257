"""What a failure mode consists of: the contents of a folder in `fp8watch_server.detect.modes`, as one object.

Shapes:     frozen data
Thread:     any
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fp8watch_server.detect.detector import Detector
from fp8watch_server.detect.finding import Finding, SiteFacts, Verdict
from fp8watch_server.detect.limits import Limits, Threshold
from fp8watch_server.detect.remedies import Fix, Place
from fp8watch_server.detect.step_view import StepView

Words = Callable[[Finding, SiteFacts | None], tuple[str, str]]
StepCheck = Callable[[StepView, Limits], list[Finding]]


@dataclass(frozen=True)
class Mode:
    """One failure mode. Its slug is frozen: alert rules, runbook addresses and silences are written with it."""

    number: int
    slug: str
    words: Words  # title and cause of a finding
    fixes: Callable[[Place], list[Fix]]  # what to change, most likely first
    alternatives: tuple[tuple[str, str], ...]  # (slug of what else it could be, how to tell it apart)
    thresholds: tuple[Threshold, ...] = ()
    detectors: tuple[type[Detector], ...] = ()  # over the roll-up; one that finds several modes is named by each
    step_check: StepCheck | None = None  # over each step of each rank, with no memory
    verdict_words: Mapping[Verdict, str] = field(default_factory=dict)  # where the common ones are not the point
    alternatives_of: Callable[[Finding], tuple[tuple[str, str], ...] | None] | None = None
    """Of one finding, where the mode tells of things that are unlike each other; None: those of the mode."""
