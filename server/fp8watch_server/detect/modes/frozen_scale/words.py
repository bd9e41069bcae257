"""What is said of frozen-scale: title, cause, and what to change."""

from __future__ import annotations

from fp8watch_server.detect.finding import Finding, SiteFacts
from fp8watch_server.detect.phrases import number, since, site_words
from fp8watch_server.detect.remedies import Fix, Place
from fp8watch_server.detect.switches import amax_group, scales_of_this_tensor


def words(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    """Title and cause."""
    return (
        f"Frozen scale of {site_words(s)}: unchanged while amax moves, clip depth {number(f.extra.get('depth'))}",
        f"The delayed scale of {site_words(s)} no longer answers to its amax{since(f)}. A history that holds a NaN or an Inf keeps "
        "its old scale until that has left it, after as many passes as it is long; one that is never updated, or that is reduced over the wrong "
        "group, for good.",
    )


def fixes(p: Place) -> list[Fix]:
    """What to change, most likely first."""
    return [
        Fix(
            "code", "Reset the amax history of the module: a NaN or an Inf in it keeps the old scale until it has left."
        ),
        *amax_group(
            p.backend,
            "Check the group that amax is reduced over: fp8_autocast(fp8_group=...) must hold every rank that shares the tensor.",
        ),
        *amax_group(
            p.backend,
            "Check is_first_microbatch and that each forward runs inside fp8_autocast: outside, the history is not rolled.",
        ),
        *scales_of_this_tensor(p.backend),
    ]
