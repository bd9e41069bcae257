"""What is said of zero-tile-eps: title, cause, and what to change."""

from __future__ import annotations

from fp8watch_server.detect.finding import Finding, SiteFacts
from fp8watch_server.detect.phrases import evidence, number, site_words, tile_words
from fp8watch_server.detect.remedies import OPERANDS, TORCHAO, Fix, Place, set_to

_ONE_EPS = Fix("code", "That constant is of all operands; 1e-12 is what it is set to.")


def words(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    """Title and cause."""
    where, eps = site_words(s), s.eps if s else 0.0
    finite = " The operand itself is finite." if f.extra.get("operand_counted") else ""
    guard = "eps is 0 and the kernel has no zero guard" if eps == 0 else f"eps {number(eps)} did not guard it"
    return (
        f"Zero tile without eps: scale_inv {number(evidence(f, 'scale_inv_min'))} in {where}{tile_words(f)}",
        f"A tile of {where} is zero or nearly so, {guard}: scale = FP8_MAX/amax became Inf, scale_inv 0, and "
        f"0·Inf is NaN in the codes.{finite} Every NaN behind it is a consequence.",
    )


def fixes(p: Place) -> list[Fix]:
    """What to change, most likely first."""
    others = [o for o in OPERANDS if o != p.operand]
    kind, text = set_to(p.backend, [p.operand], 1e-10 if p.eps > 0 or p.backend == TORCHAO else 1e-12, p.power_2_scale)
    why = (
        f", up from {p.eps:g}: the eps in use did not guard this tile."
        if p.eps > 0
        else "; if tiles still degenerate, 1e-10."
    )
    return [
        Fix(kind, f"{text}{why}"),
        Fix(kind, f"The same for the other operands: {set_to(p.backend, others, 1e-12, p.power_2_scale)[1]}.")
        if p.backend != TORCHAO
        else _ONE_EPS,
        Fix("code", "Or use a kernel that sets the scale of a zero tile to 1, as Transformer Engine's does."),
    ]
