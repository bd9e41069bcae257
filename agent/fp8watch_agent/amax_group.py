"""Which ranks share their amax, as a fact of a session: those of one group say the same.

Shapes:     ranks of a process group -> one short line
Thread:     any
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import pairwise

AMAX_RANKS_FACT = "amax_reduction_ranks"
"""Fact of a session: global ranks that amax is reduced over, see `encode_ranks`."""
MAX_LENGTH = 200


def encode_ranks(ranks: Iterable[int]) -> str:
    """Ranks as "0-7", "0-6/2" for each second one, or "0,3-5": equal for equal groups, whatever their order.

    What would be longer than 200 characters is cut, and closes with how many there are and a hash of all.
    """
    ordered = sorted({int(r) for r in ranks})
    steps = {b - a for a, b in pairwise(ordered)}
    if len(ordered) > 2 and len(steps) == 1 and steps != {1}:
        return f"{ordered[0]}-{ordered[-1]}/{steps.pop()}"
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    said = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    if len(said) <= MAX_LENGTH:
        return said
    code = hashlib.sha256(said.encode()).hexdigest()[:8]
    return f"{said[: MAX_LENGTH - 40].rpartition(',')[0]}… ({len(ordered)} ranks, {code})"
