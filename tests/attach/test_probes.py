"""Outputs of modules that are no GEMM: norms, attention, and what the user names."""

from __future__ import annotations

import copy
import io
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fp8watch.kernels.cpu import largest_magnitude
from fp8watch.observer.probes import probe_numbers, probe_stats
from fp8watch.sketch.slab import Slab
from fp8watch_agent.record import FIELDS, Measured


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class CausalSelfAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.qkv, self.proj, self.softmax = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), nn.Softmax(-1)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.proj(self.softmax(scores.masked_fill(mask, -math.inf)) @ v), None


class Block(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.norm, self.attn, self.ln_f, self.mlp = (
            RMSNorm(dim),
            CausalSelfAttention(dim),
            nn.LayerNorm(dim),
            nn.Linear(dim, dim),
        )

    def forward(self, x):
        x = x + self.attn(self.norm(x))[0]
        return self.mlp(self.ln_f(x)).square().mean()


@pytest.fixture
def block():
    torch.manual_seed(0)
    return Block()


def x(bad=None):
    out = torch.randn(2, 16, 32)
    if bad is not None:
        out[1, 3, 5] = bad
    return out


def test_norms_and_attention_are_probed_and_an_unseen_error_place_is_named(attach, block):
    watch = attach(block)
    block(x()).backward()
    watch.step()
    sites = {s.module: s for s in watch._recorder.sites if s.operand == "output"}
    assert set(sites) == {"norm", "attn", "ln_f"}
    assert {(s.gemm, s.recipe, s.shape, s.tile) for s in sites.values()} == {("probe", "probe", (32, 32), (32, 32))}
    _, rows = watch._recorder.step(0)
    row = rows["ln_f", "output", "rowwise"]
    assert int(row["measured"]) == Measured.COUNTS | Measured.AMAX | Measured.ENERGIES
    assert int(row["num_elements"]) == 1024
    assert math.sqrt(float(row["signal_energy"]) / 1024) == pytest.approx(1, rel=0.01)  # the RMS of a LayerNorm
    order = [(m, o) for (m, o, d), r in sorted(rows.items(), key=lambda i: int(i[1]["order"])) if d == "rowwise"]
    assert order.index(("norm", "output")) < order.index(("attn.qkv", "input")) < order.index(("attn", "output"))
    assert order.index(("attn", "output")) < order.index(("ln_f", "output")) < order.index(("mlp", "input"))


def test_a_nan_born_in_a_norm_is_seen_there_first(attach, block):
    watch = attach(block)
    block.norm.weight.data[7] = math.nan
    block(x()).backward()
    watch.step()
    _, rows = watch._recorder.step(0)
    broken = sorted((r for r in rows.items() if r[1]["num_nan"]), key=lambda i: int(i[1]["order"]))
    site, row = broken[0]
    assert site == ("norm", "output", "rowwise")
    assert (int(row["num_nan"]), list(row["first_nonfinite"][:2])) == (32, [0, 7])


def test_any_module_is_probed_by_name_or_pattern(attach, block):
    watch = attach(block, probes=["ml*", "attn.proj"])
    block(x()).backward()
    watch.step()
    assert {(s.module, s.gemm) for s in watch._recorder.sites if s.operand == "output"} == {
        ("mlp", "fprop"),
        ("attn.proj", "fprop"),
    }


@pytest.mark.parametrize(
    ("probes", "error", "text"),
    [("norms", TypeError, "must be a list"), (["nowhere"], ValueError, "no module is called 'nowhere'")],
)
def test_what_cannot_be_probed_is_refused(attach, block, probes, error, text):
    with pytest.raises(error, match=text):
        attach(block, probes=probes)


def test_attention_logits_are_seen_where_a_softmax_reads_them(attach, block):
    watch = attach(block)
    largest = []
    block.attn.softmax.register_forward_pre_hook(lambda m, args: largest.append(float(args[0].detach().max())))
    for _ in range(2):
        block(x()).backward()
    watch.step()
    logs = watch._recorder.steps[0][3]
    assert logs["max_attention_logit/attn"] == pytest.approx(max(largest))


@pytest.mark.parametrize("recipe", ["blockwise", "observe"])
def test_probes_change_no_number_and_leave_with_the_watch(attach, block, recipe):
    twin = copy.deepcopy(block)
    watch, other = attach(block, recipe=recipe), attach(twin, recipe=recipe, probes=[])
    for model in (block, twin):
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            model(x()).backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(block.parameters(), twin.parameters(), strict=True))
    assert {s.operand for s in other._recorder.sites} == {"input", "weight", "grad_output"}
    assert not watch.guard.errors
    watch.detach()
    assert not block.norm._forward_hooks
    assert not block.attn.softmax._forward_hooks


