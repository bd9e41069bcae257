"""Where fewer than half of the sites come in a step, that is said."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from detect.play import play
from detect.scenarios import Case
from detect.trace import Trace, healthy

from fp8watch_agent.wire import Batch
from fp8watch_server.incidents.explain import explain


class InTurns(Trace):
    """A trace whose modules send their records once in `turns` steps; all of them in steps that `every` divides."""

    turns: int = 16
    every: int = 1 << 20

    def batches(self, per_batch: int = 8, every: int = 1) -> Iterator[Batch]:
        module = {
            s.id: k
            for k, name in enumerate(sorted({s.module for s in self.sites}))
            for s in self.sites
            if s.module == name
        }
        for batch in super().batches(per_batch, every):
            of = np.array([module[int(i)] for i in batch.site])
            keep = (batch.step < 24) | (batch.step % self.every == 0) | (of % self.turns == batch.step % self.turns)
            sent = {name: batch.column(name)[keep] for name in batch.sent}
            yield replace(batch, step=batch.step[keep], site=batch.site[keep], sent=sent)


@pytest.mark.parametrize(("turns", "every", "told"), [(7, 1 << 20, True), (1, 1 << 20, False), (7, 16, False)])
def test_sites_that_come_in_turns_are_said_once(turns: int, every: int, told: bool) -> None:
    t = healthy(3, 160, 1)
    t = InTurns(**t.__dict__)
    t.turns, t.every = turns, every
    found = play(Case([t], 0))
    assert [(f.mode, f.severity, f.step) for f in found] == ([("recipe-mismatch", "info", 24 + 63)] if told else [])
    if told:
        words = explain(found[0], t.facts)
        assert words.title.startswith("Sites come in turns: about ")
        assert "overhead_budget" in words.fix[0]["text"]
        assert found[0].kind == "blind"
