"""An FP8 Linear with a forward of its own is observed as it is, and its three GEMMs are held to account in its turn."""

from __future__ import annotations

import pytest
import torch
from canary import own_forward
from canary.own_forward import ScriptFloat8Linear, Small
from canary.wrong_outputs import elsewhere, garbage, zeroed
from torch import nn

from fp8watch.selection.own_forward import computes_in_fp8
from fp8watch_agent.record import Measured

WHERE = {"fprop": ("input", "rowwise"), "dgrad": ("grad_output", "rowwise"), "wgrad": ("grad_output", "columnwise")}


def broken_cast(monkeypatch, where, shape, fault):
    """Break the cast of the operand of this shape at this place."""
    right = own_forward.cast

    def cast(x, dtype, at):
        codes, scale_inv = right(x, dtype, at)
        return fault(codes, scale_inv) if at == where and tuple(x.shape) == shape else (codes, scale_inv)

    monkeypatch.setattr(own_forward, "cast", cast)


def broken_product(monkeypatch, where, shape, fault):
    right = own_forward.product

    def product(a, scale_a, b, scale_b, dtype, at):
        if at == where and (len(a), len(b)) == shape:
            return fault(lambda sa, sb: right(a, sa, b, sb, dtype, at), scale_a, scale_b)
        return right(a, scale_a, b, scale_b, dtype, at)

    monkeypatch.setattr(own_forward, "product", product)


def as_powers_of_two(product, scale_a, scale_b):
    return product(torch.exp2(torch.floor(torch.log2(scale_a))), scale_b)


def of_the_padding(product, scale_a, scale_b):
    return product(torch.ones_like(scale_a), scale_b)


def rows_unwritten(product, scale_a, scale_b):
    out = product(scale_a, scale_b)
    out[-20:] = out[:20]
    return out


