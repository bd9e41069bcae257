"""A model that is moved behind attach, a default device of the user's, and graphs that a device replays."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from attach.linears_and_experts import Model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8watch.kernels import reference
from fp8watch.layers import moved_linear
from fp8watch.layers.moved_linear import DEVICE_KEY
from fp8watch.numerics.formats import FORMATS
from fp8watch.numerics.quantize_job import QuantizeJob
from fp8watch.observer.observation_plan import ObservationPlan
from fp8watch.recipe import delayed
from fp8watch.session.site_placement import turns_of

OPS = (
    "note_loss", "forward_ended", "quantize_dequantize", "quantize_codes", "look_at_output", "look_at_probe",
    "quantize_for_backward", "dequantize_kept", "observe",
)  # fmt: skip


def trained(model: nn.Module, steps: int = 4) -> list[float]:
    torch.manual_seed(1)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(steps):
        loss = model(torch.randn(32, 64))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def seem_moved(model: nn.Module) -> None:
    """As if attach had found all of it on a GPU: the only device here is the CPU."""
    for module in model.modules():
        if DEVICE_KEY in module.__dict__:
            module.__dict__[DEVICE_KEY] = torch.device("cuda:1")


@pytest.mark.parametrize("recipe", ["blockwise", "observe", "delayed"])
def test_a_model_that_is_moved_behind_attach_trains_as_before_and_says_that_it_is_blind(attach, capsys, recipe):
    torch.manual_seed(0)
    model = Model()
    expected = trained(copy.deepcopy(model))
    watch = attach(model, recipe=recipe, every=1)
    seem_moved(model)
    assert trained(model) == expected
    summary = watch.summary()
    assert summary["num_steps"] == 4
    assert summary["internal_errors"] == {}
    said = capsys.readouterr().err
    assert "on cpu now, and on cuda:1 when attach was called" in said
    assert "attach behind .to(device)" in said
    assert "announced as observed and send nothing" in watch._recorder.facts["blind"]
    watch.detach()
    assert not any(DEVICE_KEY in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("recipe", ["blockwise", "observe"])
def test_steps_of_linears_alone_that_are_moved_end(attach, recipe):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    watch = attach(model, recipe=recipe, probes=[])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seem_moved(model)
    for _ in range(3):
        x = torch.randn(32, 64)
        for part in model:  # by itself, as losses do that use a part of a model
            x = part(x)
        x.square().mean().backward()
        optimizer.step()
    assert watch.summary()["num_steps"] == 3


def test_a_number_on_another_device_is_not_read_and_that_is_said_once(attach, mlp, capsys):
    """It is on a GPU, and what is observed on the CPU: to read it would wait for the device."""
    watch = attach(mlp, recipe="observe")
    there = torch.empty((), device="meta")
    for _ in range(2):
        assert watch._flush._split({"loss": there, "lr": 0.5, "grad_norm": torch.tensor(2.0)}) == (
            {"lr": 0.5, "grad_norm": 2.0},
            {},
        )
    assert capsys.readouterr().err.count("loss is on meta and what is observed on cpu: it is not recorded") == 1


def test_what_was_not_moved_is_no_news(attach, capsys):
    model = Model()
    attach(model, every=1)
    trained(model)
    assert "when attach was called" not in capsys.readouterr().err
    assert not any(moved_linear.is_moved(m) for m in model.modules())


def test_operands_elsewhere_are_not_looked_at(attach, mlp):
    """They are on a GPU, and the rows on the CPU: to read them would wait for the device."""
    watch = attach(mlp, recipe="observe", every=1)
    plan = watch._plan
    assert plan.elsewhere(torch.empty(2, 2, device="meta"))
    assert not plan.elsewhere(torch.empty(2, 2))
    x = torch.empty(32, 64, device="meta")
    plan.step.begin(plan.step.sample)
    before = plan.slab.copy_rows().tobytes()
    for row in range(3):
        plan.note_output(row, x)
        plan.note_probe(row, x)
    plan.observe(plan.sites.part((0,)), x, number=0)
    assert plan.slab.copy_rows().tobytes() == before
    assert watch.summary()["internal_errors"] == {}


def test_in_a_warm_up_scales_with_a_history_see_operands_that_are_elsewhere(attach, monkeypatch):
    def scales(elsewhere):
        torch.manual_seed(0)
        model, recipe = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), Square()), delayed(warmup_steps=2)
        watch = attach(model, recipe=recipe, overhead_budget=None)
        with monkeypatch.context() as patched:
            patched.setattr(ObservationPlan, "elsewhere", lambda *_: elsewhere)
            trained(model)
        return [float(quantizer.state.scale) for quantizer in watch._plan.sites.quantizers]

    assert scales(True) == scales(False) != [1.0] * 10


class Square(nn.Module):
    def forward(self, x):
        return x.square().mean()


class OnlyNorm(nn.LayerNorm):
    """As one that a device map has put on another GPU: the only device here is the CPU."""

    def parameters(self, recurse=True):
        return iter([SimpleNamespace(device=torch.device("cuda:1"), requires_grad=True, grad=torch.ones(()))])


def test_what_is_on_another_device_than_the_rows_is_told_as_such(attach, monkeypatch):
    model = nn.Sequential(nn.Linear(64, 64), OnlyNorm(64), nn.Linear(64, 64), Square())
    watch = attach(model, recipe="observe", overhead_budget=None)
    monkeypatch.setattr(ObservationPlan, "note_probe", lambda *_: None)
    trained(model)
    assert watch._recorder.facts["silent"].startswith("1 (on cuda:1, and what is observed is on cpu")
    assert watch._recorder.facts.get("not_called", "") == ""


def test_a_module_of_transformer_engine_that_is_elsewhere_has_no_turn():
    """Its checks would mix what is on two devices."""
    here, there = nn.LayerNorm(64), OnlyNorm(64)
    modules = [SimpleNamespace(module=module) for module in (here, there)]
    te = SimpleNamespace(modules=modules, rows_of={id(modules[0]): [0, 1], id(modules[1]): [2, 3]})
    plan = SimpleNamespace(
        sites=SimpleNamespace(rows=range(5), foreign={}), slab=SimpleNamespace(device=torch.device("cpu"))
    )
    assert turns_of(plan, 0, te) == [0]


@pytest.mark.parametrize("there", [("cuda:0", False), ("cuda:1", True)])
def test_each_gpu_is_a_device_of_its_own(attach, monkeypatch, there):
    watch = attach(nn.Sequential(nn.Linear(64, 64)), recipe="observe", every=1)
    plan, (device, is_elsewhere) = watch._plan, there
    monkeypatch.setattr(plan.slab, "is_cpu", False)
    monkeypatch.setattr(plan.slab, "device", torch.device("cuda:0"))
    with FakeTensorMode():
        assert plan.elsewhere(torch.empty(2, 2, device=device)) is is_elsewhere
    weight = SimpleNamespace(device=torch.device(device))
    module = SimpleNamespace(**{DEVICE_KEY: torch.device("cuda:0"), "parameters": lambda: iter((weight,))})
    assert moved_linear.is_moved(module) is is_elsewhere


def test_what_was_measured_elsewhere_is_not_merged(attach):
    """As a module of Transformer Engine on another GPU than the first."""
    watch = attach(nn.Sequential(nn.Linear(64, 64)), recipe="observe", every=1)
    plan = watch._plan
    x = torch.randn(32, 64)
    stats = reference.quantize(x, QuantizeJob((1, 128), FORMATS["E4M3"], True, 0.0))[2]
    before = plan.slab.copy_rows().tobytes()
    plan.record(0, (32, 64), replace(stats, tiles=stats.tiles._replace(amax=stats.amax.to("meta"))))
    assert plan.slab.copy_rows().tobytes() == before
    plan.record(0, (32, 64), stats)
    assert plan.slab.copy_rows().tobytes() != before


@pytest.mark.parametrize("recipe", ["blockwise", "observe", "delayed", "current", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("backend", [None, "reference"])
def test_a_default_device_of_the_users_changes_nothing(attach, recipe, backend):
    """`torch.set_default_device("cuda")` is on, and the model where it is: what we make for ourselves has a place of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))
    xs = [torch.randn(32, 64) for _ in range(14)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    with torch.device("meta"):
        watch = attach(model, recipe=recipe, backend=backend, every=1, hash_every=2)
        for x in xs:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    summary = watch.summary()
    assert summary["num_steps"] == len(xs)
    assert summary["internal_errors"] == {}


def by_numbers(optimizer, *_):
    """Its steps are Python's numbers between two of them, as those of other people's optimizers are."""
    for kept in optimizer.state.values():
        kept["step"] = int(kept["step"])


def by_tensors(optimizer, *_):
    for kept in optimizer.state.values():
        kept["step"] = torch.tensor(float(kept["step"]), device="cpu")


def test_a_default_device_changes_nothing_of_an_optimizer_that_counts_by_numbers(attach):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    optimizer.register_step_pre_hook(by_tensors)
    optimizer.register_step_post_hook(by_numbers)
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
    xs = [torch.randn(32, 64) for _ in range(14)]
    with torch.device("meta"):
        watch = attach(model, recipe="observe", every=1)
        for x in xs:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert watch.summary()["num_steps"] == len(xs)
    assert watch.summary()["internal_errors"] == {}


@pytest.mark.parametrize("op", OPS)
def test_an_op_that_works_on_the_host_stays_out_of_graphs_that_a_device_replays(op):
    """On an H200 the first step under `torch.compile(mode="reduce-overhead")` raised, where it was recorded."""
    assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.fp8watch, op).default.tags


def test_there_are_no_other_ops():
    named = {
        name.removeprefix("fp8watch::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("fp8watch::")
    }
    assert named == set(OPS)
