"""Products with a module's own parameters are observed, bit-identically, and each in the frame in which kernels tile it."""

from __future__ import annotations

import copy
import io
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.own_models import Attention, E, Experts, Fused, K, Moe, N, Small
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

import fp8watch
from fp8watch import recipe as recipes
from fp8watch.layers.expert_groups import ExpertGroups
from fp8watch.session.silent_sites import ALARM_AFTER_STEPS
from fp8watch_agent.record import ROW

WAYS = {
    **{f"{way}{'_t' if t else ''}": (lambda way=way, t=t: Moe(way=way, transposed=t))
       for way in ("grouped", "loop", "gathered", "gathered_turned", "dense") for t in (False, True)},
    "conv1d": Small, "fused": Fused, "attention": Attention,
}  # fmt: skip
SUMS = ["num_elements", "num_nonzero", "num_saturated", "num_underflow", "num_nan", "num_inf", "num_tiles",
        "num_zero_tiles", "num_sentinel_tiles", "amax_hist"]  # fmt: skip


def seeded(make):
    torch.manual_seed(0)
    return make()


def operands(recorder, step=1):
    """(module, operand, direction) -> row, of sites that are no probes."""
    return {key: row for key, row in recorder.step(step)[1].items() if key[1] != "output"}


@pytest.mark.parametrize("way", WAYS)
def test_observing_changes_no_number_and_detach_leaves_the_module_as_it_was(attach, train, way):
    alone, model = seeded(WAYS[way]), seeded(WAYS[way])
    classes, keys = [type(m) for m in model.modules()], list(model.state_dict())
    losses = train(alone)
    watch = attach(model, recipe="observe")
    assert train(model) == losses
    assert watch.summary()["internal_errors"] == {}
    assert list(model.state_dict()) == keys
    assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), model.parameters(), strict=True))
    facts = watch._recorder.session.facts
    assert facts["gemm_flops_observed"] == 1.0
    assert "silent" not in watch._recorder.facts
    watch.detach()
    assert [type(m) for m in model.modules()] == classes
    assert not any("_fp8watch" in name for m in model.modules() for name in m.__dict__)


@pytest.mark.parametrize("transposed", [False, True])
def test_the_ways_to_multiply_with_experts_say_the_same_of_them(attach, train, transposed):
    found = {}
    for way in ("grouped", "loop", "gathered", "gathered_turned"):
        watch = attach(seeded(lambda way=way: Moe(way=way, transposed=transposed)), recipe="observe")
        train(watch._model, steps=1)
        found[way] = operands(watch._recorder, 0)
    sites = {key for key in found["grouped"] if key[0].startswith("experts.")}
    assert len(sites) == 10
    for way, rows in found.items():
        for key in sites:
            for name in SUMS:
                mine, other = rows[key][name], found["grouped"][key][name]
                if "underflow" in name or "nonzero" in name or name == "amax_hist":
                    assert np.abs(mine.astype(float) - other).sum() <= 4, (way, key, name)
                else:
                    assert np.array_equal(mine, other), (way, key, name)
            assert rows[key]["amax_max"] == pytest.approx(float(found["grouped"][key]["amax_max"]), rel=1e-5)


def expected(parts, block=(1, 128)):
    """Sums and extremes over the experts, each quantised by itself."""
    found = [fp8watch.quantize_blockwise(x.contiguous(), block, backend="reference").stats.summary() for x in parts]
    sums = {name: sum(np.asarray(f[name], dtype=np.int64) for f in found) for name in SUMS}
    return sums, max(f["amax_max"] for f in found), min(f["scale_inv_min"] for f in found)


class Kept(Experts):
    """Remembers what its products read and gave."""

    def product(self, x, w, ids, ends):
        y = super().product(x, w, ids, ends)
        if y.requires_grad:
            y.retain_grad()
        self.seen = [*getattr(self, "seen", []), (x.detach(), w.detach().clone(), ends, y)]
        return y


