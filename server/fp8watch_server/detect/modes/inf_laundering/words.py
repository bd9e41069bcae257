"""What is said of inf-laundering: title, cause, and what to change."""

from __future__ import annotations

from typing import NamedTuple

from fp8watch_server.detect.finding import Finding, SiteFacts
from fp8watch_server.detect.phrases import element_words, site_words, tile_words
from fp8watch_server.detect.remedies import Fix, Place

_MAX_FINITE = {"E4M3": 448, "E5M2": 57344}


class _Otherwise(NamedTuple):
    title: str
    cause: str


_OTHERWISE = {
    "delayed": _Otherwise(
        "Inf in the amax history of",
        "Its tensor was cast with a scale of the past, so what is finite keeps its bits, and the Inf was stored as the largest number of the "
        "format. But the history holds the Inf now: the scale stays as it is until the Inf has left it.",
    ),
    "mxfp8": _Otherwise(
        "Inf in a tile of",
        "MXFP8 gives its tile the largest scale there is: the Inf stays an Inf, the other 31 elements become 0, and what the GEMM makes of "
        "that row is not finite.",
    ),
    "rowwise": _Otherwise(
        "Inf in a row of",
        "The scale of its row became 0: the Inf is NaN in the codes, the rest of the row 0, and what the GEMM makes of that row is not finite.",
    ),
}
"""Recipes under which an Inf is not laundered, and what becomes of it."""


def words(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    """Title and cause."""
    where, limit = site_words(s), _MAX_FINITE.get(s.format if s else "E4M3", 448)
    element = element_words(f)
    if s is not None and s.format == "E2M1":
        return (
            f"Inf in the scales of {where}{tile_words(f)}",
            f"{where} held Inf{element} before the cast. NVFP4 has one scale for all of a tensor, and that became Inf with it: "
            f"nothing that is multiplied with it stays finite.",
        )
    if s is not None and (other := _OTHERWISE.get(s.recipe)):
        return f"{other.title} {where}{tile_words(f)}", f"{where} held Inf{element} before the cast. {other.cause}"
    return (
        f"Inf laundered to {limit} in {where}{tile_words(f)}",
        f"{where} held Inf{element} before the cast. The tile's scale was forced to 1, the Inf was stored "
        f"as {limit}, and its neighbours were quantised unscaled: what is small against 1 loses its bits. Nothing behind "
        f"the cast sees the Inf.",
    )


def fixes(p: Place) -> list[Fix]:
    """What to change, most likely first."""
    source = {
        "input": f"Find what computes the input of {p.module}, and clip it before the cast: x.clamp(-3e4, 3e4).",
        "weight": f"Reload {p.module} from the last checkpoint whose weights are finite; clip the gradient norm.",
        "grad_output": f"Find what overflows behind {p.module} in the backward pass; lower the loss scale, clip.",
    }[p.operand]
    history = Fix(
        "code", f"Reset the amax history of {p.module}, or its scale stands for as many passes as that is long."
    )
    return [Fix("code", source), *([history] if p.recipe == "delayed" else []), p.keep_out, p.batch]
