"""What is said of scale-rounding: title, cause, and what to change."""

from __future__ import annotations

from fp8watch_server.detect.finding import Finding, SiteFacts
from fp8watch_server.detect.phrases import ratio, site_words, tile_words
from fp8watch_server.detect.remedies import Fix, Place, set_to
from fp8watch_server.detect.switches import fp32_scales


def words(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    """Title and cause."""
    roles, where = " and ".join(f.extra.get("operands", ())) or "an operand", site_words(s)
    sites = f.extra.get("num_sites", 1)
    return (
        f"Scale of {roles} is off in {sites} sites, first in {where}: {ratio(f)}{tile_words(f)}",
        f"amax·scale/FP8_MAX of {where} is outside what rounding allows, and weights are not alone in it: the "
        "scale is rounded up, computed with a reciprocal, or corrupted. Above 1.036 the largest values are clipped.",
    )


def fixes(p: Place) -> list[Fix]:
    """What to change, most likely first."""
    how, text = set_to(p.backend, p.operands, None, p.power_2_scale)
    scales = "power-of-two" if p.power_2_scale else "FP32"
    return [
        Fix("code", "Round the scale down (scale_inv up), and divide: 448/amax, not 448·(1/amax)."),
        Fix(how, f"The site is registered with {scales} scales; make the kernel agree: {text}."),
        *fp32_scales(p),
    ]