def test_evaluation_and_recomputation_are_not_counted(attach, block):
    watch = attach(block)
    block.eval()
    block(x())
    block.train()
    torch.utils.checkpoint.checkpoint(block, x().requires_grad_(), use_reentrant=False).backward()
    watch.step()
    _, rows = watch._recorder.step(0)
    assert {int(r["num_calls"]) for (_, o, _), r in rows.items() if o == "output"} == {1}


def test_copies_and_pickles_of_a_probed_model_report_to_nobody(attach, block):
    watch = attach(block)
    twin = copy.deepcopy(block)
    file = io.BytesIO()
    torch.save(block, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for model in (twin, loaded):
        model(x()).backward()
    block(x()).backward()
    watch.step()
    _, rows = watch._recorder.step(0)
    assert {int(r["num_calls"]) for r in rows.values()} == {1}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch traces its own
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("compiler", ["aot_eager"])
def test_a_compiled_model_is_probed(attach, block, compiler):
    watch = attach(block)
    compiled = torch.compile(block, backend=compiler, fullgraph=False)
    for _ in range(2):
        compiled(x()).backward()
        watch.step()
    _, rows = watch._recorder.step(1)
    assert {m for m, o, _ in rows if o == "output"} == {"norm", "attn", "ln_f"}
    assert not watch.guard.errors


values = st.sampled_from([0.0, 1.0, -2.5, 3e38, 1e-40, math.nan, math.inf, -math.inf])


@settings(max_examples=120, deadline=None)
@given(
    st.lists(values, min_size=6, max_size=6),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([1, 50]),
)
def test_the_look_on_the_cpu_is_the_look_on_a_device(numbers, heavy, dtype, times):
    """Three ways to one row: one pass of the C library, numbers, and tensors that are never read."""
    y = torch.tensor(numbers).to(dtype).view(2, 3).repeat(1, times)
    slabs = one, other, library = Slab(1), Slab(1), Slab(1)
    for order in (4, 7):
        one.accumulate_probe(0, probe_numbers(y, heavy=heavy), order)
        other.accumulate(0, probe_stats(y, heavy=heavy), order)
        if not library.look(0, y, order, energy=heavy):
            assert not y.isfinite().all()
            library.accumulate_probe(0, probe_numbers(y, heavy=heavy), order)
    a, b, c = (slab.copy_rows()[0] for slab in slabs)
    for name in ("num_elements", "num_nan", "num_inf", "num_tiles", "num_calls", "num_zero_tiles", "num_sentinel_tiles",
                 "amax_max", "amax_min_nonzero", "amax_hist", "first_nonfinite", "order", "measured", "worst_tile"):  # fmt: skip
        assert np.array_equal(a[name], b[name]), name
        assert np.array_equal(a[name], c[name]), name
    assert float(a["signal_energy"]) == pytest.approx(float(b["signal_energy"]), rel=1e-5)
    assert float(a["signal_energy"]) == pytest.approx(float(c["signal_energy"]), rel=1e-5)
    assert {f.name for f in FIELDS if not np.array_equal(a[f.name], c[f.name], equal_nan=True)} <= {"signal_energy"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num", [1, 3, 63, 64, 65, 1000])
def test_the_largest_magnitude_is_that_of_torch(dtype, num):
    y = torch.randn(num, dtype=torch.float64).to(dtype)
    assert largest_magnitude(y) == float(y.abs().max())
    assert largest_magnitude(torch.stack((y, y), 1)[:, 0]) == float(y.abs().max())
    y[-1] = -math.inf
    assert largest_magnitude(y) == math.inf
    y[0] = math.nan
    assert math.isnan(largest_magnitude(y))


class Wrapper(torch.Tensor):
    """A subclass that has no memory of its own, as DTensor has none: data_ptr() says 0."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*(a.inner if isinstance(a, Wrapper) else a for a in args), **(kwargs or {}))


def test_a_tensor_without_memory_of_its_own_is_left_to_torch():
    inner, slab = torch.tensor([1.0, -3.0, 2.0]), Slab(1)
    assert not slab.look(0, Wrapper(inner), 0, energy=False)
    assert largest_magnitude(Wrapper(inner)) == 3.0


def test_a_large_output_is_counted_in_some_rows_and_looked_at_as_a_whole():
    """On a GPU: no more than so many elements are counted, and nothing that is not finite is missed."""
    y = torch.randn(40, 8)
    y[3, 5] = 9.0  # rows 0, 4, 8 … are counted
    row = accumulated(probe_stats(y, heavy=True, max_counted=80))
    assert (row["num_elements"], row["num_nan"], row["num_inf"]) == (80, 0, 0)
    assert (row["amax_max"], tuple(row["first_nonfinite"])) == (9.0, (-1, -1, -1))
    assert row["signal_energy"] == pytest.approx(float(y[::4].double().square().sum()))
    y[5, 2] = math.inf
    row = accumulated(probe_stats(y, heavy=False, max_counted=80))
    assert (row["num_inf"], row["amax_max"], tuple(row["first_nonfinite"])) == (1, math.inf, (-1, -1, -1))
    y[5, 3], y[8, 1] = math.nan, math.nan
    row = accumulated(probe_stats(y, heavy=False, max_counted=80))
    assert (row["num_nan"], tuple(row["first_nonfinite"][:2])) == (1, (8, 1))
    y[8, 1] = 0.0
    assert accumulated(probe_stats(y, heavy=False, max_counted=80))["num_nan"] == 1


def accumulated(stats):
    slab = Slab(1)
    slab.accumulate(0, stats, 0)
    return slab.copy_rows()[0]


class Tagger(nn.Module):
    """An embedding, one Linear in FP8, and a head that stays in high precision."""

    def __init__(self):
        super().__init__()
        self.embed, self.up, self.lm_head = nn.Embedding(40, 32), nn.Linear(32, 32), nn.Linear(32, 40)

    def forward(self, tokens):
        return self.lm_head(self.up(self.embed(tokens)))


@pytest.mark.parametrize("recipe", ["blockwise", "observe"])
def test_what_stays_in_high_precision_is_looked_at_by_default(attach, recipe):
    model, tokens = Tagger(), torch.randint(0, 40, (16,))
    watch = attach(model, recipe=recipe)
    loss = model(tokens).square().mean()
    loss.backward()
    watch.step()
    rows = watch._recorder.step(0)[1]
    probed = {module: row for (module, operand, _), row in rows.items() if operand == "output"}
    assert set(probed) == {"embed", "lm_head"}
    assert probed["embed"]["amax_max"] == float(model.embed.weight.detach()[tokens].abs().max())
    assert {m for m, operand, _ in rows if operand != "output"} == {"up", "lm_head"}
    (given,) = [(key, row) for key, row in rows.items() if key[0] == "lm_head" and key[1] != "output"]
    assert given[0] == ("lm_head", "input", "rowwise")
    assert float(given[1]["amax_max"]) == pytest.approx(
        float(model.up(model.embed(tokens)).detach().abs().max()), rel=0.1
    )
    site = next(s for s in watch._recorder.sites if (s.module, s.operand) == ("lm_head", "input"))
    assert (site.recipe, site.format, site.gemm, site.shape) == ("probe", "", "probe", (16, 32))

    with torch.no_grad():
        model.lm_head.bias[3] = float("inf")
    model(tokens).sum()
    model.up.weight.sum().backward()
    watch.step()
    (found,) = [r for (m, o, _), r in watch._recorder.step(1)[1].items() if (m, o) == ("lm_head", "output")]
    assert (found["num_inf"], tuple(found["first_nonfinite"][:2])) == (16, (0, 3))


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [("lm_head.input", {("lm_head", "input")}), ("lm_head.output", {("lm_head", "output")})],
)
def test_what_a_head_is_given_is_a_site_of_its_own(attach, pattern, wanted):
    model, tokens = Tagger(), torch.randint(0, 40, (16,))
    watch = attach(model, sites=[pattern])
    model(tokens).square().mean().backward()
    watch.step()
    assert {(module, operand) for module, operand, _ in watch._recorder.step(0)[1]} == wanted


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_what_a_head_is_given_is_looked_at_in_a_graph(attach):
    model, tokens = Tagger(), torch.randint(0, 40, (16,))
    watch = attach(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=False)
    compiled(tokens).square().mean().backward()
    watch.step()
    row = watch._recorder.step(0)[1]["lm_head", "input", "rowwise"]
    assert (int(row["num_elements"]), int(row["num_calls"])) == (16 * 32, 1)
    assert not watch.guard.errors


class TopKRouter(nn.Module):
    """Chooses among experts with a weight of its own; returns logits and choices, as those of transformers do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 32) * 0.1)

    def forward(self, x):
        logits = F.linear(x, self.weight)
        return logits, logits.topk(2).indices


