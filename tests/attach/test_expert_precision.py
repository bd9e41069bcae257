"""Which experts compute in FP8, what is said of the others, and that training holds, compiled too."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.own_models import E, Experts, K, Moe
from torch import nn
from torch._dynamo.testing import CompileCounter

from fp8watch import recipe as recipes
from fp8watch.diagnose.model_copies import make_copies


def seeded(make):
    torch.manual_seed(0)
    return make()


class Classifies(Moe):
    """A token's class, of which a tenth is noise: a loss that does not go to zero."""

    def forward(self, x):
        ids = x[:, 0].gt(0).long() + x[:, 1].gt(0.5).long()
        classes = (x[:, 2:10].argmax(1) + (x[:, 11] * 1e4).long().remainder(10).eq(0).long() * 3) % 8
        y = self.last(self.experts(self.first(x), ids))
        classes = classes[ids.sort()[1]]  # in the order of what experts give
        classes = classes.flip(0) if self.experts.way.startswith("gathered") else classes
        return F.cross_entropy(y[:, :8], classes)


@pytest.mark.parametrize("way", ["grouped", "loop", "gathered"])
def test_training_in_fp8_holds(attach, train, way, capsys):
    def make():
        return Classifies(way=way)

    high = train(seeded(make), steps=40, batch=128, lr=1e-3)
    model = seeded(make)
    watch = attach(model, recipe="blockwise")
    losses = train(model, steps=40, batch=128, lr=1e-3)
    assert watch.summary()["internal_errors"] == {}
    assert losses != high
    assert np.mean(losses[-10:]) < 0.95 * losses[0]
    assert np.mean(losses[-10:]) == pytest.approx(np.mean(high[-10:]), rel=0.0025)
    said = capsys.readouterr().err
    assert "2 Linears now compute in FP8" in said
    assert "no longer observed" not in said
    assert "2 parameters of experts now compute in FP8" in said
    assert watch._recorder.facts.get("not_in_fp8", "") == ""
    cached = "inputs of 2 Linears and 2 parameters of experts as FP8 codes with their scales"
    assert watch._recorder.facts["precision.cached for backward"] == cached


def test_detach_gives_the_model_back(attach, train):
    model, alone = seeded(Moe), seeded(Moe)
    before = {name: (type(m), set(m.__dict__)) for name, m in model.named_modules()}
    watch = attach(model, recipe="blockwise")
    assert train(model) != train(alone)
    twin = copy.deepcopy(model)
    assert {name: (type(m), set(m.__dict__)) for name, m in twin.named_modules()} == before
    watch.detach()
    assert {name: (type(m), set(m.__dict__)) for name, m in model.named_modules()} == before
    assert train(model) == train(twin)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_inside_compiled_code_they_compute_in_fp8_too(attach):
    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = Experts(way="dense")

        def forward(self, x):
            return self.experts(torch.relu(x), torch.arange(len(x)) % E).pow(2).mean()

    model, x = seeded(Around), torch.randn(40, K)
    watch = attach(model, recipe="blockwise")
    expected = model(x)
    torch._dynamo.reset()
    count = CompileCounter()
    loss = torch.compile(model, backend=count)(x)
    assert count.frame_count > 0
    assert torch.equal(loss, expected)
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    assert watch.summary()["internal_errors"] == {}
    assert ("experts.up", "grad_output", "columnwise") in watch._recorder.step(0)[1]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_where_a_graph_may_not_break_it_is_refused_in_words(attach):
    model = nn.ModuleDict({"experts": Experts(way="dense")})
    attach(model, recipe="blockwise")
    torch._dynamo.reset()
    whole = torch.compile(model["experts"], backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="experts compute in FP8 outside of compiled graphs"):
        whole(torch.randn(2 * E, K), torch.arange(2 * E) % E)


