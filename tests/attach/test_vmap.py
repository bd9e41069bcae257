"""torch.func's transforms over watched Linears: what looks takes a batch as rows; what computes in FP8 says no, in words."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.func import functional_call, grad, jacrev, jvp, vmap

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


def test_a_loss_of_each_sample_is_noted_as_their_mean(attach):
    class Scored(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(64, 64)

        def forward(self, x):
            return self.layer(x).pow(2).mean()

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
