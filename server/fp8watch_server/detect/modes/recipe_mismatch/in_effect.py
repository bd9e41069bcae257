"""Another setting than the recipe's is in effect, found at the codes themselves: words and fixes.

Shapes:     Finding, facts -> text
Thread:     any; only data and pure functions
"""

from __future__ import annotations

import math

from fp8watch_agent.fault_names import EPS, FORMAT, SCALE_KIND, TILE
from fp8watch_server.detect.families.fault_why import numbers
from fp8watch_server.detect.finding import Finding, SiteFacts
from fp8watch_server.detect.phrases import evidence, number
from fp8watch_server.detect.remedies import Fix, Place, set_to
from fp8watch_server.detect.switches import format_of, granularity


def words(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    """Title and cause."""
    title, sentence = _said(str(f.extra.get("why")), numbers(f.extra), f, s)
    explains = evidence(f, "explained")
    how = (
        f" It explains {number(explains)} % of what was wrong"
        if explains is not None
        else " It explains what was wrong"
    )
    return title, (
        f"{sentence} The run declares another recipe than what quantises this operand.{how} in step {f.step}, tried on the operand itself."
    )


def _said(why: str, n: dict[str, float], f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    where = f"{s.operand} of {s.module}" if s else "an operand"
    if why == EPS:
        eps, recipe = epsilon(n.get("eps", 0.0), power_2=s is not None and s.power_2_scale), s.eps if s else 0.0
        zeroed, below = 100 * n.get("zeroed", 0.0), 100 * n.get("below", 0.0)
        return (
            f"An amax epsilon of {eps} is in effect for {where}; the recipe says {number(recipe) if recipe else 'none'}",
            f"All tiles of {where} whose amax lies below one value have the same scale, which is that of an amax epsilon of {eps}. "
            f"{number(below)} % of its elements lie in such tiles, and {number(zeroed)} % of the tensor became 0.",
        )
    if why == SCALE_KIND:
        is_power = n.get("power_2_scale", 0.0) > 0
        now, then = ("powers of two", "float32") if is_power else ("float32", "powers of two")
        return (
            f"Scales of {where} are {now}; the recipe says {then}",
            f"Codes of {where} are to the bit those of scales that are {now}.",
        )
    if why == TILE:
        shape = _tile(n)
        declared = f"tiles of {s.tile[0]}×{s.tile[1]}" if s else "another"
        return (
            f"{where[:1].upper()}{where[1:]} has {shape}; the recipe says {declared}",
            f"Codes of {where} are to the bit those of {shape}.",
        )
    other = "E5M2" if n.get("exponent_bits") == 5 else "E4M3"
    return (
        f"Codes of {where} are {other}; the recipe says {s.format if s else 'another format'}",
        f"Codes of {where} are to the bit those of a cast to {other} with its own scales.",
    )


def epsilon(largest: float, *, power_2: bool) -> str:
    """An eps in words. Scales that are powers of two tell it up to a factor of two: the power of ten within it is meant."""
    if not largest > 0:
        return "0"
    if not power_2:
        return number(float(f"{largest:.3g}"))
    ten = 10.0 ** math.floor(math.log10(largest))
    return (
        f"about {ten:.0e}".replace("e-0", "e-") if ten > largest / 2 else f"{number(largest / 2)} to {number(largest)}"
    )


def _tile(n: dict[str, float]) -> str:
    rows, columns = int(n.get("rows", -1)), int(n.get("columns", -1))
    if rows < 0 and columns < 0:
        return "one scale for the tensor"
    if rows < 0 or columns < 0:
        return f"one scale {'a column' if rows < 0 else 'a row'}" if 1 in (rows, columns) else "scales of another tile"
    return f"tiles of {rows}×{columns}"


def fixes(p: Place) -> list[Fix]:
    """What to change, most likely first."""
    why, operand = str(p.extra.get("why")), p.operand
    first: list[Fix] = []
    if why == EPS:
        kind, text = set_to(p.backend, (operand,), p.eps, p.power_2_scale)
        first = [
            Fix(kind, f"{text}: the eps of the recipe, where the process starts. What is in effect was set elsewhere.")
        ]
    elif why == SCALE_KIND:
        kind, text = set_to(p.backend, (operand,), None, p.power_2_scale)
        first = [Fix(kind, f"{text}: the kind of scale that the recipe says.")]
    elif why == TILE:
        first = granularity(p)
    elif why == FORMAT:
        first = format_of(p)
    return [
        *first,
        Fix("code", "Print what is in effect in that process: its environment, and the recipe object that the module quantises with."),
        Fix("code", "If it is meant: declare it, so that records are judged by what is in effect: `attach(recipe=...)`, or its variables."),
    ]  # fmt: skip
