"""Loss, steps and probes of a model of which no Linear is taken, and what of its GEMMs nobody observes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp8watch.selection.flop_coverage import coverage
from fp8watch.selection.module_filter import select_linears
from fp8watch.selection.wrappers import named_modules
from fp8watch.session.silent_sites import EVALUATED


class Conv1D(nn.Module):
    """A Linear whose weight lies the other way round, as GPT-2's."""

    def __init__(self, n_out, n_in):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_in, n_out) * 0.02)

    def forward(self, x):
        return x @ self.weight


class NoLinear(nn.Module):
    """A model of GEMMs that are not Linears; returns a 0-d loss."""

    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList(nn.Conv1d(64, 64, 1) for _ in range(3))
        self.norm = nn.LayerNorm(64)

    def forward(self, x):
        for layer in self.h:
            x = torch.relu(layer(x[..., None])[..., 0])
        return self.norm(x).pow(2).mean()


def test_a_model_without_linears_sends_its_loss_its_steps_and_its_probes(attach, train, capsys):
    torch.manual_seed(0)
    alone = train(NoLinear(), steps=4)
    torch.manual_seed(0)
    model = NoLinear()
    watch = attach(model)
    losses = train(model, steps=4)
    assert losses == alone
    assert watch._recorder.losses() == pytest.approx(losses, rel=1e-6)
    assert [int(h["step"]) for h, *_ in watch._recorder.steps] == [0, 1, 2, 3]
    assert {key[0] for key in watch._recorder.step(1)[1]} == {"norm"}
    line = capsys.readouterr().err
    assert "no Linear taken over, loss and steps are recorded; observing 0 % of the GEMM FLOPs" in line
    assert "not taken: h.* (Conv1d [64, 64, 1], 100 %)" in line
    assert watch.summary()["internal_errors"] == {}


def test_without_linears_and_probes_steps_end_all_the_same(attach, train):
    model = NoLinear()
    watch = attach(model, probes=[])
    for _ in range(2):
        model(torch.randn(8, 64)).backward()
        watch.log(loss=1.0)
        watch.step()
    assert watch._recorder.losses() == [1.0, 1.0]


def test_without_linears_a_step_that_is_not_ended_leaves_with_detach(attach):
    model = NoLinear()
    watch = attach(model)
    model(torch.randn(8, 64)).backward()
    watch.detach()
    assert [int(h["step"]) for h, *_ in watch._recorder.steps] == [0]


def test_evaluation_and_a_forward_without_gradients_end_nothing(attach):
    model = NoLinear()
    watch = attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model(torch.randn(8, 64))
    optimizer.step()
    model.eval()
    model(torch.randn(8, 64))
    optimizer.step()
    assert watch.summary()["num_steps"] == 0


class Config:
    num_experts_per_tok = 2


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(8, 64, 96) * 0.02)
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(8, 96))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(64, 64)
        self.experts = Experts()
        self.pos_embed = nn.Parameter(torch.randn(1, 16, 64))


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = Config()
        self.embed = nn.Embedding(500, 64)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.conv = nn.Conv1d(64, 64, 3)


def covered(model):
    linears, _ = select_linears(model, None)
    return coverage(list(named_modules(model)), [m for _, m in linears])


def test_experts_count_by_the_tokens_that_they_see_and_lookups_and_biases_do_not():
    got = covered(Moe())
    linear, experts, conv = 2 * 64 * 64, 2 * 8 * 64 * 96 * 2 / 8, 64 * 64 * 3
    total = linear + experts + conv
    assert got.observed == pytest.approx(linear / total)
    assert [(n.name, n.what) for n in got.not_taken] == [
        ("layers.*.experts.gate_up_proj", "3-D parameter [8, 64, 96]"),
        ("conv", "Conv1d [64, 64, 3]"),
    ]
    assert [n.share for n in got.not_taken] == pytest.approx([experts / total, conv / total])
    assert not got.not_taken[0].at_most


def test_experts_of_which_nobody_says_how_many_see_a_token_are_up_to_their_share(monkeypatch):
    monkeypatch.delattr(Config, "num_experts_per_tok")
    got = covered(Moe())
    assert "up to" in str(got.not_taken[0])
    assert got.line().startswith("observing at least ")


def test_numbered_experts_are_linears_and_count_by_the_tokens_too():
    class Mlp(nn.Module):
        top_k = 1

        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
            self.dense = Conv1D(64, 64)

    assert covered(Mlp()).observed == pytest.approx(0.5)


def test_a_fused_weight_and_multihead_attention_are_named(attach, capsys):
    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.wqkv = nn.Parameter(torch.randn(192, 64) * 0.02)
            self.attention = nn.MultiheadAttention(64, 4)
            self.out = nn.Linear(192, 64)

        def forward(self, x):
            return self.out(F.linear(x, self.wqkv))

    model = Fused()
    linears, _ = select_linears(model, None)
    alone = coverage(list(named_modules(model)), [m for _, m in linears])
    assert "wqkv (2-D parameter [192, 64], " in alone.line()
    assert "attention.in_proj_weight (2-D parameter [192, 64], " in alone.line()
    watch = attach(model)
    assert "3 parameters observed where their modules multiply with them" in capsys.readouterr().err
    facts = watch._recorder.session.facts
    assert facts["not_taken"] == ""
    assert facts["gemm_flops_observed"] == 1.0


