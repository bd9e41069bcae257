"""Transformer Engine modules are observed where their operands enter a GEMM, exactly where Python sees them."""

from __future__ import annotations

import gc
import weakref
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fp8watch.integrations import te_modules
from fp8watch.integrations.transformer_engine import TeObserver
from fp8watch.kernels import reference
from fp8watch.numerics.formats import FORMATS
from fp8watch.numerics.quantize_job import QuantizeJob
from fp8watch.numerics.tile_stats import TileStats
from fp8watch.observer.step_sample import NOTHING
from fp8watch_agent.guard import Guard
from fp8watch_agent.record import FIELDS, Measured, TileFlag, holds

Seen = dict[tuple[str, str, str], list[TileStats]]


class Model(nn.Module):
    """One module of each kind."""

    def __init__(self, te: ModuleType) -> None:
        super().__init__()
        self.qkv = te.LayerNormLinear(128, 256)
        self.proj = te.Linear(256, 128)
        self.mlp = te.LayerNormMLP(128, 384)
        self.experts = te.GroupedLinear(2, 128, 160)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.mlp(self.proj(self.qkv(x)))
        return self.experts(x, [40, x.shape[0] - 40])


class Watched:
    def __init__(self, model: nn.Module) -> None:
        self.guard = Guard()
        self.modules = te_modules.find(model.named_modules())
        self.sites = [site for te in self.modules for site in te.sites]
        self.seen: Seen = {}
        self.observer = TeObserver(self.modules, 7, self.record, self.guard)
        assert self.observer.start() is None

    def record(self, row: int, shape: tuple[int, int], stats: TileStats) -> None:
        site = self.sites[row - 7]
        assert stats.shape == shape
        self.seen.setdefault((site.fqn, site.operand, site.direction), []).append(stats)


