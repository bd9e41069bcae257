"""loss_impact: what one pass says is what the loss does, forward and backward, and nothing of the caller's changes."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from diagnose.small_models import Classifier, batch_of, trained
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8watch
from fp8watch.diagnose import loss_impact


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for name in ("FP8WATCH_COLLECTOR", "FP8WATCH_RECIPE", "FP8WATCH_RUN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FP8WATCH_SPOOL_DIR", str(tmp_path))


def correlation(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    """Of (said, measured): the correlation, and the slope through zero."""
    said, seen = np.array(pairs).T
    return float(np.corrcoef(said, seen)[0, 1]), float((said * seen).sum() / (said * said).sum())


@pytest.mark.parametrize("recipe", ["blockwise", "current", "mxfp8", "nvfp4"])
def test_each_layers_impact_is_what_its_forward_in_fp8_does_to_the_loss(recipe: str) -> None:
    model, _ = trained()
    pairs = []
    for seed in (50, 51):
        got = loss_impact(model, batch_of(seed), recipe=recipe, measure=True)
        assert [x.module for x in got.layers][:3] == ["layers.0.gate", "layers.0.up", "layers.0.down"]
        pairs += [(x.impact, x.measured) for x in got.layers if x.measured is not None]
        assert got.measured_total is not None
        assert abs(got.measured_total) < 4 * got.spread
    assert len(pairs) == 18
    r, slope = correlation(pairs)
    assert r > 0.98
    assert slope == pytest.approx(1, abs=0.1)


def test_of_a_loss_that_is_linear_in_the_output_the_impact_is_exact() -> None:
    torch.manual_seed(0)
    weights = torch.randn(128, 32)
    model = nn.Linear(64, 32)
    x = torch.randn(128, 64)
    got = loss_impact(nn.Sequential(model), x, lambda m, b: (m(b) * weights).sum(), measure=True)
    (layer,) = got.layers
    assert layer.measured == pytest.approx(layer.impact, rel=2e-3)
    quantised = fp8watch.quantize_blockwise
    y = quantised(x).dequantize() @ quantised(model.weight.detach(), (128, 128)).dequantize().t() + model.bias.detach()
    by_row = ((y - model(x).detach()).double() * weights.double()).sum(1)
    assert layer.impact == pytest.approx(float(by_row.sum()), rel=1e-3)
    assert layer.spread == pytest.approx(float(by_row.square().sum().sqrt()), rel=1e-3)
    assert layer.num_rows == 128


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_backward_gemms_cost_what_a_step_with_them_shows(kind: str) -> None:
    model, adamw = trained(8)
    optimizer: Any = adamw if kind == "AdamW" else lambda p: torch.optim.SGD(p, lr=0.5)
    found: dict[str, list[tuple[float, float]]] = {"dgrad": [], "wgrad": []}
    for seed in (50, 51):
        got = loss_impact(model, batch_of(seed), backward=True, measure=True, optimizer=optimizer)
        assert got.descent is not None
        assert got.descent > 0
        for layer in got.layers:
            b = layer.backward
            assert b is not None
            for gemm in found:
                said, seen = getattr(b, gemm), getattr(b, f"measured_{gemm}")
                if said is not None:
                    found[gemm].append((said, seen))
    assert len(found["wgrad"]) == 18
    assert len(found["dgrad"]) == 18
    for gemm, pairs in found.items():
        r, slope = correlation(pairs)
        assert r > 0.95, (gemm, pairs)
        assert slope == pytest.approx(1, abs=0.25), gemm


def test_without_an_optimizer_it_is_steepest_descent() -> None:
    model, _ = trained(3)
    got = loss_impact(model, batch_of(50), backward=True)
    assert got.descent is not None
    assert 0 < got.descent < 0.1
    assert "steps" not in str(got.layers[0].backward)
    assert "descends less" in str(got)


def test_nothing_of_the_callers_is_changed_and_it_says_the_same_again() -> None:
    model, optimizer = trained(3)
    watch = fp8watch.attach(model, recipe="delayed", optimizer=optimizer, overhead_budget=None)
    for seed in (1, 2, 3):
        optimizer.zero_grad()
        model(*batch_of(seed)).backward()
        optimizer.step()
    batch = batch_of(9)

    def state() -> Any:
        return copy.deepcopy(
            (
                model.state_dict(),
                optimizer.state_dict(),
                watch.state_dict(),
                [p.grad for p in model.parameters()],
                batch,
            )
        )

    def flat(x: Any) -> list[Any]:
        if isinstance(x, dict):
            return [y for v in x.values() for y in flat(v)]
        return [y for v in x for y in flat(v)] if isinstance(x, (list, tuple)) else [x]

    def same(a: Any, b: Any) -> bool:
        return all(
            torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in zip(flat(a), flat(b), strict=True)
        )

    before, random = state(), torch.get_rng_state()
    first = loss_impact(model, batch, measure=True, backward=True, optimizer=optimizer)
    assert same(before, state())
    assert torch.equal(random, torch.get_rng_state())
    assert loss_impact(model, batch, measure=True, backward=True, optimizer=optimizer) == first
    assert first.recipe == "delayed"
    watch.detach()


def test_an_attached_models_own_scales_are_asked_about() -> None:
    """Under delayed scaling an operand above its history clips; a fresh history would not show it."""
    model, optimizer = trained(3)
    watch = fp8watch.attach(model, recipe="delayed", optimizer=optimizer, overhead_budget=None)
    for seed in (1, 2, 3):
        optimizer.zero_grad()
        model(*batch_of(seed)).backward()
        optimizer.step()
    x, target = batch_of(9)

    def outlier(_m: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (torch.cat((args[0][:, :1] * 300, args[0][:, 1:]), 1),)

    model.layers[1].down.register_forward_pre_hook(outlier)
    own = {x.module: x for x in loss_impact(model, (x, target)).layers}
    fresh = {x.module: x for x in loss_impact(model, (x, target), recipe="delayed").layers}
    assert own["layers.1.down"].output_error > 5 * fresh["layers.1.down"].output_error
    assert own["layers.1.down"].output_error == max(x.output_error for x in own.values())
    watch.detach()


def test_an_observed_model_is_asked_what_fp8_would_cost() -> None:
    model, _ = trained(2)
    with fp8watch.attach(model, recipe="observe"):
        got = loss_impact(model, batch_of(1))
    assert (got.recipe, len(got.layers)) == ("blockwise", 9)
    assert all(x.spread > 0 for x in got.layers)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_forwards_count_once(reentrant: bool) -> None:
    class Checkpointed(Classifier):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return nn.functional.cross_entropy(self.lm_head(x), target)

    model, _ = trained(2)
    again = Checkpointed()
    again.load_state_dict(model.state_dict())
    plain, got = loss_impact(model, batch_of(1)), loss_impact(again, batch_of(1))
    assert [x.num_rows for x in got.layers] == [256] * 9
    by_name = {x.module: x.impact for x in got.layers}
    assert [by_name[x.module] for x in plain.layers] == pytest.approx([x.impact for x in plain.layers], rel=1e-3)


def test_calls_of_a_shared_module_add_up_and_autocast_is_kept() -> None:
    class Twice(Classifier):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                for _ in range(2):
                    x = self.layers[0](x)
                return nn.functional.cross_entropy(self.lm_head(x).float(), target)

    model, _ = trained(2)
    twice = Twice()
    twice.load_state_dict(model.state_dict())
    got = loss_impact(twice, batch_of(1), measure=True)
    assert [(x.module, x.num_rows) for x in got.layers] == [(f"layers.0.{n}", 512) for n in ("gate", "up", "down")]
    assert all(0.005 < x.output_error < 0.06 for x in got.layers)


def test_an_auxiliary_loss_that_a_module_keeps_can_be_copied() -> None:
    class Keeps(Classifier):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            self.kept = super().forward(x, target)
            return self.kept

    model = Keeps()
    model(*batch_of(0)).backward()
    assert len(loss_impact(model, batch_of(1)).layers) == 9


def test_what_a_recipe_leaves_in_high_precision_has_no_impact_of_its_own() -> None:
    model, _ = trained(2)
    got = loss_impact(
        model, batch_of(1), recipe=fp8watch.blockwise(high_precision=["input"]), measure=True, backward=True
    )
    assert {x.impact for x in got.layers} == {0.0}
    assert got.measured_total is None
    last = got.layers[-1].backward
    assert last is not None
    assert last.wgrad is None
    assert last.dgrad is not None


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model": 3}, "torch.nn.Module"),
        ({"loss_fn": lambda m, b: m(*b).new_zeros(2)}, "one element"),
        ({"loss_fn": lambda m, b: torch.zeros((), requires_grad=True)}, "first argument"),
        ({"loss_fn": lambda m, b: m(*b) * math.nan}, "the loss is nan"),
        ({"loss_fn": lambda m, b: m(*b).detach()}, "no gradient"),
        ({"filter_fn": lambda m, n: False}, "no Linear"),
        ({"recipe": "none"}, "unknown"),
        ({"optimizer": 3, "backward": True}, "a torch optimizer"),
        ({"batch": torch.zeros(3)}, "forward"),
    ],
)
def test_what_cannot_work_is_said(change: dict[str, Any], word: str) -> None:
    given: dict[str, Any] = {"model": Classifier(), "batch": batch_of(1), "loss_fn": None}
    with pytest.raises((TypeError, ValueError), match=word):
        loss_impact(**{**given, **change})


def test_a_model_without_a_loss_is_told_to_bring_one() -> None:
    with pytest.raises(TypeError, match=r"shape \(4, 32\).*loss_fn"):
        loss_impact(nn.Sequential(nn.Linear(32, 32)), torch.zeros(4, 32))
