"""Products with weights that a model computes are FLOPs: the share that is observed is counted again when a forward has shown them."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fp8watch.selection.computed_weights import computed_weights, flops_besides

K, TOKENS, RANK = 64, 48, 4


class Layer(nn.Module):
    """A Linear, adapted by a weight of its own size."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(K, K).requires_grad_(False)

    def forward(self, x):
        return self.base(x) + self.delta(x)

    def delta(self, x):
        return F.linear(x, self.weight())


class Kron(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.rand(8, 8) / 8), nn.Parameter(torch.rand(8, 8) / 8)

    def weight(self):
        return torch.kron(self.left, self.right)


class Product(Layer):
    """Its factors are multiplied with each other: that is no product with tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(torch.rand(RANK, K) / K), nn.Parameter(torch.rand(K, RANK) / K)

    def weight(self):
        return self.up @ self.down


class Spectrum(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.spectrum = nn.Parameter(torch.rand(16) / K)

    def weight(self):
        dense = torch.zeros(K, K, dtype=torch.complex64)
        dense[torch.arange(16), torch.arange(16)] = self.spectrum.to(torch.complex64)
        return torch.fft.ifft2(dense).real


class OfFunction(Kron):
    """Made by a function whose backward is its own."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight):
            return weight * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    def weight(self):
        return self.Double.apply(super().weight())


class Checkpointed(Kron):
    def delta(self, x):
        return checkpoint(super().delta, x, use_reentrant=False)


class Scaled(Layer):
    """A weight that is counted, of other numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter, self.gain = nn.Linear(K, K, bias=False), nn.Parameter(torch.ones(()))

    def delta(self, x):
        return F.linear(x, self.adapter.weight * self.gain)


class Attends(Layer):
    """Products of activations with each other have no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(K))

    def delta(self, x):
        return (x * self.gain) @ (x.t() @ x) / K


class Model(nn.Module):
    def __init__(self, layer: type[nn.Module], num_layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, K)
        self.layers = nn.ModuleList(layer() for _ in range(num_layers))
        self.head = nn.Linear(K, 32)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return {"loss": F.cross_entropy(self.head(x), ids)}


def trained(attach, model, steps=2):
    """The facts of a model that was trained."""
    recorder = attach(model, recipe="observe")._recorder
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.01)
    for _ in range(steps):
        model(torch.randint(32, (TOKENS,)))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return recorder.session.facts | recorder.facts


def share(model) -> float:
    """Of the FLOPs of one forward, those of Linears that attach announces, as torch counts them; what makes weights is none."""
    counter = FlopCounterMode(display=False)
    with counter:
        model(torch.randint(32, (TOKENS,)))
    makes = sum(2 * K * K * RANK for m in model.modules() if isinstance(m, Product))
    return 2 * TOKENS * K * K * len(model.layers) / (counter.get_total_flops() - makes)


@pytest.mark.parametrize("layer", [Kron, Spectrum, OfFunction, Checkpointed])
def test_products_with_computed_weights_count(attach, layer, capsys) -> None:
    model = Model(layer)
    true = share(model)
    facts = trained(attach, model)
    assert facts["gemm_flops_observed"] == pytest.approx(true, abs=0.01)
    assert "(computed weight [64, 64], " in facts["not_taken"]
    said = [line for line in capsys.readouterr().err.splitlines() if "multiplies with weights that it computes" in line]
    assert len(said) == 1, "once"
    assert "% of the GEMM FLOPs; not taken: layers.*" in said[0]
    assert "80 % were announced" in said[0]


def test_what_makes_a_weight_is_no_product_with_tokens() -> None:
    """Neither where a weight has as many rows as there are tokens."""
    model = Model(Product)
    names = {id(p) for p in model.parameters()}
    found = computed_weights(model(torch.randint(32, (K,))), names, {K})
    assert {w.shape for w in found} == {(K, K)}
    assert len(found) == 2


def test_tokens_are_as_many_as_rows_that_were_seen() -> None:
    """A factor without a gradient may be a buffer that a weight is made of."""
    made = nn.Parameter(torch.rand(K, K))
    names = {id(made)}
    product = torch.rand(RANK, K) @ torch.tanh(made)
    assert computed_weights(product, names, {TOKENS}) == set()
    assert {w.shape for w in computed_weights(product, names, {RANK})} == {(K, K)}


