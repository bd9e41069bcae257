"""Bad batch or data shift: mode 14, bad-batch.

Two find it in the loss: `families.loss_jump` one that jumps, `level` one that stays a little higher. Four in what enters the
model: `repeated` batches that come again, `copies` rows that are alike, `labels` labels beside their tokens, `composition` padding,
frequent tokens and labels that stand where they are asked for.
"""

from __future__ import annotations

from fp8watch_server.detect.families.loss_jump import LossJumps
from fp8watch_server.detect.limits import SPEC, TUNED, threshold
from fp8watch_server.detect.mode import Mode
from fp8watch_server.detect.modes.bad_batch.composition import Composition
from fp8watch_server.detect.modes.bad_batch.copies import CopiedRows
from fp8watch_server.detect.modes.bad_batch.labels import LabelMatch
from fp8watch_server.detect.modes.bad_batch.level import LossLevel
from fp8watch_server.detect.modes.bad_batch.repeated import RepeatedBatches
from fp8watch_server.detect.modes.bad_batch.words import fixes, words

MODE = Mode(
    number=14,
    slug="bad-batch",
    alternatives=(
        ("optimizer-divergence", "the weights of most layers grow, the loss does not come back"),
        ("nan-in-loss", "the loss was not finite"),
        ("silent-data-corruption", "the loss stays high, and one weight leaped in the step before"),
    ),
    words=words,
    fixes=fixes,
    thresholds=(
        threshold(
            "loss_jump_sigma",
            6,
            "ratio",
            1,
            1000,
            "the public spike rule's 6σ, over a median that a spike does not move",
        ),
        threshold("loss_jump_min", 0.2, "share", 0.001, 100, TUNED),
        threshold("grad_norm_jump", 2.5, "ratio", 1.1, 1e6, TUNED),
        threshold("recover_steps", 5, "steps", 1, 100, SPEC),
        threshold("loss_level_min", 0.05, "share", 0.001, 100, "an info; half of the labels shifted by one: 0.18"),
        threshold("repeated_steps", 3, "steps", 2, 1000, "bit for bit the inputs of as many steps before: no chance"),
    ),
    detectors=(LossJumps, LossLevel, RepeatedBatches, LabelMatch, Composition, CopiedRows),
)
