"""Heads that are no Linears: products with the weight of an embedding are looked at, named, and change nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from fp8watch.layers import own_gemms, own_turns
from fp8watch.selection.tied_heads import find_tied_heads
from fp8watch.selection.wrappers import named_modules

VOCAB, K = 96, 64


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.q = nn.Embedding(VOCAB, K), nn.Linear(K, K)

    def forward(self, ids):
        return torch.relu(self.q(self.wte(ids)))


class Tied(nn.Module):
    """Returns a 0-d loss; subclasses multiply in other ways."""

    def __init__(self):
        super().__init__()
        self.body = Body()

    def logits(self, x):
        return F.linear(x, self.body.wte.weight)

    def forward(self, x):
        ids = x[:, 0].mul(1000).long().remainder(VOCAB)
        return F.cross_entropy(self.logits(self.body(ids)).float(), ids.flip(0))


class Matmul(Tied):
    def logits(self, x):
        return x @ self.body.wte.weight.t()


class Cast(Tied):
    def logits(self, x):
        return torch.matmul(x.bfloat16(), self.body.wte.weight.to(torch.bfloat16).mT)


class Asked(Tied):
    def get_input_embeddings(self):
        return self.body.wte

    def logits(self, x):
        return (self.get_input_embeddings().weight @ x.t()).t()


class Again(Tied):
    def logits(self, x):
        return checkpoint(super().logits, x, use_reentrant=False)


def seeded(make):
    torch.manual_seed(0)
    return make()


@pytest.mark.parametrize("make", [Tied, Matmul, Cast, Asked, Again])
def test_a_product_with_the_embedding_is_looked_at_and_changes_nothing(attach, train, make, capsys):
    alone, model = seeded(make), seeded(make)
    classes, losses = [type(m) for m in model.modules()], train(alone)
    watch = attach(model, recipe="observe")
    assert train(model) == losses
    assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), model.parameters(), strict=True))
    assert watch.summary()["internal_errors"] == {}
    row = watch._recorder.step(1)[1]["body.wte.tied_head", "output", "rowwise"]
    assert int(row["num_elements"]) == 32 * VOCAB
    assert float(row["amax_max"]) > 0
    given = watch._recorder.step(0)[1]["body.wte.tied_head", "input", "rowwise"]
    assert int(given["num_elements"]) == 32 * K
    assert "left out: body.wte.tied_head (weight tied to an embedding)" in capsys.readouterr().err
    facts = watch._recorder.session.facts
    assert facts["left_out"] == "body.wte.tied_head (weight tied to an embedding)"
    assert facts["gemm_flops_observed"] == pytest.approx(K / (K + VOCAB), abs=1e-4)
    assert "silent" not in watch._recorder.facts
    watch.detach()
    assert [type(m) for m in model.modules()] == classes
    assert not any("_fp8watch" in name for m in model.modules() for name in m.__dict__)


def test_layers_in_high_precision_can_be_left_alone_and_are_named_all_the_same(attach, train):
    watch = attach(seeded(Tied), recipe="observe", probes=["norms"])
    train(watch._model, steps=1)
    assert {module for module, *_ in watch._recorder.step(0)[1]} == {"body.q"}
    assert watch._recorder.session.facts["left_out"] == "body.wte.tied_head (weight tied to an embedding)"
    assert watch._recorder.session.facts["gemm_flops_observed"] == pytest.approx(K / (K + VOCAB), abs=1e-4)


def test_it_is_told_whether_what_is_not_finite_came_in(attach):
    model = seeded(Tied)
    watch = attach(model, recipe="observe")
    handle = model.body.register_forward_hook(lambda *of: of[-1] * torch.tensor([float("nan")] + [1.0] * (K - 1)))
    model(torch.randn(8, 64)).backward()
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    handle.remove()
    _, rows = watch._recorder.step(0)
    assert int(rows["body.wte.tied_head", "output", "rowwise"]["num_nan"]) == 8 * VOCAB
    assert watch._recorder.steps[0][3]["nonfinite_input/body.wte.tied_head"] == 8


def test_a_product_that_is_not_known_is_named_with_what_reads_the_weight(attach, train, capsys):
    class Einsum(Tied):
        def logits(self, x):
            return torch.einsum("ik,vk->iv", x, self.body.wte.weight)

    watch = attach(Einsum(), recipe="observe")
    train(watch._model, steps=1)
    said = "body.wte.tied_head (read by einsum, whose product is not recognised)"
    assert watch._recorder.facts["silent"] == said
    assert f"not observed: {said}" in capsys.readouterr().err


def test_a_weight_that_is_handed_on_is_named(attach, capsys):
    def fused_loss(x, weight, ids):
        return F.cross_entropy(F.linear(x, weight), ids)

    class Fused(Tied):
        def forward(self, x):
            ids = x[:, 0].mul(1000).long().remainder(VOCAB)
            return fused_loss(self.body(ids), self.body.wte.weight, ids)

    watch = attach(Fused(), recipe="observe")
    assert (
        "body.wte.tied_head (read by the forward of Fused: a product with it is not counted)" in capsys.readouterr().err
    )
    assert watch._recorder.session.facts["gemm_flops_observed"] == 1.0


def test_an_embedding_that_is_only_looked_up_or_tied_to_a_linear_is_no_head():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = Body(), nn.Linear(K, VOCAB, bias=False)
            self.head.weight = self.body.wte.weight

        def forward(self, ids):
            return F.linear(self.body(ids), self.body.wte.weight)

    class Asks(Tied):
        def forward(self, x):
            return F.relu(x.to(self.body.wte.weight.dtype)).matmul(x.t()).to(self.body.wte.weight.device)

    assert find_tied_heads(list(named_modules(Plain()))) == []
    assert find_tied_heads(list(named_modules(Body()))) == []
    assert find_tied_heads(list(named_modules(Asks()))) == []


def test_an_adapter_around_an_embedding_is_no_head():
    """peft puts its layer in the embedding's place, with products of its own parameters, and reads the weight."""

    class BaseTunerLayer(nn.Module):
        def __init__(self, embedding):
            super().__init__()
            self.base_layer = embedding
            self.a, self.b = nn.Parameter(torch.zeros(VOCAB, 4)), nn.Parameter(torch.zeros(4, K))

        def forward(self, ids):
            weight = self.base_layer.weight
            return self.base_layer(ids) + (F.embedding(ids, self.a) @ self.b).to(weight)

    model = Body()
    model.wte = BaseTunerLayer(model.wte)
    assert [head.fqn for head in find_tied_heads(list(named_modules(model)))] == ["wte.base_layer.tied_head"]
    BaseTunerLayer.__module__ = "peft.tuners.tuners_utils"
    assert find_tied_heads(list(named_modules(model))) == []


