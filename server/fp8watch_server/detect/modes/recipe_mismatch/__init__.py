"""Recipe changed: mode 10, recipe-mismatch.

`registry` asks `detector` when sites or sessions are registered, the engine `scale_history` at a resume; `families.training_setup` looks
at clipping and at causal attention in each step, `families.weight_updates` at weights that are rounded behind each update.
"""

from __future__ import annotations

from fp8watch_server.detect.families.training_setup import TrainingSetup
from fp8watch_server.detect.families.weight_updates import WeightUpdates
from fp8watch_server.detect.limits import threshold
from fp8watch_server.detect.mode import Mode
from fp8watch_server.detect.modes.recipe_mismatch.words import alternatives, fixes, words

MODE = Mode(
    number=10,
    slug="recipe-mismatch",
    alternatives=(
        ("scale-rounding", "facts are as they were, the ratio is off"),
        ("sensitive-layer-quantized", "a module was added to the FP8 path, not changed on it"),
    ),
    words=words,
    fixes=fixes,
    thresholds=(
        threshold(
            "resume_scale_octaves", 2, "octaves", 0.5, 32, "a saved scale continues within the spread of gradients, 2σ"
        ),
    ),
    detectors=(TrainingSetup, WeightUpdates),
    alternatives_of=alternatives,
)
