"""attach observes the Transformer Engine modules of a model beside its Linears, and leaves them as they are."""

from __future__ import annotations

import io
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from te.te_training import train
from torch import nn

from fp8watch_agent.record import Measured


class Model(nn.Module):
    def __init__(self, te: ModuleType) -> None:
        super().__init__()
        self.qkv = te.LayerNormLinear(128, 256)
        self.proj = te.Linear(256, 128)
        self.down = nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.proj(self.qkv(x))).square().mean()


def test_records_of_both_kinds_leave_in_one_step(
    te: ModuleType, attach: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = Model(te)
    watch = attach(model)
    train(model)
    kept = watch._recorder
    assert dict(watch.guard.errors) == {}
    assert "2 Transformer Engine modules observed, computing as before" in capsys.readouterr().err
    assert len(kept.steps) == 3
    for i in range(3):
        _, rows = kept.step(i)
        assert len(rows) == 15
        assert {module for module, _, _ in rows} == {"qkv", "proj", "down"}
        assert rows["proj", "input", "rowwise"]["num_elements"] == 34 * 256
        assert rows["qkv", "grad_output", "columnwise"]["num_calls"] == 1
        assert rows["proj", "input", "rowwise"]["measured"] & Measured.ENERGIES
        assert not rows["qkv", "input", "rowwise"]["measured"] & Measured.ENERGIES
    sites = {(s.module, s.operand, s.direction): s for s in kept.sites}
    seen, inside = sites["proj", "input", "columnwise"], sites["qkv", "input", "rowwise"]
    assert (seen.tile, seen.format, seen.power_2_scale, seen.backend) == ((128, 1), "E4M3", True, "transformer_engine")
    assert (seen.recipe, seen.shape) == ("blockwise", (34, 256))
    assert seen.evidence["energies"] == "exact"
    assert [inside.evidence[group] for group in ("counts", "cast", "energies")] == ["derived", "absent", "absent"]
    assert sites["down", "input", "rowwise"].backend != "transformer_engine"


def test_plain_linears_beside_it_are_converted_only_when_asked_for(
    te: ModuleType, attach: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Model(te)
    x = torch.randn(34, 128)
    before = model(x)
    watch = attach(model)
    line = capsys.readouterr().err
    assert (
        "model computes in FP8 already (transformer_engine.pytorch.LayerNormLinear, 1 of them, 1 of other kinds)"
        in line
    )
    assert "nothing is converted, 1 Linear observed as it is; recipe='blockwise' to convert it" in line
    assert torch.equal(model(x), before)
    watch.detach()
    attach(model, recipe="blockwise")
    assert "1 Linear now compute in FP8 (blockwise" in capsys.readouterr().err
    assert not torch.equal(model(x), before)


def test_te_ops_are_left_out_with_the_reason(te: ModuleType, attach: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(te.ops.Linear(128, 128), te.Linear(128, 128))
    attach(model)
    line = capsys.readouterr().err
    assert "1 Transformer Engine module observed" in line
    assert "left out: 0 (te.ops: fused behind the module" in line


def test_a_model_of_transformer_engine_alone_closes_its_steps(te: ModuleType, attach: Any) -> None:
    model = nn.Sequential(te.LayerNormMLP(128, 384))
    watch = attach(model, every=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(4):
        x = torch.randn(34, 128)
        if step == 2:
            x[3, 4] = float("nan")
        model(x).square().mean().backward()
        optimizer.step()
    kept = watch._recorder
    assert [int(h["step"]) for h, *_ in kept.steps] == [0, 1, 2, 3]
    sampled = [len(ids) > 0 for _, ids, *_ in kept.steps]
    assert sampled == [True, False, True, True], "each second one, and what follows the NaN"
    _, rows = kept.step(2)
    assert rows["0.fc1", "input", "rowwise"]["num_nan"] > 0


def test_nothing_is_changed_and_detach_restores(te: ModuleType, attach: Any) -> None:
    from transformer_engine.pytorch.module import linear

    before = linear.general_gemm

    def losses(watched: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(te.LayerNormLinear(128, 256), te.Linear(256, 128))
        watch = attach(nn.Sequential(model)) if watched else None
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        out = []
        for i in range(3):
            loss = model(torch.randn(34, 128, generator=torch.Generator().manual_seed(i))).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            out.append(float(loss.detach()))
        if watch is not None:
            assert linear.general_gemm is not before
            watch.detach()
            assert linear.general_gemm is before
            assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        return out

    assert losses(True) == losses(False)


def test_an_error_inside_is_counted(te: ModuleType, attach: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(te)
    watch = attach(model)
    monkeypatch.setattr("fp8watch.integrations.transformer_engine.exact", lambda *args, **kwargs: 1 / 0)
    assert np.all(np.isfinite(train(model)))
    assert dict(watch.guard.errors)["te gemm"] > 0
    assert len(watch._recorder.steps) == 3


def test_where_it_cannot_be_observed_the_reason_is_printed(
    te: ModuleType, attach: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fp8watch.integrations.transformer_engine.load", lambda: (None, "the library is broken"))
    model = Model(te)
    watch = attach(model)
    assert "qkv (Transformer Engine module: the library is broken)" in capsys.readouterr().err
    train(model)
    assert {s.module for s in watch._recorder.sites} == {"down"}


def test_files_of_an_observed_model_load_without_it(te: ModuleType, attach: Any) -> None:
    model = nn.Sequential(te.Linear(128, 128))
    attach(model)
    file = io.BytesIO()
    for quantizers in model[0].quantizers:
        assert quantizers
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    loaded(torch.randn(16, 128)).sum().backward()
    assert torch.equal(loaded[0].weight, model[0].weight)