def test_what_is_announced_and_never_multiplied_is_looked_for_a_few_times_and_told(attach, train, monkeypatch):
    class Never(Tied):
        def logits(self, x):
            return F.pad(x, (0, VOCAB - K)) if self.training else super().logits(x)

    entered = []
    inner = own_gemms.GemmMode.__enter__
    monkeypatch.setattr(own_gemms.GemmMode, "__enter__", lambda self: (entered.append(1), inner(self))[1])
    watch = attach(Never(), recipe="observe")
    train(watch._model, steps=7)
    assert len(entered) == own_turns.FORWARDS_IN_VAIN
    assert watch._recorder.facts["silent"] == "body.wte.tied_head (no product with it was recognised)"


def test_after_the_first_steps_it_has_turns(attach, train, monkeypatch):
    monkeypatch.setattr(own_turns, "FIRST_STEPS", 2)
    watch = attach(seeded(Tied), recipe="observe")
    train(watch._model, steps=18)
    looked = [("body.wte.tied_head", "output", "rowwise") in watch._recorder.step(i)[1] for i in range(18)]
    assert sum(looked[:2]) >= 1
    assert sum(looked[2:]) == 2


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_what_is_compiled_inside_stays_whole_and_a_compiled_model_says_that_it_is_not_seen(attach, train):
    losses = train(seeded(Tied), steps=2)
    torch._dynamo.reset()
    model, count = seeded(Tied), CompileCounter()
    model.body.compile(backend=count, fullgraph=True)
    watch = attach(model, recipe="observe")
    assert train(model, steps=2) == losses
    assert count.frame_count == 1
    assert ("body.wte.tied_head", "output", "rowwise") in watch._recorder.step(1)[1]
    watch.detach()
    torch._dynamo.reset()
    watch = attach(seeded(Tied), recipe="observe")
    assert train(torch.compile(watch._model, backend="aot_eager", fullgraph=True), steps=2) == pytest.approx(
        losses, rel=1e-6
    )
    assert watch.summary()["internal_errors"] == {}
    assert watch._recorder.facts["silent"].startswith("body.wte.tied_head (not called in eager code")


class Positions(nn.Module):
    """As of a vision tower: positions whose weight is read, to be added, beside a vocabulary."""

    def __init__(self, num_words: int) -> None:
        super().__init__()
        self.words, self.table, self.up = nn.Embedding(num_words, 64), nn.Embedding(32, 64), nn.Linear(64, 64)

    def forward(self, x):
        words = self.words(torch.arange(len(x)) % 16)
        return torch.relu(self.up(x + words + self.table.weight[: len(x)])).square().mean()


@pytest.mark.parametrize("num_words", [16, 128])
def test_positions_that_are_read_are_no_head_beside_a_vocabulary(attach, capsys, num_words):
    attach(Positions(num_words), recipe="observe")
    said = capsys.readouterr().err
    assert ("table.tied_head" in said) is (num_words < 32)


class Queries(nn.Module):
    """As of DETR: learned queries, and no vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.query_position_embeddings, self.up = nn.Embedding(32, 64), nn.Linear(64, 64)

    def forward(self, x):
        return torch.relu(self.up(x + self.query_position_embeddings.weight[: len(x)])).square().mean()


def test_queries_that_are_read_are_no_head(attach, capsys):
    watch = attach(Queries(), recipe="observe")
    assert "tied_head" not in capsys.readouterr().err
    assert watch._recorder.session.facts["gemm_flops_observed"] == 1.0
