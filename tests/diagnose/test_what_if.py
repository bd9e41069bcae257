"""what_if: the costs are those of the sketch, the loss impact is that of loss_impact, and what it names can be had."""

from __future__ import annotations

import json
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from diagnose.small_models import batch_of, trained
from torch import Tensor, nn

import fp8watch
from fp8watch.diagnose import loss_impact, what_if
from fp8watch.diagnose.candidates import DEFAULTS
from fp8watch.diagnose.impact_picture import impact_picture
from fp8watch.diagnose.operand_costs import OperandCosts
from fp8watch.quantize import quantize_blockwise, quantize_per_tensor
from fp8watch_agent.depth_what_if import FORMATS, SketchFormat, sketch_costs


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for name in ("FP8WATCH_COLLECTOR", "FP8WATCH_RECIPE", "FP8WATCH_RUN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FP8WATCH_SPOOL_DIR", str(tmp_path))


def test_costs_of_an_operand_are_those_of_its_sketch() -> None:
    x = torch.randn(96, 300) * torch.exp(3 * torch.randn(96, 300))
    x[4] = 0
    q = quantize_blockwise(x)
    sketch = q.stats.summary()
    costs = OperandCosts()
    costs.add(x, q.dequantize(), int(sketch["num_saturated"]), columnwise=False)
    assert costs.num_underflow == sketch["num_underflow"] > 0
    assert costs.num_nonzero == sketch["num_nonzero"]
    for field in ("signal_energy", "noise_energy", "tile_noise_ratio_sum", "tile_noise_ratio_max", "gain_energy"):
        assert getattr(costs, field) == pytest.approx(sketch[field], rel=1e-5), field
    assert costs.num_tiles == sketch["num_tiles"] - sketch["num_zero_tiles"]


def test_every_layer_is_told_in_every_format() -> None:
    model, _ = trained(4)
    got = what_if(model, batch_of(50))
    assert [c.name for c in got.candidates] == list(DEFAULTS)
    assert len(got.layers) == 9 * len(DEFAULTS)
    assert got.modules[:3] == ("layers.0.gate", "layers.0.up", "layers.0.down")
    by_name = {s.format: s for s in got.summaries()}
    order = [by_name[n].spread or 0 for n in ("fp16", "bf16", "blockwise", "blockwise-e5m2", "nvfp4")]
    assert order == sorted(order)
    assert by_name["nvfp4"].underflow > by_name["mxfp8"].underflow  # type: ignore[operator]
    assert by_name["mxfp8"].saturated == 0
    assert (by_name["mxfp8-floor"].saturated or 0) > 0
    impacts = {x.module: x.impact for x in loss_impact(model, batch_of(50), recipe="blockwise").layers}
    assert {x.module: x.impact for x in got.layers if x.format == "blockwise"} == impacts
    data = json.loads(json.dumps(got.as_json()))
    assert {s["operand"] for s in data["layers"][0]["sites"]} == {"input", "weight", "grad_output"}
    for svg in (got.as_svg(), impact_picture(loss_impact(model, batch_of(50), measure=True))):
        texts = [e.text for e in ElementTree.fromstring(svg).iter() if e.tag.endswith("text")]
        assert {"layers.0.gate", "layers.2.down"} <= set(texts)
    assert all(name in str(got) for name in (*DEFAULTS, "layers.1.up", "NVFP4TrainingConfig"))


def test_the_recipe_that_it_names_computes_what_it_said() -> None:
    model, _ = trained(4)
    got = what_if(model, batch_of(50), formats=["blockwise-hybrid", "nvfp4"])
    recipe = got.recipe("blockwise-hybrid")
    assert recipe == fp8watch.blockwise(fp8_format="HYBRID")
    assert got.recipe("nvfp4") is None
    said = got.of("layers.0.gate")[0]
    with fp8watch.attach(model, recipe=recipe, filter_fn=lambda _m, name: name == "layers.0.gate"):
        loss = float(model(*batch_of(50)).detach())
    assert loss - got.loss == pytest.approx(said.impact, rel=0.1, abs=1e-6)


