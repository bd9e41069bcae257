"""Another setting than the recipe's is in effect: kind of scale, tile, format. Each is what the operand would be under it.

Shapes:     Case -> guesses
Thread:     training, and autograd's
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from fp8watch.numerics.formats import FORMATS
from fp8watch.quantize.why.case import Case, Guess, Tile
from fp8watch.recipe import OperandRecipe
from fp8watch_agent.fault_names import FORMAT, SCALE_KIND, SHARE, TILE

_TENSOR: Tile = (-1, -1)
_TILES: tuple[Tile, ...] = ((1, 128), (128, 1), (128, 128), (1, 32), (32, 1), (1, -1), (-1, 1))
_PLAIN = OperandRecipe(None, power_2_scale=False)  # of a tile as large as it may be: no rule but amax


def scale_kind(case: Case) -> Iterator[Guess]:
    """Scales that are powers of two where the recipe has float32, or the other way round."""
    if case.scale is not None or case.spec.scaling == "mx":
        return
    power = not case.spec.power_2_scale
    scale = case.scale_of(case.amax(case.side), _current(case.spec, power))
    share = case.explained(case.quantised(scale) / scale, everywhere=True)
    yield Guess(SCALE_KIND, {SHARE: share, "power_2_scale": float(power)})


def one_scale(case: Case) -> Iterator[Guess]:
    """One scale for the tensor."""
    yield from _of_shapes(case, (_TENSOR,))


def tile(case: Case) -> Iterator[Guess]:
    """Scales of tiles of another shape."""
    yield from _of_shapes(case, _TILES)


def _of_shapes(case: Case, shapes: tuple[Tile, ...]) -> Iterator[Guess]:
    if case.scale is not None:
        return
    for power in dict.fromkeys((case.spec.power_2_scale, False)):
        for sides in shapes:
            if sides == case.side or (sides[0] < 0 and sides[1] > 0 and not case.whole):
                continue
            scale = case.scale_of(case.amax(sides), _current(case.spec, power))
            share = case.explained(case.quantised(scale) / scale, everywhere=True)
            numbers = {"rows": float(sides[0]), "columns": float(sides[1]), "power_2_scale": float(power)}
            yield Guess(TILE, {SHARE: share, **numbers})


def number_format(case: Case) -> Iterator[Guess]:
    """Codes of the other format, with scales that are right for it."""
    for fmt in FORMATS.values():
        if fmt.name == case.spec.format:
            continue
        if case.scale is None:
            scale = case.scale_of(case.amax(case.side), replace(case.spec, format=fmt.name))
        else:
            scale = case.right_scale
        share = case.explained(case.quantised(scale, fmt) / scale, everywhere=True)
        bits = torch.finfo(fmt.dtype).bits
        yield Guess(FORMAT, {SHARE: share, "exponent_bits": float(bits - 1 - (2 if fmt.name == "E5M2" else 3))})


def _current(spec: OperandRecipe, power: bool) -> OperandRecipe:
    """The same with a scale of the amax, of one kind or the other."""
    return replace(_PLAIN, format=spec.format, power_2_scale=power, eps=spec.eps)
