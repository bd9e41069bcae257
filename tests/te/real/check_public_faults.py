"""Kernels that broke their contract in public, rebuilt in Transformer Engine: attached at the defaults, each is named by its
mode in the first step in which its site is looked at."""

import importlib
import os
import sys

import pytest
import torch
from canary.conftest import Line
from check_observed import recipe_of

import fp8watch
import fp8watch.session.start as start_module

STEPS = int(os.environ.get("FP8WATCH_HEALTHY_STEPS", "40"))
"""Of a healthy run; `make healthy` runs 2,000."""
TOKENS, WIDTHS = 256, (128, 256, 384)  # each operand has a shape of its own
INPUT, GRADIENT = (TOKENS, WIDTHS[1]), (TOKENS, WIDTHS[2])  # of the module "1"
WEIGHT = (WIDTHS[2], WIDTHS[1])


def bytes_of(data):
    return data.view(torch.uint8)


def zeroed(data):
    """Every code 0 (3281 of this repository)."""
    return torch.zeros_like(data)


def without_strides(data):
    """Each element stored at row + column, as where the stride of a row is 1 (torchao 4900)."""
    out = torch.zeros_like(data).flatten()
    rows, columns = data.shape
    out[(torch.arange(rows)[:, None] + torch.arange(columns)).flatten()] = data.flatten()
    return out.view_as(data)


def sparse(data):
    """Bytes that a miscompiled store left, one in a thousand, none of them a NaN (torchao 4652)."""
    g = torch.Generator(data.device).manual_seed(1)
    other = torch.randint(0, 120, data.shape, generator=g, dtype=torch.uint8, device=data.device)
    return torch.where(torch.rand(data.shape, generator=g, device=data.device) < 1e-3, other, data)


def lattice(data):
    """Every fourth column is 0 (a later compiler, same store)."""
    return data.clone().index_fill_(1, torch.arange(0, data.shape[1], 4), 0)


def rounded_up(scale_inv):
    """Scales made powers of two, the codes left as they were (transformers 47030)."""
    return torch.exp2(torch.ceil(torch.log2(scale_inv)))


