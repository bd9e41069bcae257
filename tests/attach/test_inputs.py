"""What a Linear on the FP8 path is given: right result or a clear error, never a wrong one."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp8watch.kernels import reference
from fp8watch.numerics.formats import E4M3
from fp8watch.numerics.quantize_job import QuantizeJob


def qdq(x, tile):
    return reference.quantize_dequantize(x, QuantizeJob(tile, E4M3, True, 0.0, stats=False))[0]


def fp8_product(x, w):
    return qdq(x.reshape(-1, x.shape[-1]), (1, 128)) @ qdq(w, (128, 128)).t()


VIEWS = {
    "transposed": lambda: torch.randn(64, 40).t(),
    "sliced": lambda: torch.randn(80, 200)[::2, 3:67],
    "expanded rows": lambda: torch.randn(1, 64).expand(40, 64),
    "expanded columns": lambda: torch.randn(40, 1).expand(40, 64),
    "permuted 3-D": lambda: torch.randn(5, 64, 8).permute(0, 2, 1),
    "flipped": lambda: torch.randn(40, 64).flip(1),
    "4-D": lambda: torch.randn(2, 2, 10, 64),
    "1-D": lambda: torch.randn(64),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_views_of_any_stride_and_shape(attach, kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48, bias=False))
    attach(model)
    x = VIEWS[kind]()
    y = model(x)
    assert y.shape == (*x.shape[:-1], 48)
    assert torch.equal(y.detach().reshape(-1, 48), fp8_product(x, model[0].weight.detach()))


def test_gradients_that_are_views(attach):
    model = nn.Sequential(nn.Linear(64, 48, bias=False))
    attach(model)
    x = torch.randn(40, 64)
    model(x).sum().backward()  # the gradient of a sum is expanded from one number
    g = torch.ones(40, 48)
    assert torch.equal(model[0].weight.grad, qdq(g, (128, 1)).t() @ qdq(x, (128, 1)))


REFUSED = {
    "integers": (lambda: torch.ones(4, 64, dtype=torch.int64), "dtype torch.int64: must be float32, bfloat16"),
    "float64": (lambda: torch.ones(4, 64, dtype=torch.float64), "dtype torch.float64: must be float32"),
    "complex": (lambda: torch.ones(4, 64, dtype=torch.complex64), "dtype torch.complex64: must be"),
    "another dtype than the weight": (lambda: torch.ones(4, 64, dtype=torch.bfloat16), "must be equal outside of auto"),
    "features": (lambda: torch.ones(4, 65), r"\(4, 65\), the weight \(48, 64\): the input's last dimension must be 64"),
    "no dimension": (lambda: torch.tensor(1.0), "last dimension must be 64"),
    "meta": (lambda: torch.ones(4, 64, device="meta"), "on meta, the weight on cpu"),
    "sparse": (lambda: torch.eye(64).to_sparse(), "nested or sparse"),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.ones(2, 64), torch.ones(3, 64)], layout=torch.jagged),
        "nested or sparse",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_computed_is_refused_in_words(attach, kind):
    model = nn.Sequential(nn.Linear(64, 48))
    attach(model)
    make, says = REFUSED[kind]
    with pytest.raises(RuntimeError, match=says):
        model(make())


def test_no_input_features_leave_the_bias(attach):
    with pytest.warns(UserWarning, match="zero-element"):
        model = nn.Sequential(nn.Linear(0, 48))
    attach(model)
    x = torch.zeros(3, 0, requires_grad=True)
    y = model(x)
    assert torch.equal(y, model[0].bias.expand(3, 48))
    y.sum().backward()
    assert x.grad.shape == (3, 0)
    assert torch.equal(model[0].bias.grad, torch.full((48,), 3.0))


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)])
def test_empty_batches_of_any_rank(attach, shape):
    model = nn.Sequential(nn.Linear(64, 48))
    attach(model)
    x = torch.zeros(shape, requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert y.shape == (*shape[:-1], 48)
    assert x.grad.shape == shape
    assert torch.equal(model[0].weight.grad, torch.zeros(48, 64))
    assert torch.equal(model[0].bias.grad, torch.zeros(48))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", ["float32", "same"])
def test_lower_precision_gives_the_dtypes_of_a_plain_linear(attach, dtype, weights):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 48))
    plain = plain.to(dtype) if weights == "same" else plain
    watched = copy.deepcopy(plain)
    attach(watched)
    got = []
    for model in (plain, watched):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
        x = (x if weights == "float32" else x.to(dtype)).requires_grad_()
        with torch.autocast("cpu", dtype=dtype, enabled=weights == "float32"):
            y = model(x)
            y.square().sum().backward()
        got.append((y.detach(), x.grad, model[0].weight.grad, model[0].bias.grad))
    for a, b in zip(*got, strict=True):
        assert a.dtype == b.dtype
        assert F.cosine_similarity(a.float().flatten(), b.float().flatten(), dim=0) > 0.995


def test_a_weight_that_two_linears_share(attach):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 64, bias=False))
    model[2].weight = model[0].weight
    watch = attach(model)
    x = torch.randn(32, 64)
    y = model(x)
    y.sum().backward()
    w = model[0].weight.detach()
    hidden = torch.tanh(fp8_product(x, w))
    assert torch.equal(y.detach(), fp8_product(hidden, w))
    assert model[0].weight.grad is model[2].weight.grad
    watch.step()
    _, rows = watch._recorder.step(0)
    assert rows["0", "weight", "rowwise"]["amax_max"] == rows["2", "weight", "rowwise"]["amax_max"]


def test_a_module_that_is_used_twice_counts_both_calls(attach):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.same = nn.Linear(64, 64)

        def forward(self, x):
            return self.same(torch.tanh(self.same(x)))

    watch = attach(Twice())
    model = watch._model
    model(torch.randn(8, 64)).sum().backward()
    watch.step()
    _, rows = watch._recorder.step(0)
    assert {k[1:]: int(r["num_calls"]) for k, r in rows.items()} == {
        ("input", "rowwise"): 2, ("input", "columnwise"): 2, ("weight", "rowwise"): 2,
        ("grad_output", "rowwise"): 1, ("grad_output", "columnwise"): 2,
    }  # fmt: skip


def test_gradients_add_up_over_micro_batches(attach):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48, bias=False))
    attach(model)
    batches = [torch.randn(128, 64) for _ in range(3)]
    want = torch.zeros(48, 64)
    for x in batches:
        y = model(x)
        g = 2 * y.detach()
        y.square().sum().backward()
        want += qdq(g, (128, 1)).t() @ qdq(x, (128, 1))
    assert torch.equal(model[0].weight.grad, want)


def test_files_go_both_ways(attach, mlp):
    plain = copy.deepcopy(mlp)
    attach(mlp)
    with torch.no_grad():
        mlp.up.weight.mul_(2)
    plain.load_state_dict(mlp.state_dict())
    assert torch.equal(plain.up.weight, mlp.up.weight)
    with torch.no_grad():
        plain.up.weight.mul_(2)
    mlp.load_state_dict(plain.state_dict())
    assert torch.equal(plain.up.weight, mlp.up.weight)
    file = io.BytesIO()
    torch.save(mlp, file)
    assert b"fp8watch" not in file.getvalue()
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded.up) is nn.Linear
    assert torch.equal(loaded.up.weight, mlp.up.weight)
    assert mlp.up.__dict__["_fp8watch_site"] is not None  # the original is still watched
    mlp.load_state_dict(plain.state_dict(), assign=True)  # replaces the parameters
    mlp(torch.randn(4, 64)).backward()


def test_quantisation_costs_each_gemm_what_it_should(attach):
    """Both operands of a product at 31.6 dB leave it at 28.6 dB, whichever of the three it is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 256, bias=False))
    x, g = torch.randn(384, 512, requires_grad=True), torch.randn(384, 256)
    model(x).backward(g)
    right = [model(x).detach(), x.grad, model[0].weight.grad]
    x.grad = model[0].weight.grad = None
    attach(model)
    y = model(x)
    y.backward(g)
    for want, got in zip(right, [y.detach(), x.grad, model[0].weight.grad], strict=True):
        noise = (got.double() - want.double()).square().mean()
        sqnr_db = 10 * torch.log10(want.double().square().mean() / noise)
        assert 27.9 < sqnr_db < 29.3


def test_a_model_on_the_meta_device_is_told_what_to_do(attach):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64))
    with pytest.raises(ValueError, match=r"after model.to_empty"):
        attach(model)
    model.to_empty(device="cpu")
    attach(model)