FAULTS = {
    "codes at the wrong place": ("b", "fprop", broken_cast, "fprop input", (96, 272), elsewhere),
    "a transposed copy that is garbage": ("b", "wgrad", broken_cast, "wgrad input", (96, 272), garbage),
    "codes of gradients all zero": ("c", "dgrad", broken_cast, "dgrad grad_output", (96, 160), zeroed),
    "FP32 scales read as powers of two": ("b", "fprop", broken_product, "fprop", (96, 144), as_powers_of_two),
    "scales of the padding": ("c", "dgrad", broken_product, "dgrad", (96, 144), of_the_padding),
    "rows that nobody wrote": ("a", "fprop", broken_product, "fprop", (96, 272), rows_unwritten),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_public_fault_inside_of_it_is_named_in_its_turn(train, monkeypatch, name) -> None:
    fqn, gemm, breaks, where, shape, fault = FAULTS[name]
    breaks(monkeypatch, where, shape, fault)
    line, _ = train(3, model=Small())
    operand, direction = WHERE[gemm]
    step = ["a", "b", "c"].index(fqn)
    assert line.said()[0] == ("kernel-output-fault", "critical", step, fqn, operand, direction)
    assert not [f for f in line.said() if f[2] < step]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_computes_as_before_and_nothing_is_raised(train, capsys, dtype) -> None:
    def run(watched):
        torch.manual_seed(0)
        if watched:
            line, watch = train(24, model=Small(), dtype=dtype, share=1.0)
            return line, [p.detach().clone() for p in watch._model.parameters()]
        model = Small().to(dtype)
        torch.manual_seed(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(24):
            optimizer.zero_grad()
            model(torch.randn(96, 160, dtype=dtype)).backward()
            optimizer.step()
        return None, [p.detach() for p in model.parameters()]

    _, plain = run(False)
    line, watched = run(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert line.said() == []
    assert "3 of them observed as blockwise: it does not say how it casts" in capsys.readouterr().err
    assert {s.backend for s in line.sites.values()} == {"own forward"}
    looked = [{line.sites[i].gemm for i, r in rows.items() if r["measured"] & Measured.GEMM} for rows in line.rows]
    assert looked[1:3] == [{"fprop", "dgrad", "wgrad"}] * 2
    assert looked[0] == {"fprop", "wgrad"}  # the input of the model has no gradient


def test_a_weight_that_two_calls_share_is_no_fault(train) -> None:
    class Twice(Small):
        def forward(self, x):
            return super().forward(x) + super().forward(x.flip(0))

    line, _ = train(4, model=Twice())
    assert line.said() == []


def test_micro_batches_and_checkpoints_are_no_fault(train) -> None:
    class Checkpointed(Small):
        def forward(self, x):
            y = torch.utils.checkpoint.checkpoint(self.a, x, use_reentrant=False)
            return (x + self.c(torch.tanh(self.b(torch.tanh(y))))).square().mean()

    line, watch = train(3, model=Checkpointed())
    for _ in range(3):
        for _ in range(2):
            watch._model(torch.randn(96, 160)).backward()
        watch.step()
    assert line.said() == []


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch traces its own
def test_under_compile_it_is_observed(train) -> None:
    model = nn.Sequential(nn.Linear(160, 64), ScriptFloat8Linear(64, 160))
    line, watch = train(0, model=model)
    torch._dynamo.reset()
    run = torch.compile(model, backend="aot_eager")
    run(torch.randn(32, 160)).square().mean().backward()
    watch.step()
    assert {line.sites[i].module for i in line.rows[0]} == {"0", "1"}
    assert line.said() == []


def test_what_computes_in_fp8_is_told_from_what_does_not() -> None:
    class CastedLinear(nn.Linear):
        def __init__(self, *args, use_fp8):
            super().__init__(*args)
            self.use_fp8 = use_fp8

        def forward(self, x):
            return nn.functional.linear(x, self.weight.type_as(x))

    class Projection(nn.Linear):
        def forward(self, x):
            return own_forward._Fp8Product.apply(x, self.weight)

    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * nn.functional.linear(x, self.weight)

    def told(module):
        return computes_in_fp8(module)

    assert told(ScriptFloat8Linear(16, 16))
    assert told(CastedLinear(16, 16, use_fp8=True))
    assert not told(CastedLinear(16, 16, use_fp8=False))
    assert told(Projection(16, 16))
    assert not told(Scaled(16, 16))
    assert not told(nn.Linear(16, 16))


def test_others_with_a_forward_of_their_own_are_observed_and_held_to_nothing(train) -> None:
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * nn.functional.linear(x, self.weight)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.scaled, self.plain = Scaled(160, 64), nn.Linear(64, 160)

        def forward(self, x):
            return self.plain(self.scaled(x)).square().mean()

    line, watch = train(3, model=Model(), recipe="observe")
    assert {s.module for s in line.sites.values()} == {"scaled", "plain"}
    assert line.said() == []
    watch.detach()
    _, watch = train(1, model=Model(), recipe="blockwise")
    assert {s.fqn: s.as_it_is for s in watch._table if s.operand == "input"} == {"plain": False, "scaled": True}


def test_what_replaces_a_linear_after_attach_is_observed(train, capsys) -> None:
    line, watch = train(0)
    model = watch._model
    for name in ("a", "b", "c"):
        old = getattr(model, name)
        made = ScriptFloat8Linear(old.in_features, old.out_features, bias=False)
        made.weight, made.bias = old.weight, old.bias
        setattr(model, name, made)
    for _ in range(4):
        model(torch.randn(96, 160)).backward()
        watch.step()
    said = capsys.readouterr().err
    assert said.count("3 Linears were replaced by canary ScriptFloat8Linear after attach: observed as they are") == 1
    assert {s.module for s in line.sites.values()} == {"a", "b", "c"}
    assert line.facts["replaced"] == "3 by canary ScriptFloat8Linear, observed"
    assert line.said() == []


def test_what_cannot_be_observed_any_more_is_named_once(train, capsys) -> None:
    line, watch = train(2)
    watch._model.b = nn.Sequential(nn.Linear(272, 144))
    for _ in range(130):
        watch._model(torch.randn(16, 160)).backward()
        watch.step()
    said = capsys.readouterr().err
    assert said.count("no longer observed: b (replaced after attach by torch Sequential)") == 1
    assert line.facts["gemm_flops_observed"] < 1
    assert line.facts["replaced"] == "b (replaced after attach by torch Sequential)"
