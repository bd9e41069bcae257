"""What is said of a quantiser fault whose cause was found: what it is in a title, in a sentence, and what to change.

Shapes:     a kind and its numbers -> text
Thread:     any; only data and pure functions
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fp8watch_agent.fault_names import (
    CODES_AS_FORMAT,
    CODES_ROLLED,
    CODES_TRANSPOSED,
    COPY_STALE,
    SCALES_AS_BYTES,
    SCALES_FACTOR,
    SCALES_INVERSE,
    SCALES_PERMUTED,
    SCALES_ROLLED,
    SCALES_ROUNDED,
    SCALES_STALE,
)
from fp8watch_server.detect.phrases import number
from fp8watch_server.detect.remedies import Fix

Numbers = Mapping[str, float]

_LAYOUT = "Compare how the kernel that writes scale_inv and the one that reads it lay it out: strides, padding to whole blocks, swizzle, transposition."
_ORDER = "Write codes and scales of one step together: look for a cache of scales, a missing update, or a stream that reads before the write is over."
_BYTES = "Tell the GEMM the format of scale_inv: E8M0 bytes, float32, and its reciprocal are three things."
_CODES = (
    "Check strides and shape that the kernel is told for the codes, and which dimension it takes for the contraction."
)
_FORMAT = "Give the GEMM the FP8 format that the quantiser wrote: E4M3 and E5M2 have other bytes."
_CACHE = "Write the copy anew after each update: drop what is cached of the weight, and look for an update that goes around the hook that refreshes it."


def _stale(n: Numbers) -> tuple[str, str]:
    which = int(n.get("what", 0))
    what = (
        "scale_inv is that of the step before, and the codes are of this one",
        "the codes were made with the scale of the step before, and scale_inv is that of this one",
        "codes and scale_inv are made with the scale of the step before",
    )[which if which in (0, 1, 2) else 0]
    return "scales of the step before", what


def _rolled(n: Numbers) -> tuple[str, str]:
    by, axis = int(n.get("by", 0)), int(n.get("axis", -1))
    along = {0: "tile rows", 1: "tile columns"}.get(axis, "tiles, counted row by row")
    return (
        "scales of other tiles",
        f"each tile has the scale of the one {abs(by)} {along} {'before' if by > 0 else 'behind'} it",
    )


def _permuted(n: Numbers) -> tuple[str, str]:
    moved, of = number(int(n.get("moved", 0))), number(int(n.get("scales", 0)))
    return (
        "scales of other tiles",
        f"all scales of the operand are there, {moved} of {of} at another place: padded or swizzled otherwise than they are read",
    )


def _factor(n: Numbers) -> tuple[str, str]:
    factor = number(n.get("factor", 1.0))
    return (
        f"scale_inv is {factor} times what it ought to be",
        f"the codes are right, and every wrong scale is {factor} times the right one",
    )


def _rounded(n: Numbers) -> tuple[str, str]:
    way = "down" if n.get("way", 0) < 0 else "up"
    return (
        f"scales are read rounded {way} to powers of two",
        f"the codes are right, and each scale_inv is the power of two {'below' if way == 'down' else 'above'} the right one",
    )


def _inverse(n: Numbers) -> tuple[str, str]:
    return (
        "scale is read as scale_inv",
        "the codes are right, and what multiplies them is the scale and not its reciprocal",
    )


def _bytes(n: Numbers) -> tuple[str, str]:
    which = int(n.get("as", 0))
    read = (
        "the biased exponent as a number",
        "the exponent as a number",
        "the E8M0 byte as E4M3",
        "the E8M0 byte as E5M2",
    )
    what = read[which if 0 <= which < len(read) else 0]
    return "scale_inv is read in another format", f"the codes are right, and scale_inv is what comes of {what}"


def _codes_rolled(n: Numbers) -> tuple[str, str]:
    by, columns = int(n.get("by", 0)), n.get("axis", 1) == 1
    what = f"{abs(by)} {'column' if columns else 'row'}{'' if abs(by) == 1 else 's'}"
    return f"codes lie {what} off", f"each code lies {what} {'behind' if by > 0 else 'before'} its place"


def _transposed(n: Numbers) -> tuple[str, str]:
    way = (
        "of the transposed operand are read as if it were not"
        if n.get("way", 0) == 0
        else "that are not transposed are read as if they were"
    )
    return "codes are transposed", f"the codes are right, and those {way}"


def _as_format(n: Numbers) -> tuple[str, str]:
    what = (
        "of this recipe are read as the other one"
        if n.get("written", 0) == 0
        else "of the other one are read as this recipe's"
    )
    return "codes are read as another FP8 format", f"bytes of the format {what}"


_WORDS: Mapping[str, tuple[Callable[[Numbers], tuple[str, str]], str]] = {
    SCALES_STALE: (_stale, _ORDER),
    SCALES_ROLLED: (_rolled, _LAYOUT),
    SCALES_PERMUTED: (_permuted, _LAYOUT),
    SCALES_FACTOR: (_factor, _BYTES),
    SCALES_ROUNDED: (_rounded, _BYTES),
    SCALES_INVERSE: (_inverse, _BYTES),
    SCALES_AS_BYTES: (_bytes, _BYTES),
    CODES_ROLLED: (_codes_rolled, _CODES),
    CODES_TRANSPOSED: (_transposed, _CODES),
    CODES_AS_FORMAT: (_as_format, _FORMAT),
}  # fmt: skip


def reason(kind: str, numbers: Numbers) -> tuple[str, str] | None:
    """What it is for a title, and as a clause; None for a kind with words of its own."""
    found = _WORDS.get(kind)
    return None if found is None else found[0](numbers)


def remedy(kind: str) -> Fix | None:
    """What mends it; None where the kind is not known."""
    if kind == COPY_STALE:
        return Fix("code", _CACHE)
    found = _WORDS.get(kind)
    return None if found is None else Fix("code", found[1])


def stale_copy(module: str, direction: str, gemms: str, right: str, numbers: Numbers) -> tuple[str, str]:
    """Title and cause of a weight that a GEMM reads an older copy of.

    Args:
        module: whose weight it is.
        direction: of the copy.
        gemms: that read it, as far as is known.
        right: GEMMs that were looked at and not found wrong; empty: none.
        numbers: of the hypothesis.
    """
    copy = "transposed copy" if direction == "columnwise" else "copy"
    distance, updates = 100 * numbers.get("distance", 0.0), numbers.get("updates")
    age = f": about {number(max(1, round(updates)))} update{'s' if round(updates) > 1 else ''} old" if updates else ""
    are = "are" if " and " in right else "is"
    far = f" One update moves this weight by {number(distance / updates)} %." if updates else ""
    return (
        f"The {copy} of the weight of {module} is stale{age}",
        f"{gemms or 'The GEMM'} reads another copy of the weight than the one that was updated: a right product of a weight that is "
        f"{number(distance)} % from it.{far}{f' {right} {are} right.' if right else ''}",
    )