def test_a_router_with_a_weight_of_its_own_is_looked_at_too(attach):
    model = nn.ModuleDict({"up": nn.Linear(32, 32), "choice": TopKRouter()})
    watch = attach(model, recipe="observe")
    x = model["up"](torch.randn(16, 32))
    logits, _ = model["choice"](x)
    logits.square().mean().backward()
    watch.step()
    rows = watch._recorder.step(0)[1]
    row = rows["choice", "output", "rowwise"]
    assert (int(row["num_elements"]), float(row["amax_max"])) == (64, float(logits.detach().abs().max()))
    assert float(rows["choice", "input", "rowwise"]["amax_max"]) == float(x.detach().abs().max())


def test_layers_in_high_precision_can_be_left_alone(attach):
    watch = attach(Tagger(), probes=["norms"])
    assert {site.operand for site in watch._table} == {"input", "weight", "grad_output"}


class Headed(nn.Module):
    """A body in FP8, and a head that stays in high precision; something between them may break."""

    def __init__(self):
        super().__init__()
        self.body, self.lm_head, self.breaks = nn.Linear(32, 32), nn.Linear(32, 64), None

    def forward(self, x):
        y = self.body(x)
        if self.breaks == "input":
            y = y.masked_fill(torch.arange(32) == 3, math.nan)
        out = self.lm_head(y)
        return (out.masked_fill(torch.arange(64) == 3, math.nan) if self.breaks == "behind" else out).square().mean()


