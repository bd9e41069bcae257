"""Names under which a session logs what its batches hold: shares and a hash, never the data.

Shapes:     names of `watch.log` -> one float64 a step
Thread:     any; data alone
"""

from __future__ import annotations

BATCH = "batch/"
"""Begins all of them."""

HASH = f"{BATCH}hash"
"""52 bits over what entered the model in a step, the same wherever the order of its micro-batches differs."""

SHIFTS = {-1: f"{BATCH}label_is_previous", 0: f"{BATCH}label_is_same", 1: f"{BATCH}label_is_next", 2: f"{BATCH}label_is_second_next"}  # fmt: skip
"""Share of the scored labels that are the token so many places further on; 0 … 1."""

SCORED = f"{BATCH}scored"
"""Share of the labels that are scored; 0 … 1."""

MASK = f"{BATCH}mask"
"""Mean of the attention mask that the model was given: the share of places that are attended to."""

CONCENTRATION = f"{BATCH}concentration"
"""Σ p² over the tokens of a step, in `BUCKETS` buckets: 1 where all are one token, 1 / BUCKETS where all are as frequent."""

TARGETS = f"{BATCH}targets_concentration"
"""The same over the scored class targets of a loss that are not beside tokens: 1 where all are one class."""

COPIES = f"{BATCH}copies"
"""Share of the rows of a micro-batch that are copies of another row in it; 0 … 1."""

BUCKETS = 4096
