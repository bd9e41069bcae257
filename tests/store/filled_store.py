"""What tests/store/test_compaction.py and others share."""

from __future__ import annotations

import numpy as np
from store.kit import Feed, made_up

WINDOWS = ((None, None), (100, 555))


def fill(feed: Feed, num_steps: int, *, ranks: int = 2, per_batch: int = 40, run: str = "run-1") -> None:
    rng = np.random.default_rng(7)
    agents = [feed.agent(run, rank) for rank in range(ranks)]
    for first in range(0, num_steps, per_batch):
        steps = list(range(first, min(first + per_batch, num_steps)))
        for agent in agents:
            loss = rng.normal(2, 1, len(steps))
            loss[rng.random(len(steps)) < 0.03] = np.nan
            feed.send(agent, steps, fields=made_up(rng, len(steps), 3), scalars={"loss": list(loss)})
