"""What is found of a fault goes with its step, and its incident says it: title, cause, and what to change."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from canary.conftest import Small
from canary.faults import break_site, by_codes, elsewhere, garbage
from canary.wrong_sites import stale_dgrad, swizzled, with_eps
from proving.collector import incidents, serving

import fp8watch
from fp8watch import recipe as recipes
from fp8watch.observer.fault_why import ASK_AGAIN_STEPS, MAX_SITES, FaultWhy
from fp8watch.quantize.why.case import Guess
from fp8watch_agent.fault_names import WHY, Why, decode, encode
from fp8watch_agent.record import ROW, Measured
from fp8watch_server.incidents.explain import explain

EPS_FIX = "FP8_QUANT_BWD_GRAD_AMAX_EPS=0"


def told(line):
    """The first finding in words."""
    found = line.findings[0]
    return found, explain(found, line.sites)


def test_an_eps_in_effect_is_a_recipe_that_is_not_the_declared_one(train) -> None:
    line, _ = train(4, before=lambda w: break_site(w, "b", "grad_output", False, None, dequantised=with_eps(1e-3)))
    found, words = told(line)
    assert (found.mode, found.severity, found.verdict) == ("recipe-mismatch", "critical", "fp8")
    assert words.title == "An amax epsilon of about 1e-3 is in effect for grad_output of b; the recipe says none"
    assert "% of the tensor became 0" in words.cause
    assert words.fix[0]["text"].startswith(EPS_FIX)
    assert {f.mode for f in line.findings} == {"recipe-mismatch"}, "and so it stays"


def test_scales_at_another_place_keep_their_mode_and_say_so(train) -> None:
    line, _ = train(
        3,
        recipe=recipes.blockwise(environ={}, power_2_scale=False),
        before=lambda w: break_site(w, "b", "input", False, swizzled, dequantised=by_codes(swizzled)),
    )
    found, words = told(line)
    assert found.mode == "quantiser-fault"
    assert words.title.startswith("The quantiser of b input (fprop), rowwise is broken: scales of other tiles")
    assert "That explains 100 % of what is wrong" in words.cause
    assert "swizzle" in words.fix[0]["text"]


def test_codes_at_another_place_are_told_with_how_far(train) -> None:
    line, _ = train(3, before=lambda w: break_site(w, "c", "input", False, elsewhere))
    assert "codes lie 16 columns off" in told(line)[1].title


def test_what_no_hypothesis_explains_is_told_as_before(train) -> None:
    line, watch = train(3, before=lambda w: break_site(w, "b", "input", True, garbage))
    found, words = told(line)
    assert "why" not in found.extra
    assert "further than half a step" in words.title
    assert not watch._plan.why.found
    assert not any(name.startswith(WHY) for logs in line.logs for name in logs)


def test_a_stale_transposed_copy_is_told_by_the_product_of_dgrad(train, monkeypatch) -> None:
    stale_dgrad(monkeypatch, (144, 272), 3)
    line, _ = train(6, tokens=512)
    found, words = told(line)
    assert found.mode == "quantiser-fault"
    assert (line.sites[found.site].module, line.sites[found.site].operand) == ("b", "weight")
    assert words.title == "The transposed copy of the weight of b is stale"
    assert "dgrad reads another copy" in words.cause
    assert "fprop and wgrad are right" in words.cause
    assert "after each update" in words.fix[0]["text"]


def test_where_too_few_rows_tell_it_the_product_is_not_that_of_its_operands(train, monkeypatch) -> None:
    stale_dgrad(monkeypatch, (144, 272), 3)
    line, _ = train(6, tokens=96)
    assert {f.mode for f in line.findings} <= {"kernel-output-fault", "accumulator-precision"}
    assert line.findings


def test_a_healthy_run_asks_nothing(train) -> None:
    line, watch = train(4)
    assert line.findings == []
    assert watch._plan.why == FaultWhy(watch._plan.why.scales_before, watch._plan.why.update_of)


@pytest.mark.parametrize(("share", "kept"), [(1.0, True), (0.98, False), (float("nan"), False)])
def test_what_a_step_says_is_read_back_and_less_than_99_percent_is_not_told(share, kept) -> None:
    logs = encode(Why("eps", {"share": share, "eps": 1e-3}), "layers.0.fc/1.input.rowwise")
    assert (decode(logs, "layers.0.fc/1.input.rowwise") is not None) == kept
    assert decode(logs, "layers.0.fc.input.rowwise") is None
    assert decode({name.replace("/eps/", "/later-kind/"): 1.0 for name in logs}, "layers.0.fc/1.input.rowwise") is None


def wrong_rows(*which):
    rows = np.zeros(4, dtype=ROW)
    rows["measured"] = int(Measured.QUANTISER)
    for row in which:
        rows["num_off_grid"][row] = 3
    return rows


class Away(torch.Tensor):
    """A number that lies on a device: it cannot be read."""

    is_cpu = False

    def __bool__(self):
        raise AssertionError("read back")

    __float__ = __bool__


def test_on_a_device_nothing_is_read_back_and_the_next_look_asks() -> None:
    why, bad = FaultWhy(late=True), torch.tensor(True).as_subclass(Away)
    assert not why.due(2, 1, bad)
    assert why.told(wrong_rows(2), str) == {}
    assert why.due(2, 2, bad)
    guesses = [
        Guess(kind, {"share": torch.tensor(share).as_subclass(Away)}) for kind, share in (("eps", 0.5), ("tile", 1.0))
    ]
    why.keep(2, guesses)
    asked = {name: float(value.as_subclass(torch.Tensor)) for name, value in why.take().items()}
    assert len(asked) == 2
    assert why.take() == {}
    numbers = {**asked, "loss": 1.0}
    why.arrived(numbers)
    assert numbers == {"loss": 1.0}
    assert why.told(wrong_rows(1, 2), str) == {"fault_why/tile/share/2": 1.0}
    assert why.told(wrong_rows(), str) == {}, "of a site that is right nothing is said"


def test_a_site_is_asked_once_and_some_of_them_in_a_session() -> None:
    why, bad = FaultWhy(), torch.tensor(True)
    assert why.due(0, 1, bad)
    assert not why.due(0, 2, bad)
    assert why.due(0, 1 + ASK_AGAIN_STEPS, bad)
    assert not why.due(1, 5, torch.tensor(False))
    assert [why.due(row, 5, bad) for row in range(1, MAX_SITES + 1)] == [True] * (MAX_SITES - 1) + [False]


@pytest.mark.heavy(15, "fp8watch/quantize", "fp8watch/layers", "server/fp8watch_server/detect")
def test_incidents_of_a_real_collector_say_why_and_what_to_change(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FP8WATCH_SPOOL_DIR", str(tmp_path / "spool"))
    said = {}
    with serving(tmp_path) as url:
        for name in ("eps", "stale-copy", "elsewhere"):
            monkeypatch.setenv("FP8WATCH_RUN", name)
            with monkeypatch.context() as patch:
                said[name] = _incident(url, name, patch)
    mode, title, fix = said["eps"]
    assert (mode, title.partition(" is in effect")[0]) == ("recipe-mismatch", "An amax epsilon of about 1e-3")
    assert fix.startswith(EPS_FIX)
    mode, title, fix = said["stale-copy"]
    assert (mode, title.partition(": about")[0]) == (
        "quantiser-fault",
        "The transposed copy of the weight of b is stale",
    )
    assert "update" in title.partition(": about")[2]
    assert fix.startswith("Write the copy anew after each update")
    mode, title, fix = said["elsewhere"]
    assert (mode, "codes lie 16 columns off" in title) == ("quantiser-fault", True)
    assert fix.startswith("Check strides and shape")


def _incident(url, name, patch):
    """Mode, title and first fix of the only incident of a short training with this fault."""
    torch.manual_seed(0)
    model = Small()
    watch = fp8watch.attach(model, run=name, collector=url)
    if name == "eps":
        break_site(watch, "b", "grad_output", False, None, dequantised=with_eps(1e-3))
    elif name == "elsewhere":
        break_site(watch, "b", "input", False, elsewhere)
    else:
        stale_dgrad(patch, (144, 272), 3, calls=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    try:
        for _ in range(8):
            optimizer.zero_grad()
            model(torch.randn(512, 160)).backward()
            optimizer.step()
        assert watch.flush(20)
        assert dict(watch.guard.errors) == {}
    finally:
        watch.detach()
    for _ in range(200):
        if found := [i for i in incidents(url, name) if i["origin"]]:
            assert len(found) == 1, [i["title"] for i in found]
            return found[0]["mode"], found[0]["title"], found[0]["fix"][0]["text"]
        time.sleep(0.05)
    raise AssertionError(f"nothing was said of {name}")
