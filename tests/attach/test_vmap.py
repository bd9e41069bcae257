"""torch.func's transforms over watched Linears: what looks takes a batch as rows; what computes in FP8 says no, in words."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torch.utils._pytree import tree_leaves

pytestmark = pytest.mark.filterwarnings("error:There is a performance drop:UserWarning")

GEMMS = ("input", "weight", "grad_output")
FIELDS = ("amax_max", "amax_min_nonzero", "num_elements")


@pytest.fixture
def chain():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 32))


def loss_of(model):
    return lambda parameters, x: functional_call(model, parameters, (x,)).pow(2).mean()


def held(model):
    return {name: p.detach() for name, p in model.named_parameters()}


def batch():
    return torch.arange(5 * 4 * 64.0).reshape(5, 4, 64).sin()


def rows_of(watch, i):
    return watch._recorder.step(i)[1]


def test_per_sample_gradients_are_those_of_the_model_and_the_samples_are_rows(attach, chain):
    twin, x = copy.deepcopy(chain), batch()
    watch = attach(chain, recipe="observe")
    got = vmap(grad(loss_of(chain)), in_dims=(None, 0))(held(chain), x)
    watch.step()
    want = vmap(grad(loss_of(twin)), in_dims=(None, 0))(held(twin), x)
    assert all(torch.equal(got[name], want[name]) for name in want)
    vmap(grad(loss_of(chain)), in_dims=(None, 2))(held(chain), x.movedim(0, 2))
    watch.step()
    for sample in x:  # by hand: the same, as five passes of a step
        grad(loss_of(chain))(held(chain), sample)
    watch.step()
    assert not watch.guard.errors
    folded, along_last, by_hand = (rows_of(watch, i) for i in range(3))
    assert {operand for _, operand, _ in folded} >= set(GEMMS)
    for key, row in by_hand.items():
        assert all(folded[key][field] == along_last[key][field] for field in FIELDS), key
        fields = FIELDS if key[2] == "rowwise" else FIELDS[:1]  # tiles of a column span the samples of a batch
        for field in fields[: 2 if key[1] == "weight" else 3]:  # a weight is read once a pass
            assert folded[key][field] == pytest.approx(row[field], rel=1e-6), (key, field)


def test_weights_of_an_ensemble_are_looked_at_one_by_one(attach, chain):
    x = batch()[0]
    watch = attach(chain, recipe="observe")
    one = held(chain)
    two = {name: torch.stack([p, 3 * p]) for name, p in one.items()}
    outputs = vmap(lambda parameters: functional_call(chain, parameters, (x,)))(two)
    watch.step()
    assert torch.equal(outputs[0], functional_call(chain, one, (x,)))
    assert not watch.guard.errors
    row = rows_of(watch, 0)["0", "weight", "rowwise"]
    assert row["amax_max"] == 3 * one["0.weight"].abs().max()


class Scored(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)

    def forward(self, x):
        return self.layer(x).pow(2).mean()


def test_a_loss_of_each_sample_is_noted_as_their_mean(attach):
    model, x = Scored(), batch()
    watch = attach(model, recipe="observe")
    _, losses = vmap(torch.func.grad_and_value(lambda p, z: functional_call(model, p, (z,))), (None, 0))(held(model), x)
    watch.step()
    assert watch._recorder.losses()[0] == pytest.approx(losses.mean().item())


def test_a_jacobian_of_the_fp8_path_is_that_of_its_rows(attach, chain):
    x = batch()[0, :1]
    attach(chain)
    got = jacrev(lambda z: functional_call(chain, held(chain), (z,)))(x)
    want = []
    for i in range(got.shape[1]):
        z = x.clone().requires_grad_()
        want.append(torch.autograd.grad(chain(z)[0, i], z)[0])
    assert torch.equal(got[0].reshape(-1, 64), torch.cat(want))


def hessian_of_the_input(model, x):
    return hessian(lambda z: loss_of(model)(held(model), z))(x[0, :1, :8].repeat(1, 8))


def hessian_of_a_parameter(model, x):
    return hessian(lambda b: loss_of(model)({**held(model), "0.bias": b}, x))(held(model)["0.bias"])


def tangent_of_a_gradient(model, x):
    return jvp(lambda p: grad(loss_of(model))(p, x), (held(model),), (held(model),))


def tangents_of_samples(model, x):
    return vmap(lambda z: jvp(grad(lambda y: loss_of(model)(held(model), y)), (z,), (z,)))(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of torch's own rules of forward mode
@pytest.mark.parametrize(
    "way", [hessian_of_the_input, hessian_of_a_parameter, tangent_of_a_gradient, tangents_of_samples]
)
def test_forward_mode_over_gradients_is_that_of_the_model(attach, chain, way):
    chain[1].inplace = True
    want = tree_leaves(way(copy.deepcopy(chain), batch()))
    watch = attach(chain, recipe="observe")
    got = tree_leaves(way(chain, batch()))
    watch.step()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert "observe" not in watch.guard.errors
    assert {operand for _, operand, _ in rows_of(watch, 0)} >= set(GEMMS)


@pytest.mark.parametrize("shape", [(0, 64), (0, 4, 64), (0, 2, 4, 64)], ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_of_no_samples_there_is_nothing_and_no_loss(attach, shape, compiled):
    model = Scored()
    watch = attach(model, recipe="observe")
    transform = vmap(grad(lambda p, z: functional_call(model, p, (z,))), in_dims=(None, 0))
    run = torch.compile(transform, backend="aot_eager") if compiled else transform
    got = run(held(model), torch.randn(shape))
    watch.step()
    assert {name: g.shape for name, g in got.items()} == {name: (0, *p.shape) for name, p in held(model).items()}
    assert watch._recorder.losses() == [None]
    assert not watch.guard.errors


def test_a_jacobian_of_nothing_is_empty_on_the_fp8_path_too(attach, chain):
    attach(chain)
    assert jacrev(lambda z: chain(z).flatten()[:0])(batch()[0]).shape == (0, 4, 64)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of torch's own rules of forward mode
@pytest.mark.parametrize("transform", ["vmap", "jvp", "dual"])
def test_the_fp8_path_refuses_what_it_cannot_do_with_the_remedy(attach, chain, transform):
    x = batch()
    attach(chain)
    with pytest.raises(RuntimeError, match=r"(of 5 samples|forward-mode).*filter_fn, or use recipe='observe'"):
        if transform == "vmap":
            vmap(grad(loss_of(chain)), in_dims=(None, 0))(held(chain), x)
        elif transform == "jvp":
            jvp(lambda z: chain(z), (x,), (torch.ones_like(x),))
        else:
            with torch.autograd.forward_ad.dual_level():
                chain(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))


def test_a_compiled_transform_is_that_of_the_model(attach, chain):
    twin, x = copy.deepcopy(chain), batch()
    watch = attach(chain, recipe="observe")
    got, want = (
        torch.compile(vmap(grad(loss_of(model)), in_dims=(None, 0)), backend="aot_eager")(held(model), x)
        for model in (chain, twin)
    )
    watch.step()
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert not watch.guard.errors
    assert {operand for _, operand, _ in rows_of(watch, 0)} >= {"input", "weight"}
