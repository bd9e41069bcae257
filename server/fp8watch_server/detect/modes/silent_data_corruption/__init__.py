"""Silent data corruption: mode 15, silent-data-corruption.

Seven find it: `families.corruption` by a leap, `weight_zeros` by elements that became 0, `families.replica_consistency` by hashes
that differ between replicas, `families.optimizer_state` by moments that change while no optimizer runs, `families.weight_updates` by
what one update did, `gradient_sums` by gradients of several processes that do not add up, `frozen_weights` by hashes of weights that
nothing trains.
"""

from __future__ import annotations

from fp8watch_server.detect.families.corruption import Corruption
from fp8watch_server.detect.families.optimizer_state import OptimizerState
from fp8watch_server.detect.families.weight_updates import WeightUpdates
from fp8watch_server.detect.limits import threshold
from fp8watch_server.detect.mode import Mode
from fp8watch_server.detect.modes.silent_data_corruption.frozen_weights import FrozenWeights
from fp8watch_server.detect.modes.silent_data_corruption.gradient_sums import GradientSums
from fp8watch_server.detect.modes.silent_data_corruption.weight_zeros import WeightZeros
from fp8watch_server.detect.modes.silent_data_corruption.words import alternatives, fixes, words

MODE = Mode(
    number=15,
    slug="silent-data-corruption",
    alternatives=(
        ("optimizer-divergence", "more than a tenth of the weights leaped, or the LR did"),
        ("recipe-mismatch", "a checkpoint was loaded in that step: the timeline shows a restart"),
        ("outlier-growth", "the weight grew over many steps"),
    ),
    words=words,
    fixes=fixes,
    thresholds=(
        threshold(
            "corruption_jump_octaves",
            0.3,
            "octaves",
            0.01,
            64,
            "30 × the floor of weights; the largest healthy step is 0.04",
        ),
    ),
    detectors=(Corruption, WeightZeros, OptimizerState, WeightUpdates, GradientSums, FrozenWeights),
    alternatives_of=alternatives,
)
