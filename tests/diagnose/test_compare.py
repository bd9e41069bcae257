"""compare_bf16: says which of the two it is, and changes nothing."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fp8watch
from fp8watch.diagnose import LayerPair, StepPair, Verdict, compare_bf16
from fp8watch.diagnose.verdict import judge


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.drop, self.running = nn.Dropout(0.1), nn.BatchNorm1d(dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.running(x + self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(x))))))
        return out


def make_model(seed: int = 0, dim: int = 128) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(Block(dim), Block(dim), nn.Linear(dim, 16))


def make_batches(num: int, seed: int = 1, rows: int = 256) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(seed)
    teach = torch.randn(128, 16, generator=g)
    xs = [torch.randn(rows, 128, generator=g) for _ in range(num)]
    return [(x, (x @ teach).argmax(1)) for x in xs]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any]) -> None:
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for name in ("FP8WATCH_COLLECTOR", "FP8WATCH_RECIPE", "FP8WATCH_RUN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FP8WATCH_SPOOL_DIR", str(tmp_path))


def outlier(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Two channels ×300: over the history of a delayed scale."""
    x = args[0].clone()
    x[..., 40:42] *= 300
    return (x,)


@pytest.mark.parametrize("recipe", ["blockwise", "current", "delayed", "mxfp8", "nvfp4"])
def test_a_healthy_run_is_the_same_in_both(recipe: str) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with fp8watch.attach(model, recipe=recipe, optimizer=optimizer):
        train(model, optimizer, make_batches(20))
        got = compare_bf16(model, make_batches(10, 2), loss_of, optimizer)
    assert got.verdict == "shared", got
    assert "FP32 does the same" in str(got)
    assert got.recipe == recipe
    assert (len(got.steps), got.first_diverging_step, got.first_diverging_layer) == (10, None, None)
    assert [x.module for x in got.layers] == ["0.up", "0.down", "1.up", "1.down", "2"]
    for layer in got.layers:
        assert 0.001 < layer.output_error < (0.2 if recipe == "nvfp4" else 0.1)
        assert layer.grad_cosine is not None
        assert layer.grad_cosine > 0.95


def test_a_clip_of_a_delayed_scale_is_fp8_and_the_layer_is_named() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with fp8watch.attach(model, recipe="delayed", optimizer=optimizer):
        train(model, optimizer, make_batches(20))
        model[1].down.register_forward_pre_hook(outlier)
        got = compare_bf16(model, make_batches(10, 2), loss_of, optimizer)
        again = compare_bf16(model, make_batches(10, 2), loss_of, optimizer)
    assert (got.verdict, got.first_diverging_layer) == ("fp8", "1.down"), got
    assert got.first_diverging_step in (0, 1)
    assert next((x.module, x.first_diverging_step) for x in got.layers if x.output_error > 0.25) == ("1.down", 0)
    assert "1.down" in str(got)
    assert again == got  # the copies' scales grew, the original's did not


def test_what_both_do_is_shared_however_far_apart_they_are() -> None:
    model = make_model()
    high_lr = compare_bf16(model, make_batches(10), loss_of, lambda p: torch.optim.SGD(p, lr=100.0), recipe="blockwise")
    assert high_lr.verdict == "shared", high_lr
    assert "rises" in str(high_lr)
    batches = make_batches(5)
    batches[2][0][7, 7] = math.nan
    nan = compare_bf16(model, batches, loss_of)
    assert nan.verdict == "shared"
    assert "not finite either, from step 2" in str(nan)
    assert len(nan.steps) == 3  # both are lost: no need to go on
    assert nan.as_json()["steps"][2]["loss_fp8"] == "nan"


def test_an_inf_that_fp8_hides_is_told() -> None:
    model = make_model()
    model.eval()  # no batch norm over the Inf
    batches = make_batches(3)

    def inf(_m: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = args[0].clone()
        x[3, 5] = math.inf
        return (x,)

    plain = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 16))
    plain[1].register_forward_pre_hook(inf)
    got = compare_bf16(plain, batches, loss_of, recipe="current", filter_fn=lambda _m, name: name == "1")
    assert got.verdict == "fp8", got
    assert "would have shown it" in str(got)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, watch: fp8watch.Watch) -> dict[str, Any]:
    return {
        "weights": {k: v.clone() for k, v in model.state_dict().items()},
        "grads": {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None},
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "watch": copy.deepcopy(watch.state_dict()),
        "rng": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "summary": {**watch.summary(), "health": watch.summary()["health"]["produced"]},  # the rest moves by itself
        "training": [m.training for m in model.modules()],
        "classes": [type(m) for m in model.modules()],
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return bool(np.array_equal(a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def test_nothing_of_the_callers_is_changed() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # patches the optimizer's step()
    watch = fp8watch.attach(model, recipe="delayed", optimizer=optimizer, overhead_budget=None)
    train(model, optimizer, make_batches(5))
    scheduler.step()
    before = state_of(model, optimizer, watch)
    grads = [p.grad for p in model.parameters()]
    batches = make_batches(6, 2)
    kept = copy.deepcopy(batches)

    def greedy(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        batch[0].add_(0.01)  # a loss_fn may write into its batch
        random.random()
        np.random.rand()
        return loss_of(m, batch)

    first = compare_bf16(model, batches, greedy, optimizer, steps=4)
    after = state_of(model, optimizer, watch)
    for name, value in before.items():
        assert same(value, after[name]), name
    assert all(a is b for a, b in zip(grads, (p.grad for p in model.parameters()), strict=True))
    assert same(batches, kept)
    assert len(first.steps) == 4
    assert compare_bf16(model, batches, greedy, optimizer, steps=4) == first  # nothing was left behind
    watch.detach()


def test_both_copies_see_the_same_random_numbers() -> None:
    """Dropout of another mask alone would move the loss by more than FP8 does."""
    model = make_model()
    got = compare_bf16(model, make_batches(4), loss_of, recipe="blockwise")
    assert max(s.difference for s in got.steps) < 0.002


def test_a_wrapped_model_and_an_iterator_of_batches_will_do() -> None:
    model = make_model()
    compiled = torch.compile(model, backend="eager")
    source = iter(make_batches(5))
    got = compare_bf16(compiled, source, loss_of, steps=2)
    assert len(got.steps) == 2
    assert len(list(source)) == 3


def test_a_plan_is_not_left_behind() -> None:
    from fp8watch.layers import custom_ops

    before = dict(custom_ops._plans)
    compare_bf16(make_model(), make_batches(1), loss_of)
    with pytest.raises(ZeroDivisionError):
        compare_bf16(make_model(), make_batches(1), lambda m, b: 1 / 0)  # type: ignore[arg-type]
    assert custom_ops._plans == before


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"batches": []}, "batches is empty"),
        ({"steps": 0}, "from 1 to 1000"),
        ({"steps": True}, "from 1 to 1000"),
        ({"recipe": "observe"}, "nothing to compare"),
        ({"loss_fn": lambda m, b: torch.zeros(2, requires_grad=True)}, "one element"),
        ({"loss_fn": lambda m, b: torch.zeros((), requires_grad=True)}, "first argument"),
        ({"optimizer": 3}, "a torch optimizer"),
        ({"filter_fn": lambda m, n: False}, "no Linear"),
        ({"model": 3}, "torch.nn.Module"),
    ],
)
def test_what_cannot_work_is_said(change: dict[str, Any], word: str) -> None:
    given: dict[str, Any] = {"model": make_model(), "batches": make_batches(1), "loss_fn": loss_of, "steps": 2}
    with pytest.raises((TypeError, ValueError), match=word):
        compare_bf16(**{**given, **change})