def test_history_is_what_delayed_scales_follow() -> None:
    model, _ = trained(4)
    x, target = batch_of(50)
    quiet = (x / 50, target)
    own = what_if(model, (x, target), formats=["delayed"]).summaries()[0]
    after = what_if(model, (x, target), formats=["delayed"], history=[quiet]).summaries()[0]
    roomy = what_if(model, (x, target), formats={"roomy": fp8watch.delayed(margin=8)}, history=[quiet]).summaries()[0]
    assert own.saturated == 0
    assert (after.saturated or 0) > 0
    assert (roomy.saturated or 0) < (after.saturated or 0)


def test_an_attached_models_delayed_scales_are_used() -> None:
    model, optimizer = trained(2)
    with fp8watch.attach(model, recipe="delayed", optimizer=optimizer):
        for seed in (1, 2):
            optimizer.zero_grad()
            model(*batch_of(seed)).backward()
            optimizer.step()
        x, target = batch_of(3)

        def louder(_m: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (args[0] * 100,)

        model.layers[0].down.register_forward_pre_hook(louder)
        got = {x.module: x for x in what_if(model, (x, target), formats=["delayed"]).layers}
    sites = {(s.operand, s.direction): s for s in got["layers.0.down"].sites}
    assert (sites["input", "rowwise"].saturated or 0) > 0.01


@pytest.mark.parametrize("kind", ["normal", "wide", "rows", "flushed", "edge"])
def test_a_stored_sketch_bounds_what_another_format_would_flush(kind: str) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(256, 384, generator=g)
    if kind == "wide":
        x = x * torch.exp(4 * torch.randn(256, 384, generator=g))
    elif kind == "rows":
        x = x * torch.exp(3 * torch.randn(256, 1, generator=g))
    elif kind == "edge":  # the amax just above where a power of two halves the scale
        x = torch.full((256, 384), 1.76 * 2.0**-17.9)
        x[:, ::128] = 1.76
    elif kind == "flushed":
        x = torch.where(torch.rand(256, 384, generator=g) < 0.5, x * 1e-6, x)
    sketch = quantize_blockwise(x).stats.summary()
    told = {c.format: c for c in sketch_costs(sketch["depth_hist"], sketch["amax_hist"])}
    for f in FORMATS:
        exact = exactly(x, f)
        cost = told[f.name]
        underflow = exact.underflow or 0.0
        assert (cost.underflow_min or 0.0) <= underflow, f.name
        if cost.underflow_max is not None:
            assert underflow <= cost.underflow_max, f.name
        if f.tile == "own" and cost.underflow is not None and kind != "edge":  # some lie deeper than a sketch tells
            assert cost.underflow == pytest.approx(underflow, abs=0.004), f.name
        if kind in ("normal", "rows", "flushed") and f.tile == "own":
            assert cost.tile_sqnr_db == pytest.approx(exact.tile_sqnr_db, abs=0.5), f.name
        if (
            f.tile == "tensor" and cost.underflow is not None and kind != "wide"
        ):  # there depth and amax of a tile hang together
            assert cost.underflow == pytest.approx(underflow, abs=0.03), f.name


def exactly(x: Tensor, f: SketchFormat) -> OperandCosts:
    fp8_format = "E5M2" if f.largest > 1000 else "E4M3"
    if f.tile == "tensor":
        values = quantize_per_tensor(x, fp8_format).dequantize()
    elif f.tile == "within":
        values = fp8watch.quantize_mxfp8(x).dequantize()
    else:
        values = quantize_blockwise(x, fp8_format=fp8_format, power_2_scale=f.power_2_scale).dequantize()
    costs = OperandCosts()
    costs.add(x, values, 0, columnwise=False)
    return costs


def test_a_sketch_without_elements_tells_nothing() -> None:
    assert sketch_costs([0] * 32) == ()
    with pytest.raises(ValueError, match="depth_hist has shape"):
        sketch_costs([0] * 31)
    with pytest.raises(ValueError, match="amax_hist has shape"):
        sketch_costs([0] * 32, [0] * 3)
