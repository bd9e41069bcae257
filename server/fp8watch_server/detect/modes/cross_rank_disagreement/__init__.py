"""Ranks disagree: mode 20, cross-rank-disagreement.

`families.replica_consistency` finds it: what ranks must have in common.
"""

from __future__ import annotations

from fp8watch_server.detect.mode import Mode
from fp8watch_server.detect.modes.cross_rank_disagreement.words import fixes, words

MODE = Mode(
    number=20,
    slug="cross-rank-disagreement",
    alternatives=(
        ("silent-data-corruption", "it is one rank only, and weights differ as well"),
        ("frozen-scale", "the odd rank's scale does not move at all"),
        ("recipe-mismatch", "the odd rank runs other flags: compare fingerprints"),
    ),
    words=words,
    fixes=fixes,
)