class Mixed(nn.Module):
    """Parameters that are no GEMM weights by their names: one is, one is added, one is looked up."""

    def __init__(self):
        super().__init__()
        self.token_mix = nn.Parameter(torch.randn(64, 128) * 0.1)
        self.transposed = nn.Parameter(torch.randn(128, 64) * 0.1)
        self.pos_embed = nn.Parameter(torch.randn(4, 16))
        self.word_embed = nn.Parameter(torch.randn(9000, 64))
        self.out = nn.Linear(64, 64)

    def forward(self, x):
        return self.out(x @ self.token_mix @ self.transposed).pow(2).mean()


def test_a_parameter_that_is_no_gemm_by_its_name_is_named_and_counted_where_it_would_be_much(attach, train, capsys):
    watch = attach(Mixed(), recipe="observe")
    train(watch._model, steps=1)
    facts = watch._recorder.session.facts
    assert facts["not_taken"] == "token_mix (2-D parameter [64, 128], no GEMM by its name, 40 %)"
    assert facts["not_counted"] == (
        "word_embed (2-D parameter [9000, 64], no GEMM by its name); pos_embed (2-D parameter [4, 16], no GEMM by its name)"
    )
    assert facts["gemm_flops_observed"] == 0.6  # "transposed" has "pos" in it, and is no position
    assert "not taken: token_mix" in capsys.readouterr().err


class PreNorm(nn.Module):
    """A norm by its name, with the layer behind it inside."""

    def __init__(self, layer):
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(64), layer

    def forward(self, x):
        return self.layer(self.norm(x))


def test_layers_inside_what_is_called_a_norm_count(attach):
    watch = attach(nn.Sequential(PreNorm(nn.Linear(64, 64)), nn.Linear(64, 8)))
    assert watch._recorder.session.facts["gemm_flops_observed"] == round(8 / 9, 4)


def test_a_model_that_is_taken_whole_has_nothing_to_say(attach, capsys):
    attach(nn.Sequential(nn.Linear(64, 64)))
    assert "GEMM FLOPs" not in capsys.readouterr().err


def test_modules_that_were_not_called_are_a_fact_of_the_session_too(attach, capsys):
    model = nn.ModuleDict({"used": nn.Linear(64, 64), "idle": nn.ModuleList(nn.Linear(64, 64) for _ in range(3))})
    watch = attach(model)
    model["used"](torch.randn(8, 64)).sum().backward()
    watch.step()
    assert (
        "not called as a module in the first step: idle.*; 75 % of the GEMM FLOPs were announced as observed and sent nothing in the first step\n"
        in capsys.readouterr().err
    )
    assert watch._recorder.facts["not_called"] == "idle.*"


def train_beside(model, watch, num):
    """Steps of one part with targets of the other one."""
    optimizer = torch.optim.SGD(model["net"].parameters(), lr=0.01)
    for _ in range(num):
        x = torch.randn(32, 64)
        with torch.no_grad():
            aim = model["other"](x)
        optimizer.zero_grad()
        (model["net"](x) - aim).square().mean().backward()
        optimizer.step()


def test_a_target_network_is_no_part_of_the_model_that_sends_nothing_against_what_was_said(attach, capsys):
    model = nn.ModuleDict({"net": nn.Linear(64, 64), "other": nn.Linear(64, 64)})
    model["other"].eval()
    watch = attach(model)
    train_beside(model, watch, 60)
    facts = watch._recorder.facts
    assert "not observed: other (in evaluation mode and without gradients" in capsys.readouterr().err
    assert not facts.get("silent_share")
    assert not facts.get("blind")
    assert facts["silent"] == f"other ({EVALUATED})"
    assert facts["gemm_flops_observed"] == 0.5


def test_a_teacher_that_keeps_gradients_of_its_own_training_is_one_too(attach, capsys):
    model = nn.ModuleDict({"net": nn.Linear(64, 64), "other": nn.Linear(64, 64)})
    model["other"](torch.randn(8, 64)).square().mean().backward()
    model["other"].requires_grad_(False).eval()
    watch = attach(model)
    train_beside(model, watch, 60)
    assert "not observed: other (in evaluation mode and without gradients" in capsys.readouterr().err
    assert watch._recorder.facts["silent"] == f"other ({EVALUATED})"
    assert not watch._recorder.facts.get("blind")


def test_what_is_trained_in_evaluation_mode_is_blind_and_that_is_said(attach, capsys):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].eval()
    watch = attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        model(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()
    assert watch._recorder.facts["blind"].startswith(
        "50 % of the GEMM FLOPs were announced as observed and send nothing"
    )


def test_linears_that_were_replaced_after_attach_are_told_as_not_called(attach, train, capsys):
    class Other(nn.Linear):
        pass

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(64, 64)

        def forward(self, x):
            return self.a(x).pow(2).mean()

    model = Net()
    watch = attach(model)
    other = Other(64, 64)
    other.weight, other.bias = model.a.weight, model.a.bias
    model.a = other
    losses = train(model, steps=2)
    assert watch._recorder.losses() == pytest.approx(losses, rel=1e-6)
    assert "not called as a module in the first step: a\n" in capsys.readouterr().err
