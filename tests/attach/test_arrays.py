"""Parameters with the shape of a weight that are none: learned arrays are told from weights by what is computed from them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp8watch.session.silent_sites import ARRAY, ARRAY_BY_NAME

K = 64


@torch.library.custom_op("fp8watch_tests::gemm", mutates_args=())
def gemm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A product of another library."""
    return x @ w.t()


gemm.register_autograd(
    lambda ctx, g: (g @ ctx.saved_tensors[1], g.t() @ ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Int8Gemm(torch.autograd.Function):
    """A product of bytes."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return torch._int_mm(x.round().to(torch.int8), w.round().to(torch.int8).t()).float()

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, g.t() @ x


class HiddenGemm(Int8Gemm):
    """A product that is made elsewhere."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return torch.from_numpy(x.numpy() @ w.numpy().T)


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


def added_in_place(self, x, h):
    h += self.w.mean() + self.w[:32]
    return self.q(h)


def written_beside_keys(self, x, h):
    keys = h.new_zeros(80, K)
    keys[:48] = self.w
    keys[48:] = h
    return torch.softmax(h @ keys.t(), dim=-1)


def beside_itself(self, x, h):
    """Learned bounds."""
    return torch.maximum(h[:, None], self.w) * torch.where(h[:, None] > self.w, h[:, None], self.w)


def first_state(self, x, h):
    """A recurrent layer begins with it."""
    w = [torch.eye(K).repeat(3, 1) for _ in range(2)]
    return torch._VF.gru(h[None].repeat(1, 2, 1)[:, :48], self.w[None], w, False, 1, 0.0, True, False, False)[0]


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


def by_an_op(self, x, h):
    return gemm(h, self.w)


def by_an_op_that_nothing_comes_before(self, x, h):
    """And what comes out of it enters a Linear."""
    return self.q(gemm(x, self.w.repeat(2, 1)[:K])) + h


def by_an_op_of_aten(self, x, h):
    return torch.ops.aten.mm.default(h, self.w.t())


def by_linalg(self, x, h):
    return torch.linalg.matmul(h, self.w.t())


def added_to(self, x, h):
    return h.new_ones(32, 48).addmm_(h, self.w.t())


def in_int8(self, x, h):
    s_w = self.w.abs().topk(1, dim=1).values[:, 0] / 127
    return Int8Gemm.apply(50 * h, self.w / s_w[:, None]) * s_w


def scaled(self, x, h):
    """The scale of each channel multiplies what comes out of a product that is not seen."""
    s_w = self.w.abs().amax(dim=1) / 127
    return HiddenGemm.apply(h, self.w) * s_w


def penalised(self, x, h):
    """What holds a weight small is added."""
    return HiddenGemm.apply(h, self.w) + h.mean() * F.mse_loss(self.w, self.mask)


def written(self, x, h):
    w = x.new_zeros(2 * K, K)
    w[:48] = self.w
    w[K : K + 48] = self.w * 2
    return F.linear(h, torch.cat([w, self.w]))


def copied(self, x, h):
    w = x.new_zeros(2 * K, K)
    w[:48].copy_(self.w)
    w[K : K + 48].add_(self.w)
    return F.linear(h, torch.cat([w, self.w]))


@pytest.mark.parametrize("read", [
    repeated, read_by_a_linear, beside_keys, code_vectors, added_in_place, written_beside_keys, beside_itself, first_state,
])  # fmt: skip
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
    assert "announced as observed and sen" not in capsys.readouterr().err
    assert watch.summary()["internal_errors"] == {}


def test_a_function_that_may_be_a_product_is_named(attach, train):
    watch = attach(Read(by_an_op), recipe="observe")
    train(watch._model, steps=2)
    facts = watch._recorder.facts
    assert facts["silent"] == "w (read by gemm, whose product is not recognised)"
    assert facts["gemm_flops_observed"] == 0.5714


@pytest.mark.parametrize("recipe", ["blockwise", "nvfp4"])
def test_an_array_that_only_a_linear_in_fp8_reads_is_one(attach, train, recipe):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(48, K) * 0.1)
            self.q, self.k = nn.Linear(K, K), nn.Linear(K, K)

        def forward(self, x):
            return (self.q(self.w * 2).mean() * self.k(x).mean()).pow(2)

    watch = attach(Net(), recipe=recipe)
    train(watch._model, steps=2)
    assert watch._recorder.facts["not_counted"] == f"w ({ARRAY})"


@pytest.mark.parametrize("read", [
    masked, padded, divided, adapted, contracted, modulated, fast, by_an_op, by_an_op_that_nothing_comes_before, by_an_op_of_aten,
    by_linalg, added_to, in_int8, scaled, penalised, written, copied,
])  # fmt: skip
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


class Held(nn.Module):
    """Hands a parameter out, as the embeddings of Perceiver do."""

    def __init__(self, name, rows):
        super().__init__()
        self.name = name
        self.register_parameter(name, nn.Parameter(torch.randn(rows, K) * 0.1))

    def forward(self):
        return getattr(self, self.name).expand(2, -1, -1)


class Reader(nn.Module):
    def __init__(self, name, rows):
        super().__init__()
        self.held, self.q, self.k = Held(name, rows), nn.Linear(K, 2 * K), nn.Linear(2 * K, K)

    def forward(self, x):
        return (self.k(self.q(self.held())).sum(dim=0)[0] * x).pow(2).mean()


@pytest.mark.parametrize("name", ["latents", "mems", "mem_k", "queries"])
def test_where_only_the_name_of_a_learned_array_speaks_it_is_none_of_the_gemms(attach, train, capsys, name):
    watch = attach(Reader(name, 16), recipe="observe")
    train(watch._model, steps=2)
    facts = watch._recorder.session.facts | watch._recorder.facts
    assert facts["not_counted"] == f"held.{name} ({ARRAY_BY_NAME})"
    assert facts["gemm_flops_observed"] == 1.0
    assert not facts.get("silent")
    said = capsys.readouterr().err
    assert "not observed" not in said
    assert "parameter observed" not in said


def test_a_name_does_not_speak_for_what_would_be_much(attach, train):
    watch = attach(Reader("queries", 64), recipe="observe")
    train(watch._model, steps=2)
    assert watch._recorder.facts["silent"] == "held.queries (read by expand, whose product is not recognised)"
    assert watch._recorder.facts["gemm_flops_observed"] == 0.8


@pytest.mark.parametrize("name", ["w_queries", "key_mem", "queries"])
def test_a_weight_with_the_name_of_a_learned_array_is_observed(attach, train, name):
    def read(self, x, h):
        return h @ getattr(self, name)

    model = Read(read, shape=(1, 1))
    model.register_parameter(name, nn.Parameter(torch.randn(K, K) * 0.1))
    watch = attach(model, recipe="observe")
    train(model, steps=2)
    assert {name, "q"} == {site.module for site in watch._recorder.sites if site.operand == "weight"}
    assert watch._recorder.session.facts["gemm_flops_observed"] == 1.0
    assert not watch._recorder.facts.get("silent")


def test_a_name_does_not_speak_for_what_a_function_read_that_may_be_a_product(attach, train):
    def read(self, x, h):
        return self.k(gemm(h, self.mems)).mean() + h

    model = Read(read, shape=(1, 1))
    model.mems, model.k = nn.Parameter(torch.randn(4, K) * 0.1), nn.Linear(4, K)
    watch = attach(model, recipe="observe")
    train(model, steps=2)
    assert watch._recorder.facts["silent"] == "mems (read by gemm, whose product is not recognised)"


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
    assert {site.module for site in watch._recorder.sites if site.operand == "weight"} == {"fc", "q"}
    assert not watch._recorder.facts.get("silent")
