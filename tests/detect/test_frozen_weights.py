"""A weight that nothing trains and that something wrote is told by its hash, with the steps between which it happened."""

from __future__ import annotations

import numpy as np
import pytest
from detect.folded import Folded, fold
from detect.play import play
from detect.scenarios import Case
from detect.trace import Trace, healthy

from fp8watch_agent.record import Measured
from fp8watch_server.detect.modes.silent_data_corruption.frozen_weights import HOLD_STEPS
from fp8watch_server.incidents.explain import explain

STEPS, AT, EVERY = 300, 170, 32


def adapted(frozen: bool = True) -> Trace:
    """Weights of the MLP are hashed in turns; frozen, so that no wgrad reads their gradients."""
    t = healthy(3, STEPS, 1, recipe="blockwise", power_2_scale=True)
    if frozen:
        keep = ~(t.mask(operand="grad_output", direction="columnwise") & layer(t))
        t.sites = [s for s, kept in zip(t.sites, keep, strict=True) if kept]
        t.columns = {name: values[:, keep] for name, values in t.columns.items()}
    t.columns["weight_hash"] = np.zeros((STEPS, len(t.sites)), dtype=np.int64)
    for turn, j in enumerate(np.flatnonzero(layer(t) & t.mask(operand="weight"))):
        t.columns["weight_hash"][:, j] = 7_000_000_000_000 + j
        t.columns["measured"][np.arange(STEPS) % EVERY == 3 * turn, j] |= int(Measured.HASH)
    return t


def layer(t: Trace) -> np.ndarray:
    return np.array([s.module.startswith("layers.0.mlp.") for s in t.sites])


def written(t: Trace, num: int | None = None, until: int = STEPS) -> list[str]:
    """So many weights are others from AT on; their modules."""
    hit = np.flatnonzero(layer(t) & t.mask(operand="weight"))[:num]
    t.columns["weight_hash"][AT:until, hit] ^= 1 << 17
    return [t.sites[j].module for j in hit]


def told(t: Trace) -> list[Folded]:
    return [i for i in fold(play(Case([t], AT)), t.facts) if i.mode == "silent-data-corruption"]


@pytest.mark.parametrize("num", [1, None], ids=["one", "all"])
def test_frozen_weights_that_were_written_are_told_once_with_the_steps_between(num: int | None) -> None:
    t = adapted()
    modules = written(t, num)
    [incident] = told(t)
    assert (incident.severity, incident.named.verdict) == ("info", "shared")
    last, first = incident.named.extra["between"]
    assert (last, first) == (160 if num else 166, 192), "all of them together say it closer"
    assert incident.first.onset == last + 1
    assert AT + EVERY < incident.first.step <= AT + 2 * EVERY + HOLD_STEPS
    words = explain(incident.named, t.facts)
    which = (
        f"The weight of {modules[0]}, which had stood, was"
        if num
        else f"{len(modules)} of {len(modules)} weights that had stood were"
    )
    assert words.title.startswith(f"{which} written between steps {last} and {first}")
    assert "FP8 is not the cause" in words.cause
    assert "merge" in words.fix[0]["text"]


def test_weights_that_begin_to_train_or_do_are_not_said_to_be_written() -> None:
    t = adapted()
    hit = layer(t) & t.mask(operand="weight")
    t.columns["weight_hash"][AT:, hit] += np.arange(STEPS - AT)[:, None]  # unfrozen
    assert told(t) == []
    t = adapted(frozen=False)
    written(t)
    assert told(t) == [], "one that is trained may stand, and move once"


@pytest.mark.parametrize(("until", "num_told"), [(AT + 1, 0), (AT + 70, 1)], ids=["before its look", "after two"])
def test_weights_that_come_back_are_told_once_where_a_look_met_them(until: int, num_told: int) -> None:
    t = adapted()
    [module] = written(t, 1, until=until)
    found = told(t)
    assert len(found) == num_told
    assert all(module in explain(i.named, t.facts).title for i in found)


def test_a_weight_that_was_not_known_to_stand_says_nothing() -> None:
    t = adapted()
    hit = layer(t) & t.mask(operand="weight")
    t.columns["weight_hash"][: EVERY + 30, hit] ^= 1 << 3
    assert told(t) == []