def step(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().sum().backward()


def test_every_site_of_every_module_is_seen_once(te: ModuleType) -> None:
    model = Model(te)
    watched = Watched(model)
    step(model, torch.randn(96, 128, requires_grad=True))
    assert dict(watched.guard.errors) == {}
    names = ["qkv", "proj", "mlp.fc1", "mlp.fc2", "experts.0", "experts.1"]
    expected = {(n, s.operand, s.direction) for n in names for s in watched.sites if s.fqn == n}
    assert len(expected) == 30
    assert set(watched.seen) == expected
    assert all(len(calls) == 1 for calls in watched.seen.values())


def test_evidence_is_what_the_site_says(te: ModuleType) -> None:
    model = Model(te)
    watched = Watched(model)
    step(model, torch.randn(96, 128, requires_grad=True))
    for site in watched.sites:
        stats = watched.seen[site.fqn, site.operand, site.direction][0]
        full = bool(stats.measured & Measured.ENERGIES)
        assert full == site.visible, site
        assert (site.evidence["energies"] == "exact") == full
    exact = {(s.fqn, s.operand) for s in watched.sites if s.visible}
    assert ("proj", "input") in exact
    assert ("experts.1", "input") in exact
    assert ("qkv", "grad_output") in exact
    assert ("mlp.fc2", "grad_output") in exact
    assert {("qkv", "input"), ("mlp.fc1", "input"), ("mlp.fc2", "input"), ("mlp.fc1", "grad_output")}.isdisjoint(exact)


def assert_same(got: TileStats, expected: TileStats, but: tuple[str, ...] = ()) -> None:
    a, b = got.summary(), expected.summary()
    for f in FIELDS:
        if f.name not in but:
            np.testing.assert_allclose(a[f.name], b[f.name], rtol=1e-6, err_msg=f.name)


@pytest.mark.parametrize("kind", ["healthy", "inf", "nan"])
def test_a_seen_operand_is_measured_as_if_it_were_quantised_here(te: ModuleType, kind: str) -> None:
    linear = te.Linear(256, 128)
    watched = Watched(nn.Sequential(linear))
    x = torch.randn(2, 51, 256, requires_grad=True)  # rows that Transformer Engine pads
    if kind != "healthy":
        x.data[1, 3, 5] = float(kind)
    step(linear, x)
    flat = x.detach().reshape(-1, 256)
    for direction, tile in (("rowwise", (1, 128)), ("columnwise", (128, 1))):
        expected = reference.quantize(flat, QuantizeJob(tile, FORMATS["E4M3"], True, 0.0))[2]
        assert_same(watched.seen["0", "input", direction][0], expected)
    expected = reference.quantize(linear.weight.detach(), QuantizeJob((128, 128), FORMATS["E4M3"], True, 0.0))[2]
    assert_same(watched.seen["0", "weight", "rowwise"][0], expected)
    if kind == "inf":
        assert watched.seen["0", "input", "rowwise"][0].summary()["first_nonfinite"].tolist() == [54, 5, 0]


def test_from_codes_alone_nan_is_known_and_inf_is_only_suspected(te: ModuleType) -> None:
    linear = te.LayerNormLinear(256, 128)
    watched = Watched(nn.Sequential(linear))
    x = torch.randn(40, 256)
    quantizer = linear.quantizers[0][0]
    original = quantizer.quantize_impl

    def poisoned(tensor: torch.Tensor) -> Any:
        bad = tensor.detach().clone()
        bad[2, 200], bad[7, 3] = float("nan"), float("inf")
        return original(bad)

    quantizer.quantize_impl = poisoned
    step(linear, x)
    summary = watched.seen["0", "input", "rowwise"][0].summary()
    assert summary["num_nan"] == 1
    assert summary["first_nonfinite"].tolist() == [2, 200, 0]
    measured = np.array([summary["measured"]])
    assert holds(measured, Measured.COUNTS | Measured.AMAX)
    assert not holds(measured, Measured.COUNTS | Measured.CAST)  # the Inf was stored as 448
    assert summary["num_off_scale_tiles"] == 0  # suspect is no alarm
    normed = torch.nn.functional.layer_norm(x, (256,))
    true = normed.view(40, 2, 128).abs().amax(-1)
    ours = watched.seen["0", "input", "rowwise"][0].amax
    clean = torch.ones_like(true, dtype=torch.bool)
    clean[2, 1], clean[7, 0] = False, False
    assert ((ours / true)[clean] - 1).abs().max() <= 0.0625
    suspects = watched.observer.take_suspects()
    site = next(i for i, s in enumerate(watched.sites) if (s.operand, s.direction) == ("input", "rowwise"))
    assert suspects[site + 7] == 1
    assert watched.observer.take_suspects() == {}


def test_a_stale_weight_scale_breaks_the_invariant(te: ModuleType) -> None:
    linear = te.Linear(256, 128)
    watched = Watched(nn.Sequential(linear))
    cached = linear.quantizers[0][1](linear.weight)
    linear.quantizers[0][1].quantize_impl = lambda tensor: cached  # as with is_first_microbatch=False, forgotten
    step(linear, torch.randn(40, 256))
    assert watched.seen["0", "weight", "rowwise"][0].summary()["num_off_scale_tiles"] == 0
    linear.weight.data.mul_(16)
    step(linear, torch.randn(40, 256))
    stats = watched.seen["0", "weight", "rowwise"][1]
    assert stats.summary()["num_off_scale_tiles"] == 2
    assert bool((stats.flags() & int(TileFlag.OFF_SCALE)).all())


def test_codes_and_scale_that_do_not_fit_each_other_are_off_scale(te: ModuleType) -> None:
    """FP8 primary weights: the invariant is judged on the largest code of a block."""
    linear = te.Linear(256, 128)
    stored = linear.quantizers[0][1](linear.weight)
    primary = nn.Parameter(linear.weight.detach().clone())
    primary._rowwise_data = stored._rowwise_data  # what Transformer Engine's parameters have
    linear.weight = primary
    watched = Watched(nn.Sequential(linear))
    assert not next(s for s in watched.sites if s.operand == "weight").visible
    halved = linear.quantizers[0][1](linear.weight.detach())
    halved._rowwise_data = (
        (halved._rowwise_data.view(torch.float8_e4m3fn).float() / 4).to(torch.float8_e4m3fn).view(torch.uint8)
    )
    linear.quantizers[0][1].quantize_impl = lambda tensor: halved
    step(linear, torch.randn(40, 256))
    assert watched.seen["0", "weight", "rowwise"][0].summary()["num_off_scale_tiles"] == 2


def test_healthy_codes_keep_the_derived_invariant(te: ModuleType) -> None:
    for power_2 in (True, False):
        linear = te.LayerNormLinear(512, 128)
        linear.quantizers[0][0].force_pow_2_scales = power_2
        watched = Watched(nn.Sequential(linear))
        step(linear, torch.randn(400, 512))
        for direction in ("rowwise", "columnwise"):
            summary = watched.seen["0", "input", direction][0].summary()
            assert summary["num_off_scale_tiles"] == 0
            assert 0.5 <= summary["scale_ratio_min"] <= summary["scale_ratio_max"] <= 1
        watched.observer.stop()


def test_between_samples_nothing_is_looked_at(te: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(te)
    watched = Watched(model)
    watched.observer.sample = NOTHING
    monkeypatch.setattr("fp8watch.integrations.transformer_engine.read", lambda *args: pytest.fail("looked"))
    step(model, torch.randn(96, 128))
    assert watched.seen == {}
    assert dict(watched.guard.errors) == {}


def test_evaluation_and_recomputation_are_not_counted(te: ModuleType) -> None:
    linear = te.Linear(128, 128)
    watched = Watched(nn.Sequential(linear))
    linear.eval()
    linear(torch.randn(16, 128))
    assert watched.seen == {}
    linear.train()
    x = torch.randn(16, 128, requires_grad=True)
    torch.utils.checkpoint.checkpoint(linear, x, use_reentrant=False).sum().backward()
    forward = [v for k, v in watched.seen.items() if k[1] in ("input", "weight")]
    assert all(len(calls) == 1 for calls in forward)


def test_training_is_the_same_with_and_without(te: ModuleType) -> None:
    def losses(watch: bool) -> list[float]:
        torch.manual_seed(3)
        model = Model(te)
        watched = Watched(model) if watch else None
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        out = []
        for _ in range(3):
            loss = model(torch.randn(96, 128)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            out.append(float(loss.detach()))
        if watched is not None:
            watched.observer.stop()
        return out

    assert losses(True) == losses(False)


def test_an_error_inside_is_counted_and_never_reaches_training(te: ModuleType) -> None:
    model = Model(te)
    watched = Watched(model)
    watched.observer._record = lambda *args: 1 / 0
    step(model, torch.randn(96, 128))
    assert watched.guard.errors["te gemm"] > 0
    assert watched.observer._stack() == []


def test_an_exception_in_a_forward_leaves_no_trace(te: ModuleType) -> None:
    linear = te.Linear(128, 128)
    watched = Watched(nn.Sequential(linear))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        linear(torch.randn(16, 64))
    assert watched.observer._stack() == []
    step(linear, torch.randn(16, 128))
    assert ("0", "input", "rowwise") in watched.seen


def test_stop_takes_everything_out(te: ModuleType) -> None:
    from transformer_engine.pytorch.module import grouped_linear, linear

    before = linear.general_gemm, grouped_linear.general_grouped_gemm
    model = Model(te)
    watched = Watched(model)
    assert linear.general_gemm is not before[0]
    watched.observer.stop()
    assert (linear.general_gemm, grouped_linear.general_grouped_gemm) == before
    step(model, torch.randn(96, 128))
    assert watched.seen == {}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_observers_end_in_any_order(te: ModuleType) -> None:
    from transformer_engine.pytorch.module import linear

    before, models = linear.general_gemm, [nn.Sequential(te.Linear(128, 128)) for _ in range(3)]
    for first_out in range(3):
        watched = [Watched(model) for model in models]
        watched[first_out].observer.stop()
        for model in models:
            step(model, torch.randn(32, 128, requires_grad=True))
        assert [len(w.seen) for w in watched] == [0 if i == first_out else 5 for i in range(3)]
        assert linear.general_gemm.original.original is before  # two are left, one around the other
        gone = weakref.ref(watched.pop(first_out).observer)
        gc.collect()
        assert gone() is None
        while watched:
            watched.pop(0).observer.stop()
        assert linear.general_gemm is before


def test_what_somebody_else_has_wrapped_since_stays(te: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformer_engine.pytorch.module import linear

    model = nn.Sequential(te.Linear(128, 128))
    watched = Watched(model)
    ours, calls = linear.general_gemm, []
    monkeypatch.setattr(linear, "general_gemm", lambda *a, **k: (calls.append(1), ours(*a, **k))[1])
    watched.observer.stop()
    step(model, torch.randn(32, 128, requires_grad=True))
    assert (len(calls), watched.seen) == (3, {})


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_costs_no_site_and_counts_none_twice(te: ModuleType, reentrant: bool) -> None:
    model = nn.Sequential(te.LayerNormLinear(128, 256), te.Linear(256, 128), te.LayerNormMLP(128, 384))
    watched = Watched(model)
    x = torch.randn(32, 128, requires_grad=True)
    torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert dict(watched.guard.errors) == {}
    assert len(watched.seen) == 20
    assert all(len(calls) == 1 for calls in watched.seen.values())
    for site in watched.sites:
        full = bool(watched.seen[site.fqn, site.operand, site.direction][0].measured & Measured.ENERGIES)
        assert full == site.visible, site


def test_an_expert_without_tokens_costs_its_own_sites_alone(te: ModuleType) -> None:
    experts = te.GroupedLinear(3, 128, 160)
    watched = Watched(nn.Sequential(experts))
    x = torch.randn(64, 128, requires_grad=True)
    experts(x, [24, 0, 40]).square().sum().backward()
    assert dict(watched.guard.errors) == {}
    unseen = {(s.fqn, s.operand) for s in watched.sites if (s.fqn, s.operand, s.direction) not in watched.seen}
    assert unseen == {("0.1", "input"), ("0.1", "grad_output")}
    expected = reference.quantize(x.detach()[24:], QuantizeJob((1, 128), FORMATS["E4M3"], True, 0.0))[2]
    assert_same(watched.seen["0.2", "input", "rowwise"][0], expected)  # with its own rows, not its neighbour's


def test_one_operand_that_fails_costs_itself_alone(te: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8watch.integrations import transformer_engine

    model = nn.Sequential(te.GroupedLinear(2, 128, 160))
    watched = Watched(model)
    measure = transformer_engine.exact

    def failing(x: torch.Tensor, *args: Any, **kwargs: Any) -> TileStats:
        return 1 / 0 if tuple(x.shape) == (24, 128) else measure(x, *args, **kwargs)

    monkeypatch.setattr(transformer_engine, "exact", failing)
    model[0](torch.randn(64, 128, requires_grad=True), [24, 40]).square().sum().backward()
    assert watched.guard.errors["te gemm"] > 0
    missing = {(s.fqn, s.operand) for s in watched.sites if (s.fqn, s.operand, s.direction) not in watched.seen}
    assert missing == {("0.0", "input")}


def test_operations_that_are_fused_are_left_out_with_the_reason(te: ModuleType) -> None:
    model = nn.ModuleDict({"a": te.ops.Linear(16, 16), "b": te.Linear(16, 16)})
    assert [m.fqn for m in te_modules.find(model.named_modules())] == ["b"]
    assert te_modules.unseen(model.named_modules()) == [
        ("a", "te.ops: fused behind the module, not where products are observed")
    ]


@pytest.mark.parametrize("delays", [True, False])
def test_a_weight_gradient_that_is_computed_behind_the_backward_is_named(te: ModuleType, delays: bool) -> None:
    model = nn.ModuleDict({"a": te.Linear(16, 16), "b": te.Linear(16, 16)})
    model["b"].wgrad_store = SimpleNamespace(delay_wgrad_compute=lambda: delays)
    said = ("b wgrad", "delayed behind the backward: its product is not observed")
    assert te_modules.without_sites(model.named_modules()) == ([said] if delays else [])


def test_subclasses_are_found_and_namesakes_are_not(te: ModuleType) -> None:
    class TELinear(te.Linear):  # as Megatron's are
        pass

    model = nn.ModuleDict({"a": TELinear(16, 16), "b": nn.Linear(16, 16), "c": te.LayerNormMLP(16, 32)})
    assert [(m.fqn, m.kind, m.num_gemms) for m in te_modules.find(model.named_modules())] == [
        ("a", "Linear", 1),
        ("c", "LayerNormMLP", 2),
    ]


def test_the_operand_is_not_kept_until_backward(te: ModuleType) -> None:
    linear = te.Linear(128, 128)
    watched = Watched(nn.Sequential(linear))
    frames, leave = [], watched.observer._leave
    watched.observer._leave = lambda output: (frames.append(watched.observer._stack()[-1]), leave(output))[1]
    y = linear(torch.randn(16, 128))
    assert frames[0].operands == {}
    y.sum().backward()
    assert ("0", "input", "columnwise") in watched.seen