@pytest.mark.parametrize(("breaks", "told"), [(None, None), ("input", 32.0), ("behind", None), ("weight", None)])
def test_a_head_says_whether_what_broke_came_in(attach, breaks, told):
    model = Headed()
    watch = attach(model)
    for step in range(3):
        model.breaks = breaks if step == 1 else None
        if step == 1 and breaks == "weight":
            with torch.no_grad():
                model.lm_head.weight[3, 3] = math.nan
        model(x()).backward()
        watch.step()
        logs = watch._recorder.steps[step][3]
        assert logs.get("nonfinite_input/lm_head") == (told if step == 1 else None)


class BaseTunerLayer:
    """As peft's: its module hands the call on to what it holds, whose name it has."""

    __module__ = "peft.tuners.tuners_utils"


class Adapter(nn.Linear, BaseTunerLayer):
    def __init__(self) -> None:
        super().__init__(64, 64)
        self.base_layer = nn.Linear(64, 64)

    def forward(self, x):
        return self.base_layer(x) + x @ (self.weight * 0.1)


def test_an_adapter_that_is_a_linear_itself_takes_no_site_of_what_it_holds(attach):
    model = nn.Sequential(Adapter(), nn.Tanh(), Adapter())
    watch = attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()
    sites = [key for key in watch._recorder.step(-1)[1] if key[0] == "0"]
    assert {operand for _, operand, _ in sites} == {"input", "weight", "grad_output"}, "and no probe under its name"
    assert not any(site.probed for site in watch._table if site.fqn in ("0", "2"))
