"""Names of scalars by which a step says how it was trained: clipping, the optimizer's state, causal attention.

Shapes:     name -> one float64 a step
Thread:     any; data alone
"""

from __future__ import annotations

OPTIMIZER = "optimizer/"
"""Begins all of them."""

CLIP_NORM = f"{OPTIMIZER}clip_norm"
"""What the gradient norm was clipped to."""

OPTIMIZER_BEGINS = f"{OPTIMIZER}begins"
"""1 in the first step that it ended in the stead of another, which held the same parameters; only there."""

MOMENTS_CHANGED = f"{OPTIMIZER}moments_changed"
"""Tensors of its state that are not as it left them, of those that were looked at. This and the others only where something has
changed."""

MOMENTS_LOOKED = f"{OPTIMIZER}moments_looked"
"""Tensors of its state that were looked at."""

MOMENTS_WHICH = f"{OPTIMIZER}moments_which"
"""Which of them is the first: its number; not sent."""

WEIGHTS_CHANGED = f"{OPTIMIZER}weights_changed"
"""Weights that are not as it left them."""

WEIGHTS_LOOKED = f"{OPTIMIZER}weights_looked"
"""Weights that were looked at."""

WEIGHTS_WHICH = f"{OPTIMIZER}weights_which"
"""Which of them is the first: its number; not sent."""

WRITTEN = f"{OPTIMIZER}written/"
"""Before the name of the first weight that changed, where no moment did: 1."""

CHANGED = f"{OPTIMIZER}changed/"
"""Before the name of the first tensor that changed, "exp_avg of layers.0.fc1.weight": 1."""

SECOND_ZERO = f"{OPTIMIZER}second_moments_zero"
"""Elements of second moments that are 0 where the first moment is not, of those that were looked at; only where there are any."""

SECOND_LOOKED = f"{OPTIMIZER}second_moments_looked"
"""Elements of second moments whose first moment is not 0, of those that were looked at."""

EPS = f"{OPTIMIZER}eps"
"""The eps of the first parameter group, beside them."""

SEES_AHEAD = "attention_sees_ahead/"
"""Before the name of an attention module that never saw a later token, and does: 1."""