@pytest.mark.parametrize("recipe", ["observe", "blockwise"])
@pytest.mark.parametrize(("transposed", "tail"), [(False, 0), (True, 0), (False, 5)])
def test_each_expert_has_tiles_of_its_own_and_rows_of_nobody_count_nowhere(attach, transposed, tail, recipe):
    model = Moe(transposed=transposed)
    model.experts = Kept(transposed=transposed, tail=tail)
    watch = attach(model, recipe=recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.tensor([0] * 131 + [2] * 7 + [1] * 60)
    model(torch.randn(len(ids), K), ids).backward()
    seen, rows = model.experts.seen, None
    optimizer.step()
    rows = operands(watch._recorder, 0)
    assert watch.summary()["internal_errors"] == {}
    for name, (x, w, ends, y) in zip(("up", "down"), seen, strict=True):
        starts = [0, *ends.tolist()]
        for operand, values in (("input", x), ("grad_output", y.grad)):
            if operand == "grad_output" and name == "up" and tail:
                continue  # the gradient of what was cut off is what the model makes of it
            parts = [values[a:b] for a, b in pairwise(starts) if a < b]
            for direction, turn in (("rowwise", lambda p: p), ("columnwise", lambda p: p.t())):
                row = rows[f"experts.{name}", operand, direction]
                sums, amax, scale_inv = expected([turn(p) for p in parts])
                assert {n: row[n].tolist() for n in SUMS} == {n: np.asarray(v).tolist() for n, v in sums.items()}
                assert float(row["amax_max"]) == amax
                assert float(row["scale_inv_min"]) == scale_inv
        sums, amax, _ = expected(list(w), (128, 128))
        row = rows[f"experts.{name}", "weight", "rowwise"]
        assert {n: row[n].tolist() for n in SUMS} == {n: np.asarray(v).tolist() for n, v in sums.items()}


def test_where_nothing_may_be_read_back_the_counts_are_the_same(attach, train, monkeypatch):
    def rows_with(known):
        if not known:
            monkeypatch.setattr(ExpertGroups, "_num_valid", None)
        watch = attach(seeded(lambda: Moe()), recipe="observe")
        train(watch._model, steps=1)
        assert watch.summary()["internal_errors"] == {}
        return operands(watch._recorder, 0)

    here, there = rows_with(known=True), rows_with(known=False)
    assert here.keys() == there.keys()
    places = {"worst_tile", "noise_tile", "order", "first_nonfinite", "scale_inv_max"}  # of a padded frame
    for key in here:
        for name in set(ROW.names) - places:
            assert np.array_equal(here[key][name], there[key][name]), (key, name)


@pytest.mark.parametrize("recipe", ["observe", "blockwise"])
@pytest.mark.parametrize("way", ["grouped", "loop", "gathered", "dense"])
def test_an_inf_in_an_expert_is_named_with_the_expert_and_its_element(attach, way, recipe):
    model = Moe(way=way)
    watch = attach(model, recipe=recipe)
    with torch.no_grad():
        model.experts.down[2, 5, 7] = float("inf")
    model(torch.randn(40, K)).backward()
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    logs, row = watch._recorder.steps[0][3], operands(watch._recorder, 0)["experts.down", "weight", "rowwise"]
    assert logs["nonfinite_expert/experts.down.weight.rowwise"] == 2
    assert logs["nonfinite_expert_row/experts.down.weight.rowwise"] == 5
    assert row["first_nonfinite"][:2].tolist() == [2 * 128 + 5, 7]  # K = 64 rows an expert, padded to whole tiles
    assert int(row["num_inf"]) == 1
    assert watch._recorder.session.facts["experts"] == "experts.up (4); experts.down (4)"


@pytest.mark.parametrize("recipe", ["observe", "blockwise"])
@pytest.mark.parametrize("way", ["grouped", "loop", "gathered"])
def test_a_nan_that_an_expert_reads_is_named_with_the_expert_and_its_token(attach, way, recipe):
    model = Moe(way=way)
    watch = attach(model, recipe=recipe)
    ids = torch.tensor([0, 0, 3, 1, 1, 1])
    x = torch.randn(6, K)
    x[3] = float("nan")
    model.first = nn.Identity()
    model(x, ids).backward()
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    logs = watch._recorder.steps[0][3]
    for direction in ("rowwise", "columnwise"):
        assert logs[f"nonfinite_expert/experts.up.input.{direction}"] == 1
        assert logs[f"nonfinite_expert_row/experts.up.input.{direction}"] == (2 if way == "gathered" else 0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpointing_computes_again_counts_once(attach, train, reentrant):
    class Checkpointed(Moe):
        def forward(self, x):
            ids = torch.arange(len(x)) % 3
            y = checkpoint(lambda y: self.experts(self.first(y), ids), x.requires_grad_(), use_reentrant=reentrant)
            return self.last(y).pow(2).mean()

    class Plain(Moe):
        def forward(self, x):
            return super().forward(x, torch.arange(len(x)) % 3)

    rows = []
    for make in (Plain, Checkpointed):
        watch = attach(seeded(make), recipe="observe")
        losses = train(watch._model, steps=2)
        rows.append((losses, operands(watch._recorder, 1)))
    (plain, expected_rows), (again, found) = rows
    assert again == plain
    for key, row in expected_rows.items():
        for name in SUMS:
            assert np.array_equal(row[name], found[key][name]), (key, name)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch traces its own
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_what_is_compiled_inside_is_compiled_once_and_seen_around(attach, train):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.q = nn.Linear(K, K)

        def forward(self, x):
            return torch.relu(self.q(x))

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(K, K) * 0.1)
            self.inner = Inner()

        def forward(self, x):
            return self.inner(F.linear(x, self.w)).pow(2).mean()

    graphs = []
    for watched in (False, True):
        torch._dynamo.reset()
        model = seeded(Around)
        count = CompileCounter()
        model.inner.compile(backend=count, fullgraph=True)
        watch = attach(model, recipe="observe") if watched else None
        graphs.append((train(model, steps=3), count.frame_count))
    assert graphs[0] == graphs[1]
    assert watch.summary()["internal_errors"] == {}
    assert {m for m, *_ in operands(watch._recorder)} == {"w", "inner.q"}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_compiled_it_computes_as_ever_and_says_that_it_is_not_seen(attach, train, capsys):
    losses = train(seeded(Small), steps=2)
    model = seeded(Small)
    watch = attach(model, recipe="observe")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert train(compiled, steps=2) == pytest.approx(losses, rel=1e-6)
    assert watch.summary()["internal_errors"] == {}
    silent = watch._recorder.facts["silent"]
    assert silent.startswith("up (not called in eager code: inside torch.compile ")
    assert "not observed: up (not called in eager code" in capsys.readouterr().err


def test_a_copy_and_a_pickle_are_plain(attach, train):
    model = seeded(Moe)
    watch = attach(model, recipe="observe")
    buffer = io.BytesIO()
    torch.save(model, buffer)
    assert b"fp8watch" not in buffer.getvalue()
    twin = copy.deepcopy(model)
    assert type(twin.experts) is Experts
    assert set(twin.experts.__dict__) == set(Moe().experts.__dict__)
    train(twin, steps=1)
    assert watch.summary()["num_steps"] == 0


def test_where_linears_compute_in_fp8_what_is_no_expert_stays_as_it_is_and_is_observed(attach, train, capsys):
    watch = attach(seeded(lambda: nn.Sequential(nn.Linear(K, K), Small())), recipe="blockwise")
    train(watch._model, steps=2)
    assert "2 parameters observed where their modules multiply with them" in capsys.readouterr().err
    recipes = {s.module: s.recipe for s in watch._recorder.sites if s.recipe != "probe"}
    assert recipes == {"0": "blockwise", "1.up": "observe", "1.down": "observe"}


@pytest.mark.parametrize("kind", ["current", "delayed", "mxfp8", "nvfp4"])
def test_other_recipes_observe_them_too(attach, train, kind):
    alone = train(seeded(lambda: Moe(transposed=True)), steps=2)
    recipe = getattr(recipes, kind)(observe_only=True)
    watch = attach(seeded(lambda: Moe(transposed=True)), recipe=recipe)
    assert train(watch._model, steps=2) == alone
    assert watch.summary()["internal_errors"] == {}
    sites = {(m, o, d) for m, o, d in operands(watch._recorder) if m.startswith("experts.")}
    assert len(sites) == 2 * {"mxfp8": 6, "nvfp4": 5}.get(kind, 3)
    tiles = {s.tile for s in watch._recorder.sites if s.module == "experts.up" and s.operand == "weight"}
    assert tiles == {"mxfp8": {(1, 32), (32, 1)}, "nvfp4": {(16, 16)}}.get(kind, {(E * K, N)})


def test_a_parameter_whose_product_is_not_recognised_leaves_the_observed_with_its_reason(attach, train, capsys):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.q = nn.Linear(K, K)
            self.w = nn.Parameter(torch.randn(K, K) * 0.1)
            self.idle = nn.Parameter(torch.randn(K, K))

        def forward(self, x):
            return torch.einsum("ij,kj->ik", self.q(x), self.w).pow(2).mean()

    watch = attach(Odd(), recipe="observe")
    assert watch._recorder.session.facts["gemm_flops_observed"] == 1.0
    train(watch._model, steps=2)
    facts = watch._recorder.facts
    assert facts["silent"] == (
        "w (read by einsum, whose product is not recognised); idle (no product with it was recognised)"
    )
    assert facts["gemm_flops_observed"] == pytest.approx(1 / 3, abs=1e-3)
    assert facts["silent_share"] == "67 % of the GEMM FLOPs were announced as observed and send nothing"
    assert facts["silent_share"] in capsys.readouterr().err
    assert facts["blind"] == f"{facts['silent_share']}: {facts['silent'].replace('; ', ', ')}"  # nothing to wait for


def test_what_comes_later_is_observed_again(attach, train):
    model = nn.ModuleDict({"a": nn.Linear(K, K), "b": nn.Linear(K, K)})
    watch = attach(model, recipe="observe")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for used in ("a", "b"):
        model[used](torch.randn(8, K)).sum().backward()
        optimizer.step()
        assert watch._recorder.facts["not_called"] == ("b" if used == "a" else "")
        assert watch._recorder.facts["gemm_flops_observed"] == (0.5 if used == "a" else 1.0)


def test_much_that_is_not_called_is_told_for_good_after_some_steps_and_untold_when_it_comes(attach, capsys):
    model = nn.ModuleDict({"a": nn.Linear(K, K), "b": nn.Linear(K, K)})
    watch = attach(model, recipe="observe", overhead_budget=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(ALARM_AFTER_STEPS + 2):
        model["b" if step > ALARM_AFTER_STEPS else "a"](torch.randn(8, K)).sum().backward()
        optimizer.step()
        if not step:
            assert "announced as observed and sent nothing in the first step" in capsys.readouterr().err
        blind = watch._recorder.facts.get("blind", "")
        assert bool(blind) == (step in (ALARM_AFTER_STEPS - 1, ALARM_AFTER_STEPS))
        if blind:
            assert blind == "50 % of the GEMM FLOPs were announced as observed and send nothing: not called: b"


def test_routers_heads_and_convolutions_are_left_to_themselves(attach):
    class Router(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(E, K))

    model = nn.ModuleDict({"gate": Router(), "conv": nn.Conv1d(K, K, 3), "lstm": nn.LSTM(K, K), "q": nn.Linear(K, K)})
    watch = attach(model, recipe="observe")
    assert {s.fqn for s in watch._table} == {"q"} | {s.fqn for s in watch._table if s.operand == "output"}


def test_an_error_of_the_forward_passes_and_nothing_is_left_behind(attach):
    model = Moe()
    watch = attach(model, recipe="observe")
    with pytest.raises(IndexError, match="planted"):
        model.experts.product = lambda *_: (_ for _ in ()).throw(IndexError("planted"))
        model(torch.randn(8, K))
    del model.experts.product
    assert torch.overrides._get_current_function_mode_stack() == []
    assert watch.summary()["internal_errors"] == {}


def test_weights_are_hashed_in_steps_in_which_nothing_else_of_them_is_looked_at(attach, train):
    watch = attach(seeded(Moe), recipe="observe", hash_every=1, overhead_budget=None)  # light_every is set here
    watch._overhead.light_every = 4
    train(watch._model, steps=5)
    steps = [operands(watch._recorder, step) for step in range(1, 5)]
    assert sum(("experts.up", "input", "rowwise") in rows for rows in steps) == 1
    hashes = [int(rows["experts.up", "weight", "rowwise"]["weight_hash"]) for rows in steps]
    assert len(set(hashes)) == 4


class OwnBackward(torch.autograd.Function):
    """A product as Megatron's tensor-parallel linears make it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return torch.matmul(x, weight.t())

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class Parallel(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(K, K) * 0.1)

    def forward(self, x):
        return OwnBackward.apply(x, self.weight).pow(2).mean()


def test_where_every_product_has_a_backward_of_its_own_steps_end_and_gradients_are_said_to_be_unseen(
    attach, train, capsys
):
    alone = train(seeded(Parallel), steps=3)
    watch = attach(seeded(Parallel), recipe="observe")
    assert train(watch._model, steps=3) == alone
    assert [int(h["step"]) for h, *_ in watch._recorder.steps] == [0, 1, 2]
    assert {key[1] for key in operands(watch._recorder)} == {"input", "weight"}
    assert "gradients are not" in watch._recorder.facts["silent"]
    assert "not observed: weight (its forward is observed" in capsys.readouterr().err
