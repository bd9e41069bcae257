"""What is said of an Inf and of noise is what the recipe of the site does, and what was seen of its onset."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from detect.healthy_run import Run
from detect.play import play
from detect.scenarios import DOWN, GATE, Case
from detect.trace import Trace, healthy

from fp8watch_server.detect.finding import Finding
from fp8watch_server.incidents.explain import explain


def an_inf(recipe: str, operand: str) -> str:
    run = Run()
    site = run.facts[run.sites[run.index(DOWN, operand)].id]
    found = Finding("inf-laundering", "critical", 10, 0, site.id, None, None, (), "fp8", 0, {})
    words = explain(found, {site.id: replace(site, recipe=recipe)})
    return " ".join([words.title, words.cause, *(f["text"] for f in words.fix)])


@pytest.mark.parametrize("operand", ["input", "grad_output"])
@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("blockwise", "its neighbours were quantised unscaled"),
        ("delayed", "the scale stays as it is until the Inf has left it"),
        ("mxfp8", "the other 31 elements become 0"),
        ("rowwise", "the Inf is NaN in the codes"),
    ],
)
def test_what_becomes_of_an_inf_is_what_the_recipe_does(recipe: str, operand: str, said: str) -> None:
    text = an_inf(recipe, operand)
    assert said in text
    assert ("Nothing behind the cast sees the Inf" in text) is (recipe == "blockwise")
    assert ("Reset the amax history" in text) is (recipe == "delayed")
    assert "would have reached the loss" not in text, "the loss of a gradient was computed before it"


def noise_of(t: Trace) -> str:
    first = next(f for f in play(Case([t], 0)) if f.mode == "chronic-quantization-noise")
    return explain(first, t.facts).cause


@pytest.mark.parametrize("creeps", [False, True])
def test_noise_that_came_little_by_little_was_not_there_from_the_first_step(creeps: bool) -> None:
    t = healthy(3, 120)
    mask = t.mask(GATE, "input")
    share = np.interp(np.arange(120), [0, 100], [0.02, 0.16]) if creeps else np.full(120, 0.16)
    t.columns["num_underflow"][:, mask] = (share[:, None] * t.columns["num_nonzero"][:, mask]).astype(np.int64)
    cause = noise_of(t)
    assert ("it was so from the first of them" in cause) is not creeps
    assert ("It was within its limit before that" in cause) is creeps