def test_a_loss_that_ignores_its_model_leaves_the_original_as_it_was() -> None:
    model = make_model()
    loss_of(model, make_batches(1)[0]).backward()
    grads = {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}
    with pytest.raises(ValueError, match="first argument"):
        compare_bf16(model, make_batches(2), lambda _m, b: loss_of(model, b))
    assert same(grads, {k: p.grad for k, p in model.named_parameters() if p.grad is not None})


def test_the_verdict_is_part_of_the_public_surface() -> None:
    assert fp8watch.diagnose.compare_bf16 is compare_bf16
    assert isinstance(compare_bf16(make_model(), make_batches(1), loss_of), Verdict)


NOISE = (-0.4, 0.9, -1.1, 0.3, 1.4, -0.8, 0.002, -0.5, 1.0, -0.2)
"""A loss that may be negative, as that of a policy gradient."""


def both(high: Any, fp8: Any) -> Verdict:
    return judge(
        tuple(StepPair(i, b, a) for i, (a, b) in enumerate(zip(high, fp8, strict=True))), (), "current", "BF16"
    )


def test_losses_that_cross_zero_are_not_held_against_the_first_of_them() -> None:
    near = [x + 1e-3 * (-1) ** i for i, x in enumerate(NOISE)]  # 50 % of the one that is next to 0
    healthy = both(NOISE, near)
    assert healthy.verdict == "shared"
    assert "over 10 steps the losses stay within" in str(healthy)
    lost = both(NOISE, [*NOISE[:4], math.nan, *NOISE[5:]])
    assert (lost.verdict, lost.first_diverging_step) == ("fp8", 4)
    drifts = both(NOISE, [*NOISE[:4], *(x + 0.1 * i for i, x in enumerate(NOISE[4:], 1))])
    assert (drifts.verdict, drifts.first_diverging_step) == ("fp8", 4)
    assert "7.14% apart" in str(drifts)  # 0.1 of 1.4
    assert both([-2.0, 3.0], [-2.0, 4.0]).verdict == "fp8"  # two losses say nothing of a rise


def test_losses_that_cross_zero_and_explode_in_both_are_shared_however_far_apart() -> None:
    grow = [*NOISE, 1e2, 1e4]
    said = both(grow, [*NOISE, 3e2, 5e5])
    assert said.verdict == "shared"
    assert "its loss rises from -0.4 to 1e+04, FP8's rises from -0.4 to 5e+05" in str(said)
    assert both(grow, [*NOISE, *NOISE[:2]]).verdict == "fp8"
    rises = both([2.0, 3.0, 4.0], [2.0, 3.0, math.nan])
    assert (rises.verdict, rises.sentence) == (
        "shared", "BF16 does the same: its loss rises to 2.00× that of the first step, FP8's is not finite."
    )  # fmt: skip


def test_where_fp8_explains_it_the_switches_come_in_the_order_to_try() -> None:
    apart = (StepPair(0, 2.5, 2.5), StepPair(1, 9.0, 2.4))
    layers = (LayerPair("mlp.up", 0.5, 0, 0.1, 0.1),)
    said = judge(apart, layers, "delayed", "BF16", param_gather=True)
    gather, finer, layer, lr = said.try_next
    assert gather.startswith("--fp8-param-gather off")
    assert "--fp8-recipe tensorwise" in finer
    assert "'mlp.up'" in layer
    assert lr == "the learning rate 10 to 20 % lower"
    assert str(said).splitlines()[1] == f"  1. {gather}"
    without = judge(apart, (), "mine", "BF16", kind="blockwise").try_next
    assert [s.split(":")[0] for s in without] == ["a finer recipe", "the learning rate 10 to 20 % lower"]
    shared = judge((StepPair(0, 2.5, 2.5),), layers, "delayed", "BF16", param_gather=True)
    assert shared.try_next == ()
    assert str(shared) == shared.sentence
