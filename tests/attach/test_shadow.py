"""The shadow GEMM: silent on a right kernel, loud on a wrong one, and only where it is switched on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp8watch.kernels import emulated_gemm
from fp8watch.layers import shadow_gemm
from fp8watch_agent.record import Measured


def limited_mm(a: torch.Tensor, b: torch.Tensor, bits: int = 14, width: int = 32) -> torch.Tensor:
    """A product whose accumulator keeps `bits` of mantissa and adds `width` terms at a time."""
    sum_MN = torch.zeros(a.shape[0], b.shape[1])
    for k in range(0, a.shape[1], width):
        sum_MN += a[:, k : k + width] @ b[k : k + width]
        mantissa, exponent = torch.frexp(sum_MN)
        sum_MN = torch.ldexp(torch.trunc(mantissa * 2**bits) / 2**bits, exponent)
    return sum_MN


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_right_product_has_no_error(dtype):
    g = torch.Generator().manual_seed(0)
    a, b, bias = torch.randn(200, 512, generator=g), torch.randn(512, 96, generator=g), torch.randn(96, generator=g)
    got = shadow_gemm.check_gemm((a @ b + bias).to(dtype), a, b, bias)
    assert got.error < (5e-7 if dtype == torch.float32 else 5e-4)
    assert got.gain == pytest.approx(1, abs=1e-5)
    assert got.num_nonfinite == 0


def test_a_limited_accumulator_is_seen_through_the_cast_of_the_output():
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(128, 4096, generator=g), torch.randn(4096, 64, generator=g)
    for dtype in (torch.float32, torch.bfloat16):
        right = shadow_gemm.check_gemm((a @ b).to(dtype), a, b).error
        wrong = shadow_gemm.check_gemm(limited_mm(a, b).to(dtype), a, b).error
        assert wrong > 1e-3 > 2 * right


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lost", [1.3e-4, 5e-4, 3.5e-3])
def test_what_a_kernel_loses_is_told_as_much_whatever_its_output_rounds(seed, dtype, lost):
    """On 1,024 elements of an output, as many as a turn looks at. An output that rounds the other way is a whole bit off."""
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(16, 1024, generator=g).double(), torch.randn(1024, 64, generator=g).double()
    product = a @ b
    off = torch.randn(product.shape, generator=g).double() * lost * product.square().mean().sqrt()
    error = float(shadow_gemm.check_gemm((product + off).to(dtype), a, b).error)
    assert error == pytest.approx(lost, rel=0.05 if dtype == torch.float32 else 0.6 if lost < 1e-3 else 0.25)
    assert (error > 0.002) == (lost > 0.002)


def test_a_wrong_scale_is_a_gain_and_what_is_not_finite_is_counted():
    a, b = torch.randn(70, 64), torch.randn(64, 32)
    assert shadow_gemm.check_gemm(a @ b / 128, a, b).gain == pytest.approx(2.0**-7, rel=1e-5)
    out = a @ b
    out[:, 3] = torch.nan
    got = shadow_gemm.check_gemm(out, a, b)
    assert got.num_nonfinite == shadow_gemm.NUM_ROWS
    assert got.error < 1e-6
    broken_operand = a.clone()
    broken_operand[5] = torch.inf
    assert shadow_gemm.check_gemm(broken_operand @ b, broken_operand, b).error < 1e-6


def test_nothing_against_nothing_is_right_and_something_is_wrong():
    zero = torch.zeros(4, 16)
    assert shadow_gemm.check_gemm(torch.zeros(4, 8), zero, torch.ones(16, 8))[:2] == (0, 1)
    assert shadow_gemm.check_gemm(torch.ones(4, 8), zero, torch.ones(16, 8)).error == torch.inf


@pytest.mark.parametrize("num_rows", [1, 2, 63, 64, 65, 1000])
def test_sampled_rows(num_rows):
    for phase in (0, 1, 7777):
        rows = shadow_gemm.sampled_rows(num_rows, phase)
        assert len(rows) == min(num_rows, shadow_gemm.NUM_ROWS)
        assert 0 <= rows[0] <= rows[-1] < num_rows
    with pytest.raises(ValueError, match=r"must be \[M, N\], \[M, K\], \[K, N\]"):
        shadow_gemm.check_gemm(torch.ones(2, 3), torch.ones(2, 4), torch.ones(5, 3))


@pytest.mark.parametrize("broken", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch traces its own
def test_the_broken_gemm_is_named(attach, monkeypatch, broken, compiled):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    watch = attach(model)
    watch.shadow("2")
    watch._plan.canary.turn, watch._plan.canary.reads_rows = frozenset(), False
    right = getattr(emulated_gemm, broken)
    monkeypatch.setattr(emulated_gemm, broken, lambda *a: right(*a) / 128)
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    run(torch.randn(96, 64)).square().mean().backward()
    watch.step()
    _, rows = watch._recorder.step(0)
    site = {
        "fprop": ("2", "input", "rowwise"),
        "dgrad": ("2", "grad_output", "rowwise"),
        "wgrad": ("2", "grad_output", "columnwise"),
    }
    for key, row in rows.items():
        assert bool(row["measured"] & Measured.GEMM) == (key in site.values()), key
    for name, key in site.items():
        gain = 2.0**-7 if name == broken else 1.0
        assert rows[key]["gemm_gain_min"] == pytest.approx(gain, rel=1e-4)
        assert rows[key]["gemm_gain_max"] == pytest.approx(gain, rel=1e-4)
        assert (rows[key]["gemm_error"] > 0.9) == (name == broken)


def test_the_shadow_changes_no_number_and_can_be_switched_off(attach, mlp, train):
    import copy

    twin = copy.deepcopy(mlp)
    watch, _ = attach(mlp), attach(twin)
    watch.shadow("up", "down")
    watch._plan.canary.firsts = ()  # nobody has a turn
    before = torch.get_rng_state()
    train(mlp, steps=2)
    torch.set_rng_state(before)
    train(twin, steps=2)
    assert all(torch.equal(a, b) for a, b in zip(mlp.parameters(), twin.parameters(), strict=True))
    assert watch._recorder.step(1)[1]["up", "input", "rowwise"]["measured"] & Measured.GEMM
    watch.shadow()
    train(mlp, steps=1)
    assert not any(r["measured"] & Measured.GEMM for r in watch._recorder.step(2)[1].values())
    with pytest.raises(ValueError, match="'nope' is not watched; watched are down, up"):
        watch.shadow("nope")
    watch.shadow("up")
    watch.detach()
    assert not [k for m in mlp.modules() for k in m.__dict__ if "fp8watch" in k]


def test_recomputed_products_are_checked_once(attach, monkeypatch):
    from torch.utils.checkpoint import checkpoint

    calls = []
    right = shadow_gemm.check_gemm
    monkeypatch.setattr(shadow_gemm, "check_gemm", lambda *a, **k: (calls.append(a[0].shape), right(*a, **k))[1])
    model = nn.Sequential(nn.Linear(64, 32))
    attach(model).shadow("0")
    checkpoint(model, torch.randn(48, 64, requires_grad=True), use_reentrant=False).sum().backward()
    assert calls == [(48, 32), (48, 64), (32, 64)]
