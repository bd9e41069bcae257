"""A gradient that is differentiated again is refused, by whatever way its second derivative is asked for."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import weakref

import pytest
import torch
from support.own_models import Experts, K
from support.saved_graphs import as_it_is, nodes_of
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

REFUSED = r"differentiated again .*filter_fn.*recipe='observe'"


def chain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))


def maml(model, x, parameters):
    slopes = torch.autograd.grad(model(x).square().mean(), parameters, create_graph=True)
    moved = {name: p - 0.1 * g for (name, p), g in zip(model.named_parameters(), slopes, strict=True)}
    return torch.autograd.grad(functional_call(model, moved, (x,)).square().mean(), parameters)


def penalty_of_parameters(model, x, parameters):
    z = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(z).square().sum(), z, create_graph=True)
    return torch.autograd.grad(slope.square().sum(), parameters)


def penalty_of_inputs(model, x, parameters):
    z = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(z).square().sum(), z, create_graph=True)
    return torch.autograd.grad(slope.square().sum(), z)


def hessian_times_a_vector(model, x, parameters):
    slopes = torch.autograd.grad(model(x).square().mean(), parameters, create_graph=True)
    return torch.autograd.grad(slopes, parameters, [torch.ones_like(g) for g in slopes])


def weight_of_a_loss(model, x, parameters):
    """As GradNorm: what a factor of the loss does to the norm of a gradient."""
    factor = torch.ones((), requires_grad=True)
    (slope,) = torch.autograd.grad(factor * model(x).square().mean(), parameters[2], create_graph=True)
    return torch.autograd.grad(slope.norm(), factor)


def of_the_input_alone(model, x, parameters):
    """The gradient of the output is a constant: only the input leads to the weight's gradient."""
    z = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model[2](z @ torch.ones(64, 128)).sum(), model[2].weight, create_graph=True)
    return torch.autograd.grad(slope.square().sum(), z)


def under_checkpoints(model, x, parameters):
    z = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(checkpoint(model, z, use_reentrant=False).square().sum(), z, create_graph=True)
    return torch.autograd.grad(slope.square().sum(), parameters)


WAYS = (
    maml, penalty_of_parameters, penalty_of_inputs, hessian_times_a_vector, weight_of_a_loss, of_the_input_alone, under_checkpoints,
)  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recipe", ["blockwise", "current"])
def test_a_second_derivative_is_refused_for_some_tensors_as_for_all(attach, way, recipe):
    model, x = chain(), torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    parameters = list(model.parameters())
    want = way(model, x, parameters)
    assert all(t.isfinite().all() for t in want)
    attach(model, recipe=recipe)
    with pytest.raises(RuntimeError, match=REFUSED):
        way(model, x, parameters)


def test_of_experts_too(attach):
    torch.manual_seed(0)
    model = nn.ModuleDict({"experts": Experts()})
    attach(model, recipe="blockwise")
    x, ids = torch.randn(9, K), torch.arange(9) % 3
    for of_input in (False, True):
        x.requires_grad_(of_input)
        parameters = list(model.parameters())
        by = x if of_input else parameters[0]
        (slope,) = torch.autograd.grad(model["experts"](x, ids).pow(2).sum(), by, create_graph=True)
        with pytest.raises(RuntimeError, match=REFUSED):
            torch.autograd.grad(slope.square().sum(), parameters[0], allow_unused=True)


def test_graphs_of_graphs_that_nobody_differentiates_cost_nothing(attach):
    """Optimizers of second order ask for create_graph=True; what is not differentiated again is as it was, and goes with its graph."""
    model, x = chain(), torch.randn(8, 64)
    attach(model)
    model(x).square().mean().backward()
    want = [p.grad.clone() for p in model.parameters()]
    got = torch.autograd.grad(model(x).square().mean(), list(model.parameters()), create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    y = model(x.requires_grad_())
    node = weakref.ref(y.grad_fn.next_functions[0][0])
    assert "Fp8Linear" in type(node()).__name__
    del y, got
    gc.disable()
    try:
        assert node() is None  # without the collector: nothing holds itself
    finally:
        gc.enable()


def test_hooks_that_keep_what_is_saved_see_no_graph_in_it_and_all_is_refused_as_without(attach):
    """As those do that offload what is large, and give back what is small."""
    model, x = chain(), torch.randn(8, 64)
    attach(model)
    parameters = list(model.parameters())
    want = torch.autograd.grad(model(x).square().mean(), parameters)
    with torch.autograd.graph.saved_tensors_hooks(as_it_is, as_it_is):
        got = torch.autograd.grad(model(x).square().mean(), parameters)
        for way in WAYS:
            with pytest.raises(RuntimeError, match=REFUSED):
                way(model, x, parameters)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("kind", ["linears", "experts"])
def test_a_forward_whose_backward_never_comes_goes_whatever_hooks_keep(attach, kind):
    torch.manual_seed(0)
    if kind == "experts":
        model, given = nn.ModuleDict({"experts": Experts()}), (torch.randn(9, K), torch.arange(9) % 3)
    else:
        model, given = chain(), (torch.randn(16, 64),)
    attach(model, recipe="blockwise")
    with torch.autograd.graph.saved_tensors_hooks(as_it_is, as_it_is):
        y = (model["experts"] if kind == "experts" else model)(*given)
    last = nodes_of(y)[0]  # a ReLU and a Tanh of torch's keep themselves, and what lies in front of them
    del y
    gc.collect()
    assert last() is None


def test_a_torch_without_ways_to_ask_that_are_not_public_trains_all_the_same():
    """They may be gone with any version, and nothing may be raised into training for that."""
    script = textwrap.dedent(
        """
        import torch
        del torch._C._autograd._top_saved_tensors_default_hooks, torch._C._len_torch_function_stack
        del torch.overrides._get_current_function_mode_stack
        import fp8watch
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        watch = fp8watch.attach(model, collector=None)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            model(torch.randn(32, 64)).sum().backward()
        assert model[0].weight.grad.any() and not watch.guard.errors, watch.guard.errors
        watch.detach()
        print("TRAINED")
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert "TRAINED" in done.stdout, done.stderr[-2000:]


class Stop(torch.autograd.Function):
    """Gives its input no gradient at all, which is not one of zeros."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


@pytest.mark.parametrize("kind", ["linears", "experts"])
def test_where_no_gradient_comes_none_goes_on(attach, kind):
    torch.manual_seed(0)
    if kind == "experts":
        model, given = nn.ModuleDict({"experts": Experts()}), (torch.randn(9, K), torch.arange(9) % 3)
    else:
        model, given = chain(), (torch.randn(16, 64),)
    watch = attach(model, recipe="blockwise")
    Stop.apply((model["experts"] if kind == "experts" else model)(*given)).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    assert not watch.guard.errors
