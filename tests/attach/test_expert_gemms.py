"""Experts in one 3-D parameter compute in FP8, to the bit as a loop over experts whose Linears do, and training holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.own_models import E, Experts, K, Moe, N
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8watch.layers.expert_groups import ExpertGroups

GATHERED = ("gathered", "gathered_turned")
WAYS = ("grouped", "loop", *GATHERED, "dense")
UNEVEN = torch.tensor([0] * 131 + [2] * 7 + [1] * 60)  # the last expert has no tokens


class Loop(nn.Module):
    """The same experts as Linears, one by one: what the FP8 path of Linears makes of them."""

    def __init__(self, experts):
        super().__init__()
        self.flips = experts.way in GATHERED  # tokens of an expert come in the other order
        self.up, self.down = (
            nn.ModuleList(linear(w.t() if experts.transposed else w) for w in p.detach())
            for p in (experts.up, experts.down)
        )

    def forward(self, x, ids):
        ids, order = ids.sort()
        out = []
        for e in range(E):
            mine = x[order][ids == e]
            if len(mine):
                y = self.down[e](torch.relu(self.up[e](mine.flip(0) if self.flips else mine)))
                out.append(y.flip(0) if self.flips else y)
        return torch.cat(out)

    def grads(self, of, transposed):
        found = [torch.zeros_like(m.weight) if m.weight.grad is None else m.weight.grad for m in getattr(self, of)]
        return torch.stack(found).mT if transposed else torch.stack(found)


def linear(weight):
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    made.weight.data = weight.clone().contiguous()
    return made


def seeded(make):
    torch.manual_seed(0)
    return make()


def passed(model, x, ids, flips=False):
    """y, and the gradient of x, of one pass."""
    x = x.clone().requires_grad_()
    y = model(x, ids)
    y = y.flip(0) if flips else y
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype))
    return y.detach(), x.grad


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("kind", ["blockwise", "mxfp8"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_experts_compute_what_a_loop_of_linears_in_fp8_computes(attach, way, transposed, kind, backend):
    experts = seeded(lambda: Experts(way=way, transposed=transposed))
    loop = Loop(experts)
    ids = torch.arange(200) % E if way == "dense" else UNEVEN
    x = torch.randn(len(ids), K)
    for model in (experts, loop):
        attach(model, recipe=kind, backend=backend)
    expected = passed(loop, x, ids)
    found = passed(experts, x, ids, flips=way in GATHERED)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(experts.up.grad, loop.grads("up", transposed))
    assert torch.equal(experts.down.grad, loop.grads("down", transposed))
    plain = passed(seeded(lambda: Experts(way=way, transposed=transposed)), x, ids, flips=way in GATHERED)
    assert not torch.equal(found[0], plain[0])
    assert torch.allclose(found[0], plain[0], atol=0.1 * float(plain[0].abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_under_autocast_weights_are_quantised_from_their_own_precision(attach, dtype):
    experts = seeded(lambda: Experts(way="loop"))
    loop = Loop(experts)
    x = torch.randn(len(UNEVEN), K, dtype=dtype).float()
    for model in (experts, loop):
        attach(model, recipe="blockwise")
    found = []
    for model in (loop, experts):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found.append(passed(model, x, UNEVEN))
    assert found[0][0].dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert torch.equal(experts.up.grad, loop.grads("up", False))

    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Parameter(experts.up.detach().clone())

        def forward(self, x):
            return F.linear(x, self.up[1].to(x.dtype))

    model = nn.ModuleDict({"experts": Cast()})
    attach(model, recipe="blockwise")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = loop.up[1](x)
    assert torch.equal(model["experts"](x.bfloat16()), expected)


def test_rows_of_nobody_are_neither_read_nor_computed(attach):
    experts, alone = (seeded(lambda tail=tail: Experts(tail=tail)) for tail in (5, 0))
    calls = []
    product = experts.product
    experts.product = lambda x, w, ids, ends: calls.append((x, product(x, w, ids, ends))) or calls[-1][1]
    for model in (experts, alone):
        attach(model, recipe="blockwise")
    x = torch.randn(len(UNEVEN), K)
    assert all(torch.equal(a, b) for a, b in zip(passed(experts, x, UNEVEN), passed(alone, x, UNEVEN), strict=True))
    assert torch.equal(experts.down.grad, alone.down.grad)
    grouped = nn.Parameter(torch.randn(E, N, K))

    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts_up = grouped

        def forward(self, x, ends):
            return F.grouped_mm(x, self.experts_up.mT, offs=ends)

    model = Bare()
    attach(nn.ModuleDict({"experts": model}), recipe="blockwise")
    x = torch.full((40, K), float("nan"))
    x[:32] = torch.randn(32, K)
    x.requires_grad_()
    y = model(x, torch.tensor([8, 8, 30, 32], dtype=torch.int32))
    assert bool(y.isfinite().all())
    assert int(y[32:].count_nonzero()) == 0
    y.sum().backward()
    assert int(x.grad[32:].count_nonzero()) == 0
    assert bool(grouped.grad.isfinite().all())
    assert int(grouped.grad[1].count_nonzero()) == 0
    for end in (0, 8):
        assert model(x[:end].detach(), torch.tensor([0, 0, 0, end])).shape == (end, N)


def test_where_nothing_may_be_read_back_the_results_are_the_same(attach, train, monkeypatch):
    watch = attach(seeded(Moe), recipe="blockwise")
    losses = train(watch._model, steps=2)
    rows = watch._recorder.step(1)[1]
    monkeypatch.setattr(ExpertGroups, "_num_valid", None)
    watch = attach(seeded(Moe), recipe="blockwise")
    assert train(watch._model, steps=2) == losses
    for key, row in watch._recorder.step(1)[1].items():
        for name in ("num_elements", "num_nonzero", "num_tiles", "num_zero_tiles", "amax_max", "amax_hist"):
            assert np.array_equal(row[name], rows[key][name]), (key, name)


def test_statistics_of_the_operands_are_those_of_observing_them(attach):
    rows = []
    for recipe in ("observe", "blockwise"):
        model = seeded(lambda: nn.ModuleDict({"experts": Experts(transposed=True)}))
        watch = attach(model, recipe=recipe)
        y = model["experts"](torch.randn(len(UNEVEN), K), UNEVEN)
        y.backward(torch.linspace(0.1, 1.0, y.numel()).reshape(y.shape))
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        rows.append(watch._recorder.step(0)[1])
        assert watch.summary()["internal_errors"] == {}
    observed, computed = rows
    assert observed.keys() == computed.keys()
    same = [
        key
        for key in observed
        if key[1] == "weight" or key[:2] in (("experts.up", "input"), ("experts.down", "grad_output"))
    ]
    assert len(same) == 6
    checks = {"measured", "num_nan_codes", "num_off_grid", "num_checked_tiles", "num_zeroed_tiles", "num_wrong_scales"}
    checks |= {"fault_tile", "gemm_error", "gemm_gain_min", "gemm_gain_max", "output_num_nonfinite"}
    for key in same:
        for name in observed[key].dtype.names:
            if name not in {"order", "worst_tile", "noise_tile", "first_nonfinite", *checks}:
                assert np.array_equal(observed[key][name], computed[key][name]), (key, name)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_computes_the_same_and_counts_it_once(attach, train, reentrant):
    class Plain(Moe):
        def forward(self, x):
            return super().forward(x, torch.arange(len(x)) % 3)

    class Checkpointed(Moe):
        def forward(self, x):
            ids = torch.arange(len(x)) % 3
            y = checkpoint(lambda y: self.experts(self.first(y), ids), x.requires_grad_(), use_reentrant=reentrant)
            return self.last(y).pow(2).mean()

    found = []
    for make in (Plain, Checkpointed):
        watch = attach(seeded(make), recipe="blockwise")
        found.append((train(watch._model, steps=2), watch._recorder.step(1)[1]))
        assert watch.summary()["internal_errors"] == {}
    (losses, expected), (again, rows) = found
    assert again == losses
    for key, row in expected.items():
        for name in ("num_elements", "num_nonzero", "num_underflow", "num_tiles", "num_calls", "amax_hist"):
            if name in row.dtype.names:
                assert np.array_equal(row[name], rows[key][name]), (key, name)


def test_evaluation_computes_in_fp8_and_counts_nothing(attach):
    model = seeded(Moe)
    watch = attach(model, recipe="blockwise")
    x = torch.randn(40, K)
    trained = model(x)
    trained.backward()
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(x), trained)
    model.train()
    model(x).backward()
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    first, second = (watch._recorder.step(n)[1]["experts.up", "input", "rowwise"] for n in (0, 1))
    assert first["num_elements"] == second["num_elements"] == 40 * K


def test_what_cannot_follow_is_refused_in_words(attach):
    model = seeded(lambda: nn.ModuleDict({"experts": Experts()}))
    attach(model, recipe="blockwise")
    x, ids = torch.randn(9, K), torch.arange(9) % 3
    with pytest.raises(
        RuntimeError, match=r"transform of torch.func cannot follow; leave them in high precision by filter_fn"
    ):
        torch.func.grad(lambda x: model["experts"](x, ids).sum())(x)
    x.requires_grad_()
    (grad,) = torch.autograd.grad(model["experts"](x, ids).pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        grad.sum().backward()


def test_a_part_of_a_parameter_and_a_bias_are_multiplied_as_they_are(attach):
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up = nn.Parameter(torch.randn(E, K, 2 * N) * 0.1)
            self.bias = nn.Parameter(torch.randn(E, 1, N))

        def forward(self, x):
            return torch.baddbmm(self.bias, x, self.gate_up[..., :N]) * torch.bmm(x, self.gate_up[..., N:])

    experts = seeded(Halves)
    gate, up = ([linear(w[:, half].t()) for w in experts.gate_up.detach()] for half in (slice(N), slice(N, None)))
    model = nn.ModuleDict({"experts": experts})
    loop = nn.ModuleDict({"gate": nn.ModuleList(gate), "up": nn.ModuleList(up)})
    for e, m in enumerate(loop["gate"]):
        m.bias = nn.Parameter(experts.bias[e, 0].detach().clone())
    watch = attach(model, recipe="blockwise")
    attach(loop, recipe="blockwise")
    x = torch.randn(E, 33, K)
    y = experts(x)
    expected = torch.stack([loop["gate"][e](x[e]) * loop["up"][e](x[e]) for e in range(E)])
    assert torch.equal(y, expected)
    y.sum().backward()
    expected.sum().backward()
    found = torch.cat([torch.stack([m.weight.grad.t() for m in loop[of]]) for of in ("gate", "up")], dim=2)
    assert torch.equal(experts.gate_up.grad, found)
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    rows = watch._recorder.step(0)[1]
    assert int(rows["experts.gate_up", "weight", "rowwise"]["num_elements"]) == E * K * 2 * N  # once, whole
    assert watch.summary()["internal_errors"] == {}


@pytest.mark.parametrize("frozen", ["input", "weight"])
def test_a_gradient_that_nobody_asks_for_is_not_computed(attach, frozen):
    experts = seeded(Experts)
    watch = attach(nn.ModuleDict({"experts": experts}), recipe="blockwise")
    x = torch.randn(len(UNEVEN), K).requires_grad_(frozen == "weight")
    experts.up.requires_grad_(frozen == "input")
    experts(x, UNEVEN).sum().backward()
    assert (x.grad is None) == (frozen == "input")
    assert (experts.up.grad is None) == (frozen == "weight")
    torch.optim.SGD([experts.up, experts.down], lr=0.0).step()
    seen = {(operand, d) for m, operand, d in watch._recorder.step(0)[1] if m == "experts.up" and operand != "weight"}
    forward, columnwise = ("input", "rowwise"), {("input", "columnwise"), ("grad_output", "columnwise")}
    assert seen == {forward} | (columnwise if frozen == "input" else {("grad_output", "rowwise")})