def test_without_statistics_it_computes_the_same(attach, train, monkeypatch, capsys):
    losses = train(attach(seeded(Moe), recipe="blockwise")._model)
    monkeypatch.setenv("FP8WATCH_DISABLED", "stats")
    model = seeded(Moe)
    watch = attach(model, recipe="blockwise")
    assert train(model) == losses
    assert "2 parameters of experts now compute in FP8" in capsys.readouterr().err.splitlines()[-1]
    watch.detach()
    assert type(model.experts) is Experts
    monkeypatch.delenv("FP8WATCH_DISABLED")
    model = seeded(Moe)
    watch = attach(model, recipe="blockwise", sites=["first"])
    assert train(model) == losses
    assert {m for m, operand, _ in watch._recorder.step(0)[1] if operand != "output"} == {"first"}


def only_experts(module, fqn):
    return None if fqn.startswith("experts.") else False


def no_linears(module, fqn):
    return module.in_features < 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"recipe": "blockwise", "filter_fn": lambda m, fqn: False}, "experts.down (filter_fn)"),
        ({"recipe": "blockwise", "filter_fn": no_linears}, "experts.up (filter_fn reads what only a Linear has)"),
        ({"recipe": recipes.Recipe(high_precision_modules=("first", "last", "experts.*"))},
         "experts.down (the recipe leaves it in high precision)"),
        ({"recipe": "current", "filter_fn": only_experts}, "experts.up (recipe current: its scales would be of the tokens of all"),
        ({"recipe": "delayed", "filter_fn": only_experts}, "experts.up (recipe delayed: its scales would be of the tokens of all"),
    ],
)  # fmt: skip
def test_experts_that_stay_in_high_precision_say_why_and_change_nothing(attach, train, arguments, reason):
    alone = train(seeded(Moe))
    watch = attach(seeded(Moe), **arguments)
    assert train(watch._model) == alone
    assert reason in watch._recorder.session.facts["left_out"]
    sites = {s.module: s.recipe for s in watch._recorder.sites if s.operand == "input"}
    assert sites["experts.up"] in ("observe", "delayed")


def test_one_parameter_of_experts_may_be_left_out_alone(attach, train):
    watch = attach(seeded(Moe), recipe="blockwise", filter_fn=lambda m, fqn: fqn != "experts.down")
    train(watch._model, steps=2)
    sites = {s.module: s.recipe for s in watch._recorder.sites if s.recipe != "probe"}
    assert sites == {"first": "blockwise", "last": "blockwise", "experts.up": "blockwise", "experts.down": "observe"}
    with pytest.raises(TypeError, match="filter_fn returned 'no' for 'experts.up'"):
        attach(seeded(Moe), filter_fn=lambda m, fqn: "no" if fqn == "experts.up" else None)


def test_a_warm_up_is_in_high_precision(attach, train):
    alone = train(seeded(Moe), steps=4)
    losses = train(
        attach(seeded(Moe), recipe=recipes.blockwise(warmup_steps=2), filter_fn=only_experts)._model, steps=4
    )
    assert losses[:2] == alone[:2]
    assert losses[2] != alone[2]


def test_a_product_that_stays_in_high_precision_all_the_same_is_told(attach, train, capsys):
    class Inside(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return F.linear(x, w[0])

        @staticmethod
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            dw = torch.zeros_like(w)
            dw[0] = grad.t() @ x
            return grad @ w[0], dw

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.experts = nn.Linear(K, K), nn.Module()
            self.experts = Part()

        def forward(self, x):
            return self.experts(self.first(x)).pow(2).mean()

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts_w = nn.Parameter(torch.randn(2, K, K) * 0.1)

        def forward(self, x):
            return Inside.apply(x, self.experts_w)

    watch = attach(seeded(Odd), recipe="blockwise")
    train(watch._model, steps=2)
    told = "experts.experts_w (inside a function whose backward is its own)"
    assert watch._recorder.facts["not_in_fp8"] == told
    assert f"in high precision, against what was announced: {told}" in capsys.readouterr().err


@pytest.mark.parametrize("attached", [False, True])
def test_copies_for_a_comparison_have_their_experts_in_fp8(attach, attached):
    model, x = seeded(Moe), torch.randn(40, K)
    high = model(x)
    watch = attach(model, recipe="blockwise")
    in_fp8 = model(x)
    if not attached:
        watch.detach()
    fp8, plain = make_copies(model, None, watch._recipe, None, None)
    assert torch.equal(fp8.model(x), in_fp8)
    assert torch.equal(plain.model(x), high)
