"""Of several sites that clip the one is named that makes it grave: a mild one before it in data flow hides no page."""

from __future__ import annotations

import numpy as np
import pytest
from detect.play import play
from detect.scenarios import DOWN, Case
from detect.trace import Trace, healthy

from fp8watch_server.detect.finding import Finding

AT, STEPS = 100, 130
BEFORE = "layers.0.mlp.down_proj"


def clipping(depth: float, before: float, *, frozen: bool = False) -> Trace:
    """Depths at the two inputs; where nothing follows, the scale stands still as well."""
    t = healthy(3, STEPS, recipe="delayed", hybrid=True)
    at = np.arange(STEPS) >= AT
    for module, ratio in ((DOWN, depth), (BEFORE, before)):
        j = t.one(module, "input")
        t.columns["scale_ratio_max"][at, j] = ratio
        if frozen:
            for name in ("scale_inv_min", "scale_inv_max"):
                t.columns[name][:, j] = t.columns[name][0, j]
    return t


def found_in(t: Trace, mode: str) -> list[Finding]:
    return [f for f in play(Case([t], AT)) if f.mode == mode and len(f.extra["sites"]) == 2]


@pytest.mark.parametrize(("mode", "frozen"), [("delayed-clip", False), ("frozen-scale", True)])
def test_a_mild_clip_before_a_deep_one_in_data_flow_hides_no_page(mode: str, frozen: bool) -> None:
    t = clipping(40.0, 1.6 if mode == "delayed-clip" else 1.2, frozen=frozen)
    found = found_in(t, mode)
    assert found
    for f in found:
        assert (f.severity, t.facts[f.site].module) == ("critical", DOWN)
        assert {t.facts[i].module for i in f.extra["sites"]} == {DOWN, BEFORE}
        assert next(e.value for e in f.evidence if e.field == "clip_depth") == pytest.approx(40, rel=0.01)


def test_of_two_that_are_as_grave_the_first_in_data_flow_is_named() -> None:
    t = clipping(40.0, 8.0)
    assert {t.facts[f.site].module for f in found_in(t, "delayed-clip")} == {BEFORE}
