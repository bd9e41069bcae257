"""NVFP4 at the defaults: a right quantiser is silent, and what is wrong is named at its module, operand and step."""

from __future__ import annotations

import pytest
import torch

from fp8watch import recipe as recipes
from fp8watch.kernels import reference, resolve
from fp8watch.numerics.formats import E2M1
from fp8watch.quantize import nvfp4
from fp8watch.quantize.self_consistency import Reads, check_quantiser
from fp8watch.quantize.site_quantizer import places, site_quantizer

RECIPE = recipes.nvfp4(environ={})
PLACES = places(RECIPE)
CPU = torch.device("cpu")
INF, NAN = float("inf"), float("nan")
RESTS_ON = "fp8watch/quantize", "fp8watch/layers", "server/fp8watch_server/detect"


def read(place, x):
    """What the GEMM reads, as codes and as values, and the operand that was cast."""
    q = site_quantizer(RECIPE, place, resolve("reference", CPU), CPU)
    (codes, scale_inv), _ = q.codes(x, stats=False, heavy=False)
    values, _ = q(x, stats=False, heavy=False)
    tile = q.tile_for((int(x.shape[0]), int(x.shape[1])))
    return q, q.as_cast(x), (Reads(codes, scale_inv, tile), Reads(values, None, tile))


def counts(found):
    return [*found.elements.tolist(), *found.tiles.tolist()[1:]]  # NaN, off the grid, zeroed, wrong scales


def operand(dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(200, 168, generator=g) * torch.exp2(3 * torch.randn(200, 1, generator=g))
    x[16:32], x[48:64, 16:32] = 0, 1e-7  # zeros, and blocks whose scale is 0
    return x.to(dtype)


@pytest.mark.parametrize("place", PLACES, ids="-".join)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_quantiser_is_right_wherever_it_is_looked_at(place, dtype):
    q, x, both = read(place, operand(dtype))
    for reads in both:
        for phase in range(8):
            found = check_quantiser(x, reads, q.spec, near=torch.tensor([1, 1]), phase=phase)
            assert counts(found) == [0, 0, 0, 0]
    for bad in (NAN, INF):
        broken = operand(dtype)
        broken[7, 3] = bad
        q, x, both = read(place, broken)
        assert all(counts(check_quantiser(x, reads, q.spec)) == [0, 0, 0, 0] for reads in both)


@pytest.mark.parametrize("place", PLACES, ids="-".join)
def test_each_way_to_be_wrong_has_its_count(place):
    q, x, (codes, values) = read(place, operand())
    tile = codes.tile
    step = 3 if q.spec.stochastic_rounding else 2
    size = codes.data.float().abs()
    further = torch.where(size <= 1, size + 0.5 * step, size)
    data = further.copysign(codes.data.float()).to(E2M1.dtype)
    assert counts(check_quantiser(x, Reads(data, codes.scale_inv, tile), q.spec))[1] > 0
    off = Reads(codes.data, codes.scale_inv * 1.125, tile), Reads(values.data * 1.5, None, tile)
    assert counts(check_quantiser(x, off[0], q.spec))[3] > 0
    assert sum(counts(check_quantiser(x, off[1], q.spec))) > 0
    none = Reads(torch.zeros_like(values.data), None, tile)
    assert counts(check_quantiser(x, none, q.spec))[2] > 0
    lost = values.data.clone()
    lost[48:64, 16:32] = 1e-9  # or not zero after a transform
    if torch.equal(x, operand()):
        found = check_quantiser(x, Reads(lost, None, tile), q.spec, near=torch.tensor([48 // tile[0], 16 // tile[1]]))
        assert counts(found)[1] > 0


def at_step(step, value):
    """A forward pre-hook that makes one element of the input something else, in one step."""
    calls = [0]

    def hook(module, args):
        calls[0] += 1
        if calls[0] != step + 1:
            return None
        x = args[0].detach().clone()
        x[3, 5] = value if isinstance(value, float) else value(x)
        return (args[0] + (x - args[0].detach()).where(x != args[0].detach(), 0.0),)

    return hook


@pytest.mark.parametrize("value", [INF, NAN])
def test_what_is_not_finite_in_an_input_is_named_in_its_step(train, value):
    line, _ = train(
        6, recipe="nvfp4", before=lambda w: w._model.b.register_forward_pre_hook(at_step(4, value)), tokens=32
    )
    (mode, severity, *where), *_ = line.said()
    assert mode in ("nan-in-activation", "inf-laundering")
    assert (severity, where) == ("critical", [4, "b", "input", "rowwise"])


@pytest.mark.parametrize("value", [INF, NAN])
def test_what_is_not_finite_in_a_gradient_is_named_in_its_step(train, value):
    def before(watch):
        calls = [0]

        def broken(grad):
            calls[0] += 1
            if calls[0] != 5:
                return None
            grad = grad.clone()
            grad[3, 5] = value
            return grad

        watch._model.b.register_forward_hook(lambda m, a, y: y.register_hook(broken) and None)

    line, _ = train(6, recipe="nvfp4", before=before, tokens=32)
    (mode, severity, *where), *_ = line.said()
    assert mode in ("nan-in-activation", "inf-laundering")
    assert (severity, where) == ("critical", [4, "b", "grad_output", "rowwise"])


@pytest.mark.parametrize(("operand", "columnwise"), [("input", False), ("input", True), ("grad_output", True)])
def test_scales_that_froze_are_named_at_their_site(train, operand, columnwise):
    """From the fourth call on a site has the scales that it had then: the codes fit them, and the statistics tell of them."""

    def before(watch):
        direction = "columnwise" if columnwise else "rowwise"
        row = next(
            i for i, s in enumerate(watch._table) if (s.fqn, s.operand, s.direction) == ("b", operand, direction)
        )
        old, held = watch._plan.sites.quantizers[row], []

        class Frozen(type(old)):
            def _cast(self, x_MK, *, stats, heavy):
                made, x, measured = super()._cast(x_MK, stats=stats, heavy=heavy)
                held.append(made.scale_inv.clone())
                if len(held) > 12:
                    size = (made.x_t.abs() / reference.spread(held[12])).clamp(max=6)
                    numbers = reference.round_to_grid(size, E2M1).copysign(made.x_t)
                    made = made._replace(numbers_t=numbers, scale_inv=held[12])
                    job = self.job(x_MK, stats=True, heavy=heavy)
                    measured = nvfp4.measure(made, (x.shape[0], x.shape[1]), job, x.dtype) if stats else None
                return made, x, measured

        watch._plan.sites.replace(row, Frozen(old.spec, old.columnwise, old.backend))

    line, _ = train(16, recipe="nvfp4", before=before, tokens=32, share=1.0)
    mode, severity, step, *where = line.said()[0]
    assert (mode, severity) == ("quantiser-fault", "critical")
    assert where == ["b", operand, "columnwise" if columnwise else "rowwise"]
    assert step < 16


@pytest.mark.heavy(12, *RESTS_ON)
def test_an_outlier_is_named_at_its_operand(train):
    hook = at_step(100, lambda x: float(x.abs().max()) * 3e4)
    line, _ = train(102, recipe="nvfp4", before=lambda w: w._model.b.register_forward_pre_hook(hook), tokens=32)
    assert line.said()[0] == ("outlier-growth", "warning", 100, "b", "input", "rowwise")


def test_triton_is_refused_with_the_reason(train):
    with pytest.raises(ValueError, match="backend='triton' with recipe 'nvfp4': it has no kernel for NVFP4"):
        train(1, recipe="nvfp4", backend="triton")