@pytest.mark.parametrize("layer", [Scaled, Attends])
def test_what_is_counted_or_has_no_weight_is_not_counted_again(attach, layer, capsys) -> None:
    assert "computed weight" not in trained(attach, Model(layer))["not_taken"]
    assert "had shown" not in capsys.readouterr().err


def test_one_weight_of_many_steps_counts_once() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Parameter(torch.rand(8, 8)), nn.Parameter(torch.rand(8, 8))

        def forward(self, x):
            for _ in range(5):
                x = torch.tanh(F.linear(x, torch.kron(self.left, self.right)))
            return x

    model = Recurrent()
    found = computed_weights(model(torch.rand(TOKENS, K)), {id(p) for p in model.parameters()}, {TOKENS})
    assert flops_besides(found, {}) == dict.fromkeys(found, 2.0 * K * K)
    assert len(found) == 1
    (weight,) = found
    assert flops_besides(found, dict.fromkeys(weight.made_of, 100.0)) == {weight: 2.0 * K * K - 200}
    assert flops_besides(found, dict.fromkeys(weight.made_of, 2.0 * K * K)) == {}


def test_weights_of_other_parameters_are_not_told() -> None:
    """As those that a sharding gathers: nobody knows which was counted."""
    model = Model(Kron)
    assert computed_weights(model(torch.randint(32, (TOKENS,))), set(), {TOKENS}) == set()


def test_a_graph_that_is_too_large_is_not_walked(monkeypatch) -> None:
    model = Model(Kron)
    returned, names = model(torch.randint(32, (TOKENS,))), {id(p) for p in model.parameters()}
    assert len(computed_weights(returned, names, {TOKENS})) == 2
    monkeypatch.setattr("fp8watch.selection.computed_weights.MAX_NODES", 8)
    assert computed_weights(returned, names, {TOKENS}) == set()


@dataclass
class Returned:
    """As models of others return: nested, and with more than tensors."""

    loss: torch.Tensor
    also: object = None


def test_what_is_returned_may_hold_its_tensors_anywhere_and_itself() -> None:
    model = Model(Kron)
    names = {id(p) for p in model.parameters()}
    loss = model(torch.randint(32, (TOKENS,)))["loss"]
    around = Returned(loss)
    around.also = {"all": [around, (loss, "text", 3)]}
    for returned in (loss, (None, [loss]), {"a": {"b": loss}}, Returned(torch.ones(()), [loss]), around):
        assert len(computed_weights(returned, names, {TOKENS})) == 2


def test_nothing_that_was_saved_is_unpacked(attach) -> None:
    """Unpacking may run a forward again, or bring memory back."""
    unpacked = []
    model = Model(Kron)
    watch = attach(model, recipe="observe")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: unpacked.append(1) or t):
        loss = model(torch.randint(32, (TOKENS,)))["loss"]
    assert not unpacked
    loss.backward()
    assert watch._attachment.computed.is_news


def test_it_is_asked_once_and_of_no_copy(attach) -> None:
    model = Model(Kron)
    watch = attach(model, recipe="observe")
    other = copy.deepcopy(model)
    before = len(model._forward_hooks)
    model(torch.randint(32, (TOKENS,)))["loss"].backward()
    assert len(model._forward_hooks) == before - 1
    assert len(other._forward_hooks) == before
    other(torch.randint(32, (TOKENS,)))
    watch.detach()
    assert not model._forward_hooks


class Shows(nn.Linear):
    """An adapter that is a Linear by its class alone: it has no weight, and shows that of the one that it holds."""

    def __init__(self, base: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.base_layer = base.in_features, base.out_features, base
        self.scale = nn.Parameter(torch.ones(K))

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, x):
        return self.base_layer(x) * self.scale


def test_an_adapter_that_shows_the_weight_of_its_linear_is_not_observed_beside_it(attach, capsys) -> None:
    model = nn.Sequential(nn.Linear(K, K), Shows(nn.Linear(K, K)))
    watch = attach(model, recipe="observe")
    assert "2 Linears observed" in capsys.readouterr().err
    model(torch.rand(TOKENS, K)).sum().backward()
    watch.step()
    assert watch._recorder.session.facts["gemm_flops_observed"] == 1.0
    read = {site.module for site in watch._recorder.sites if site.operand == "weight"}
    assert read == {"0", "1.base_layer"}
