"""What is said of expert-outlier: title and cause, and what to change."""

from __future__ import annotations

from fp8watch_server.detect.finding import Finding, SiteFacts
from fp8watch_server.detect.phrases import baseline, evidence, number, since
from fp8watch_server.detect.remedies import Fix, Place


def words(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    """Title and cause."""
    expert = f.extra.get("expert")
    who = "An expert" if expert is None else f"Expert {expert}"
    of = f"{s.operand} of {s.module}" if s else "a layer"
    octaves = evidence(f, "octaves_above_siblings")
    if octaves is None:
        return (
            f"{who} left its siblings: {of}",
            f"{who} is apart from the others in the {of}; how far was not measured.",
        )
    before = baseline(f, "octaves_above_siblings")
    was = f", {number(before)} octaves before" if before is not None else ""
    amax = evidence(f, "amax_max")
    size = f" Its amax is {number(amax)}." if amax is not None else ""
    return (
        f"{who} left its siblings: {of} is {number(octaves)} octaves above them",
        f"The {of}: its amax in expert {expert} is {number(octaves)} octaves above the median of the other experts{was}"
        f"{since(f)}.{size} They share one parameter, and the record of the site is of all of them together.",
    )


def fixes(p: Place) -> list[Fix]:
    """What to change, most likely first."""
    expert = p.extra.get("expert")
    who = "the expert" if expert is None else f"expert {expert}"
    return [
        Fix(
            "data",
            f"Compare {who} of {p.module} with the last good checkpoint; load its part of the parameter from there.",
        ),
        Fix(
            "code", "Clip by the gradient norm of each expert, or give experts with few tokens a smaller learning rate."
        ),
        Fix("code", "Look at the router's load: an expert with few tokens takes large steps from noisy gradients."),
    ]
