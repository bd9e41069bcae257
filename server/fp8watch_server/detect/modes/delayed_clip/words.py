"""What is said of delayed-clip: title, cause, and what to change."""

from __future__ import annotations

from fp8watch_server.detect.finding import Finding, SiteFacts
from fp8watch_server.detect.phrases import channels, number, site_words
from fp8watch_server.detect.remedies import Fix, Place
from fp8watch_server.detect.switches import longer_history, margin, scales_of_this_tensor


def words(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    """Title and cause."""
    where = channels(f, s)
    named = f" The outlier is in {where}." if where else ""
    if f.extra.get("swiglu"):
        named += " The input of a SwiGLU's down projection is where outliers are born: two channels that align."
    return (
        f"Outlier clipped by a delayed scale in {site_words(s)}: clip depth {number(f.extra.get('depth'))}",
        f"The scale of {site_words(s)} comes from the history of amax, and this amax is {number(f.extra.get('depth'))} times what "
        f"that scale can carry: what is above is cut off.{named}",
    )


def fixes(p: Place) -> list[Fix]:
    """What to change, most likely first."""
    fixes = [
        *scales_of_this_tensor(p.backend),
        *longer_history(p),
        *margin(p, 1, "Head room"),
    ]
    if p.extra.get("swiglu"):
        fixes.insert(
            1,
            Fix(
                "code",
                f"Smooth SwiGLU, or keep the input of {p.module} in BF16: weight decay does not stop aligned channels.",
            ),
        )
    return [*fixes, p.keep_out]
