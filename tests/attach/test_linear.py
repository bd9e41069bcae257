"""A Linear on the FP8 path: what it computes, and that nothing around it notices."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8watch import recipe as recipes
from fp8watch.kernels import reference
from fp8watch.numerics.formats import E4M3
from fp8watch.numerics.quantize_job import QuantizeJob


def qdq(x, tile):
    return reference.quantize_dequantize(x, QuantizeJob(tile, E4M3, True, 0.0, stats=False))[0]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(32, 64), (2, 16, 64), (64,)])
def test_three_gemms_are_those_of_the_specification(attach, bias, shape):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48, bias=bias))
    x = torch.randn(shape, requires_grad=True)
    grad = torch.randn(*shape[:-1], 48)
    attach(model)
    y = model(x)
    y.backward(grad)
    x2, g2, w = x.detach().reshape(-1, 64), grad.reshape(-1, 48), model[0].weight.detach()
    want = qdq(x2, (1, 128)) @ qdq(w, (128, 128)).t()
    want = want + model[0].bias.detach() if bias else want
    assert torch.equal(y.detach().reshape(-1, 48), want)
    assert torch.equal(x.grad.reshape(-1, 64), qdq(g2, (1, 128)) @ qdq(w, (128, 128)))
    assert torch.equal(model[0].weight.grad, qdq(g2, (128, 1)).t() @ qdq(x2, (128, 1)))
    if bias:
        assert torch.allclose(model[0].bias.grad, g2.sum(0))


class Odd(nn.Sequential):
    """Sizes that are no multiples of 16; returns a 0-d loss."""

    def __init__(self):
        super().__init__(nn.Linear(64, 423), nn.ReLU(), nn.Linear(423, 97), nn.Linear(97, 17))

    def forward(self, x):
        return super().forward(x).pow(2).mean()


@pytest.mark.parametrize("kind", ["blockwise", "current", "delayed", "mxfp8", "rowwise", "nvfp4"])
def test_sizes_that_are_no_multiples_of_anything_are_observed_and_computed(attach, train, kind):
    def seeded():
        torch.manual_seed(0)
        return Odd()

    alone = train(seeded(), lr=1e-3)
    watch = attach(seeded(), recipe=getattr(recipes, kind)(observe_only=True))
    assert train(watch._model, lr=1e-3) == alone
    assert watch._recorder.session.facts["gemm_flops_observed"] == 1.0
    watch.detach()
    in_fp8 = attach(seeded(), recipe=kind)
    losses = train(in_fp8._model, lr=1e-3)
    assert losses != alone
    assert losses == pytest.approx(alone, rel=0.25 if kind == "nvfp4" else 0.05)
    assert {m for m, operand, _ in in_fp8._recorder.step(0)[1] if operand != "output"} == {"0", "2", "3"}
    assert watch.summary()["internal_errors"] == in_fp8.summary()["internal_errors"] == {}


def test_an_empty_batch_is_as_empty_as_before(attach):
    model = nn.Sequential(nn.Linear(64, 48))
    attach(model)
    x = torch.zeros(0, 64, requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert y.shape == (0, 48)
    assert torch.equal(model[0].weight.grad, torch.zeros(48, 64))


def test_autocast_gives_the_dtype_of_a_plain_linear(attach):
    model = nn.Sequential(nn.Linear(64, 48))
    x = torch.randn(32, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = model(x)
        attach(model)
        y = model(x)
        y.sum().backward()
    assert y.dtype == plain.dtype == torch.bfloat16
    assert model[0].weight.grad.dtype == torch.float32
    assert (y.float() - plain.float()).abs().max() < 0.2


def test_frozen_weights_and_inputs_without_grad(attach):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].weight.requires_grad_(False)
    watch = attach(model)
    model(torch.randn(32, 64)).sum().backward()
    watch.step()
    _, rows = watch._recorder.step(0)
    assert model[0].weight.grad is None
    assert model[0].bias.grad is not None
    assert ("0", "grad_output", "columnwise") not in rows
    assert ("0", "grad_output", "rowwise") not in rows
    assert ("1", "grad_output", "rowwise") in rows


def test_detach_puts_everything_back(attach, mlp):
    before = {k: v.clone() for k, v in mlp.state_dict().items()}
    identities = {k: id(p) for k, p in mlp.named_parameters()}
    classes = [type(m) for m in mlp.modules()]
    watch = attach(mlp)
    assert {k: id(p) for k, p in mlp.named_parameters()} == identities
    assert list(mlp.state_dict()) == list(before)
    assert isinstance(mlp.up, nn.Linear)
    watch.detach()
    watch.detach()
    assert [type(m) for m in mlp.modules()] == classes
    assert not [k for m in mlp.modules() for k in m.__dict__ if "fp8watch" in k]
    assert all(torch.equal(v, before[k]) for k, v in mlp.state_dict().items())
    x = torch.randn(4, 64)
    assert torch.equal(mlp.up(x), F.linear(x, mlp.up.weight, mlp.up.bias))


def test_copies_and_pickles_are_plain(attach, mlp):
    attach(mlp)
    twin = copy.deepcopy(mlp)
    assert type(twin.up) is nn.Linear
    assert type(pickle.loads(pickle.dumps(mlp.up))) is nn.Linear
    assert b"fp8watch" not in pickle.dumps(nn.Sequential(mlp.up, mlp.down))
    watched = nn.Sequential(nn.Linear(32, 32))
    attach(watched)
    assert b"fp8watch" not in pickle.dumps(watched)
    copy.deepcopy(watched)(torch.randn(2, 32))
    file = io.BytesIO()
    torch.save(mlp.state_dict(), file)
    file.seek(0)
    mlp.load_state_dict(torch.load(file))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch traces its own
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "backend",
    ["aot_eager", pytest.param("inductor", marks=pytest.mark.heavy(11, "fp8watch/layers", "fp8watch/observer"))],
)
def test_compile_makes_one_graph_and_the_same_numbers(attach, train, backend):
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    compiled = copy.deepcopy(eager)
    watches = [attach(eager), attach(compiled)]
    run = torch.compile(compiled, fullgraph=True, backend=backend)
    x = torch.randn(32, 64)
    for model, call in ((eager, eager), (compiled, run)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            call(x).pow(2).mean().backward()
            optimizer.step()
    # inductor may fuse the mean's multiplications in another order
    assert torch.allclose(eager[0].weight, compiled[0].weight, rtol=0, atol=0 if backend == "aot_eager" else 1e-6)
    a, b = (w._recorder.step(2)[1] for w in watches)
    assert a.keys() == b.keys()
    assert all(
        a[k]["num_elements"] == b[k]["num_elements"] and a[k]["amax_max"] == pytest.approx(b[k]["amax_max"], rel=1e-5)
        for k in a
    )


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8", "nvfp4", "current", "observe"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_is_not_counted_twice(attach, reentrant, recipe):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    watch = attach(model, recipe=recipe)
    for _ in range(2):
        x = torch.randn(32, 64, requires_grad=True)
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
        watch.step()
    model(x).sum().backward()
    watch.step()
    (_, first), (_, second), (_, plain) = (watch._recorder.step(i) for i in range(3))
    calls = {k: int(r["num_calls"]) for k, r in plain.items()}
    assert (
        calls
        == {k: int(r["num_calls"]) for k, r in first.items()}
        == {k: int(r["num_calls"]) for k, r in second.items()}
    )
    assert set(calls.values()) == {1}
    assert ("0", "input", "columnwise") in calls or recipe == "current"


def test_evaluation_computes_in_fp8_and_counts_nothing(attach, mlp):
    watch = attach(mlp)
    mlp.eval()
    with torch.no_grad():
        mlp(torch.randn(32, 64))
    mlp.train()
    mlp(torch.randn(32, 64)).backward()
    watch.step()
    assert {int(r["num_calls"]) for r in watch._recorder.step(0)[1].values()} == {1}


def test_two_forwards_before_a_backward(attach):
    model = nn.Sequential(nn.Linear(64, 64))
    watch = attach(model)
    a, b = model(torch.randn(32, 64)), model(torch.randn(16, 64))
    (a.sum() + b.sum()).backward()
    watch.step()
    _, rows = watch._recorder.step(0)
    assert int(rows["0", "input", "rowwise"]["num_elements"]) == 48 * 64
    assert int(rows["0", "grad_output", "columnwise"]["num_calls"]) == 2


def test_a_default_device_does_not_move_the_sites(attach):
    model = nn.Sequential(nn.Linear(64, 48, bias=False))
    x = torch.randn(32, 64)
    with torch.device("meta"):  # as set_default_device("cuda") would: a site there costs a synchronisation each call
        attach(model)
    want = qdq(x, (1, 128)) @ qdq(model[0].weight.detach(), (128, 128)).t()
    assert torch.equal(model(x).detach(), want)