def exponents(scale_inv):
    """FP32 scales of which the exponent alone is read (sglang 39193)."""
    return torch.exp2(torch.floor(torch.log2(scale_inv)))


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Train for some steps, attached at the defaults; returns what the detectors said, (mode, severity, step, module,
    operand, direction)."""
    monkeypatch.setenv("FP8WATCH_SPOOL_DIR", str(tmp_path))
    monkeypatch.setattr(start_module, "Recorder", Line)
    made = []

    def train(te, model, recipe, call=lambda model, x: model(x), steps=3):
        watch = fp8watch.attach(model)
        made.append(watch)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(steps):
            x = torch.randn(TOKENS, WIDTHS[0], dtype=torch.bfloat16, requires_grad=True)
            with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
                y = call(model, x)
            optimizer.zero_grad()
            (y * torch.randn(y.shape)).float().square().mean().backward()
            optimizer.step()
        assert dict(watch.guard.errors) == {}
        return watch._recorder

    yield train
    for watch in made:
        watch.detach()


def two(te):
    options = {"bias": False, "params_dtype": torch.bfloat16}
    return torch.nn.Sequential(te.Linear(*WIDTHS[:2], **options), te.Linear(*WIDTHS[1:], **options))


def with_fp32_scales():
    recipes = importlib.import_module("transformer_engine.common.recipe")
    recipe = recipe_of("Float8BlockScaling")
    for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        setattr(recipe, name, recipes.QParams(power_2_scale=False, amax_epsilon=1e-12))
    return recipe


def break_quantiser(monkeypatch, shape, change):
    """change(tensor) of what is made of an operand of this shape."""
    extension = sys.modules["transformer_engine_torch"]
    right = extension.quantize

    def quantize(x, quantizer, *args, **kwargs):
        made = right(x, quantizer, *args, **kwargs)
        forward = torch._C._current_graph_task_id() == -1
        if tuple(x.shape) == shape and quantizer is not None and forward == (shape != GRADIENT):
            change(made)
        return made

    monkeypatch.setattr(extension, "quantize", quantize)


def codes(name, fault):
    def change(made):
        data = getattr(made, name)
        setattr(made, name, fault(bytes_of(data)).view(data.dtype))

    return change


def scales(fault):
    def change(made):
        made._rowwise_scale_inv = fault(made._rowwise_scale_inv)

    return change


QUANTISERS = {
    "codes of gradients are zero": (GRADIENT, codes("_rowwise_data", zeroed), "grad_output", "rowwise"),
    "codes at the wrong place": (INPUT, codes("_rowwise_data", without_strides), "input", "rowwise"),
    "bytes of a transposed copy": (INPUT, codes("_columnwise_data", sparse), "input", "columnwise"),
    "columns of a transposed copy": (INPUT, codes("_columnwise_data", lattice), "input", "columnwise"),
    "bytes of a weight's transposed copy": (WEIGHT, codes("_columnwise_data", sparse), "weight", "rowwise"),
    "a weight's transposed copy that nobody wrote": (WEIGHT, codes("_columnwise_data", zeroed), "weight", "rowwise"),
    "scales rounded up": (INPUT, scales(rounded_up), "input", "rowwise"),
}  # fmt: skip


@pytest.mark.parametrize("name", QUANTISERS)
def test_a_broken_quantiser_is_named_at_its_site(te, run, monkeypatch, name):
    shape, change, operand, direction = QUANTISERS[name]
    recipe = with_fp32_scales() if name == "scales rounded up" else recipe_of("Float8BlockScaling")
    break_quantiser(monkeypatch, shape, change)
    first = run(te, two(te), recipe).said()[0]
    assert first[2] <= 1  # the second module has its turn in the second step, its full sample in the first
    assert (first[:2], first[3:]) == (("quantiser-fault", "critical"), ("1", operand, direction))


@pytest.mark.parametrize("fault", ["exponents of FP32 scales", "padded bytes of scales", "NaN of the padding"])
def test_scales_that_the_gemm_reads_otherwise_are_the_kernels(te, run, monkeypatch, fault):
    extension = sys.modules["transformer_engine_torch"]
    right = extension.generic_gemm

    def gemm(A, transA, B, *args, **kwargs):
        if tuple(B.shape if isinstance(B, torch.Tensor) else B.size()) != INPUT or not transA:
            return right(A, transA, B, *args, **kwargs)
        kept = B._rowwise_scale_inv
        if fault == "exponents of FP32 scales":
            B._rowwise_scale_inv = exponents(kept)
        else:  # as if the buffer of the scales were as wide as the data: what lies behind them moves in (3070)
            B._rowwise_scale_inv = kept.roll(1, -1)
        out, *rest = right(A, transA, B, *args, **kwargs)
        B._rowwise_scale_inv = kept
        if fault == "NaN of the padding":
            out[-32:] = torch.nan
        return (out, *rest)

    monkeypatch.setattr(extension, "generic_gemm", gemm)
    name = "MXFP8BlockScaling" if "padd" in fault else ""
    first = run(te, two(te), recipe_of(name) if name else with_fp32_scales()).said()[0]
    assert first[2] <= 1
    assert (first[:2], first[3:]) == (("kernel-output-fault", "critical"), ("1", "input", "rowwise"))


class Experts(torch.nn.Module):
    def __init__(self, te):
        super().__init__()
        self.first = te.Linear(WIDTHS[0], WIDTHS[0], bias=False, params_dtype=torch.bfloat16)
        self.experts = te.GroupedLinear(3, *WIDTHS[:2], bias=False, params_dtype=torch.bfloat16)

    def forward(self, x):
        return self.experts(self.first(x), [128, 0, 128])


@pytest.mark.parametrize("which", ["nothing", "weight gradient of no tokens", "rows of an expert"])
def test_what_nobody_wrote_of_an_expert_is_the_kernels(te, run, monkeypatch, which):
    extension = sys.modules["transformer_engine_torch"]
    right = extension.te_general_grouped_gemm

    def gemm(A, transa, B, transb, D, *args, **kwargs):
        out = right(A, transa, B, transb, D, *args, **kwargs)
        if which == "weight gradient of no tokens" and transb:
            D[1].fill_(1e-3)  # finite, and enters the optimizer
        elif which == "rows of an expert" and transa:
            D[0].view(-1, WIDTHS[1])[-40:] = D[0].view(-1, WIDTHS[1])[:40]
        return out

    monkeypatch.setattr(extension, "te_general_grouped_gemm", gemm)
    said = run(te, Experts(te), recipe_of("Float8BlockScaling")).said()
    if which == "nothing":
        assert said == []
        return
    wgrad = which.startswith("weight")
    place = ("experts.1", "grad_output", "columnwise") if wgrad else ("experts.2", "input", "rowwise")
    assert (said[0][:2], said[0][3:]) == (("kernel-output-fault", "critical"), place)
    assert said[0][2] <= 1


def test_a_product_of_what_cannot_be_read_leaves_no_row_of_a_site_that_nobody_knows(te, run, monkeypatch):
    observer = importlib.import_module("fp8watch.integrations.transformer_engine")
    right = observer.read
    monkeypatch.setattr(
        observer, "read", lambda tensor, columnwise: "not known" if columnwise else right(tensor, columnwise)
    )
    line = run(te, two(te), recipe_of("Float8BlockScaling"), steps=20)
    assert {s.direction for s in line.sites.values()} == {"rowwise"}
    assert len(line.rows) == 20


@pytest.mark.parametrize(
    "recipe", ["Float8BlockScaling", "Float8CurrentScaling", "DelayedScaling", "MXFP8BlockScaling"]
)
def test_a_healthy_run_is_silent(te, run, recipe):
    options = {"params_dtype": torch.bfloat16}
    model = torch.nn.Sequential(
        te.LayerNormLinear(*WIDTHS[:2], **options), te.Linear(WIDTHS[1], WIDTHS[0], **options), Experts(te)
    )
    assert run(te, model, recipe_of(recipe), steps=STEPS).said() == []
