"""Parameters with the shape of a weight that are none: learned arrays are told from weights by what is computed from them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp8watch.session.silent_sites import ARRAY

K = 64


class Read(nn.Module):
    """A residual block with one Linear, and a parameter that is read in some way."""

    def __init__(self, read, shape=(48, K)):
        super().__init__()
        self.q = nn.Linear(K, K)
        self.w = nn.Parameter(torch.randn(shape) * 0.1)
        self.register_buffer("mask", torch.ones(shape))
        self.scale = nn.Parameter(torch.ones(shape[0], 1))
        self.read = read

    def forward(self, x):
        return self.read(self, x, self.q(x)).pow(2).mean()


def repeated(self, x, h):
    """Perceiver's latents."""
    latents = F.layer_norm(self.w.unsqueeze(0).repeat(4, 1, 1), (K,))
    return latents + h.mean(dim=0)


def read_by_a_linear(self, x, h):
    return F.linear(self.w.expand(4, -1, -1), self.q.weight) + h.mean()


def beside_keys(self, x, h):
    """Memory tokens of attention."""
    return torch.softmax(h @ torch.cat([self.w, h]).t(), dim=-1)


def code_vectors(self, x, h):
    """Gumbel's quantiser: a weighted sum, element by element."""
    return (torch.softmax(h[:, :48], dim=-1)[..., None] * self.w).sum(dim=1)


def masked(self, x, h):
    return F.linear(h, self.w * self.mask)


def padded(self, x, h):
    return F.linear(h, torch.cat([self.w, self.mask, self.w * 0]))


def divided(self, x, h):
    return torch.mm(h, (self.w / 8).t())


def adapted(self, x, h):
    """AdaLoRA's."""
    return h @ (self.w * self.scale).T


def contracted(self, x, h):
    return torch.einsum("ij,kj->ik", h, self.w)


def modulated(self, x, h):
    """A weight of each sample."""
    return torch.bmm(x[:8, None], (self.w * (1 + h[:8, :48, None])).transpose(1, 2))


def fast(self, x, h):
    return torch.einsum("bi,bki->bk", h[:4], self.w.unsqueeze(0).repeat(4, 1, 1)) + self.w.mean() * h.mean()


@pytest.mark.parametrize("read", [repeated, read_by_a_linear, beside_keys, code_vectors])
@pytest.mark.parametrize("recipe", ["observe", "blockwise"])
def test_an_array_that_enters_as_activations_do_is_no_gemm_weight(attach, train, capsys, read, recipe):
    watch = attach(Read(read), recipe=recipe)
    train(watch._model, steps=2)
    facts = watch._recorder.session.facts | watch._recorder.facts
    assert not facts.get("silent")
    assert not facts.get("blind")
    assert not facts.get("silent_share")
    assert facts["not_counted"] == f"w ({ARRAY})"
    assert facts["gemm_flops_observed"] == 1.0
    assert "send nothing" not in capsys.readouterr().err
    assert watch.summary()["internal_errors"] == {}


@pytest.mark.parametrize("read", [masked, padded, divided, adapted, contracted, modulated, fast])
def test_a_parameter_from_which_a_factor_is_computed_stays_one(attach, train, capsys, read):
    watch = attach(Read(read), recipe="observe")
    train(watch._model, steps=2)
    facts = watch._recorder.facts
    assert facts["silent"].startswith("w (read by ")
    assert "of the GEMM FLOPs were announced as observed and send nothing: w" in facts["blind"]
    assert not facts.get("not_counted")
    assert "send nothing" in capsys.readouterr().err


def test_a_parameter_whose_trail_ends_is_not_told_to_be_an_array(attach, train):
    class Made(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(K, K) * 0.1)

        def forward(self):
            return self.w * 2

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.made, self.q = Made(), nn.Linear(K, K)

        def forward(self, x):
            return F.linear(self.q(x), self.made()).pow(2).mean()

    watch = attach(Net(), recipe="observe")
    train(watch._model, steps=2)
    assert watch._recorder.facts["silent"] == "made.w (read by mul, whose product is not recognised)"


@pytest.mark.parametrize("name", ["latents", "longterm_mems", "mem_k", "queries"])
def test_names_of_learned_arrays_are_no_gemm_weights_however_large_they_are(attach, train, name):
    model = nn.Module()
    model.q = nn.Linear(K, K)
    model.register_parameter(name, nn.Parameter(torch.randn(512, K)))
    watch = attach(model, recipe="observe")
    facts = watch._recorder.session.facts
    assert facts["gemm_flops_observed"] == 1.0
    assert facts["not_counted"] == f"{name} (2-D parameter [512, {K}], no GEMM by its name)"


def test_what_a_convolution_computes_its_weight_from_is_left_as_the_convolution_is(attach, train):
    model = nn.ModuleDict({
        "conv": nn.utils.parametrizations.weight_norm(nn.Conv1d(K, K, 3, padding=1), dim=2),
        "fc": nn.utils.parametrizations.weight_norm(nn.Linear(K, K)),
        "q": nn.Linear(K, K),
    })  # fmt: skip
    model.forward = lambda x: model["fc"](model["conv"](model["q"](x)[..., None])[..., 0]).pow(2).mean()
    watch = attach(model, recipe="observe")
    assert "conv.parametrizations.weight.original1 (3-D" in watch._recorder.session.facts["not_taken"]
    train(model, steps=2)
    assert watch._recorder.facts["silent"].startswith("fc.parametrizations.weight.original1 (read by _weight_norm")


def test_a_module_whose_weight_is_read_without_a_call_is_said_to_be_that(attach, train, capsys):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.places, self.idle = nn.Linear(K, K), nn.Linear(K, 32), nn.Linear(K, K)

        def forward(self, x):
            return (self.q(x) + self.places.weight.sum(dim=0)).pow(2).mean()

    watch = attach(Net(), recipe="observe")
    train(watch._model, steps=2)
    said = capsys.readouterr().err
    assert "not called as a module in the first step: idle;" in said
    assert "not observed: places (never called as a module: its weight is read elsewhere)" in said
    assert watch._recorder.facts["not_called"] == "idle"
