"""An operand of Transformer Engine that cannot be read is told once, with its class and the reason; never passed over."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from te.te_training import train
from torch import nn

from fp8watch.integrations.te_modules import numerics_of
from fp8watch.integrations.te_tensors import QuantizedView, read, view_of
from fp8watch.numerics.formats import FORMATS
from fp8watch_agent.record import Measured


def mxfp8(te: ModuleType, model: nn.Module) -> None:
    from transformer_engine.pytorch.quantized_tensor import DType, MXFP8Quantizer

    for module in model.modules():
        if hasattr(module, "make_quantizers"):
            module.make_quantizers(lambda kind: MXFP8Quantizer(DType.kFloat8E4M3))


@pytest.mark.parametrize("shape", [(34, 128), (160, 672), (1, 32)])
@pytest.mark.parametrize("swizzled", [True, False])
def test_mxfp8_is_read_in_either_order_of_its_scales(te: ModuleType, shape: tuple[int, int], swizzled: bool) -> None:
    from transformer_engine.pytorch.quantized_tensor import DType, MXFP8Quantizer

    quantizer = MXFP8Quantizer(DType.kFloat8E4M3)
    quantizer.optimize_for_gemm = swizzled
    x = torch.randn(shape) * torch.exp2(torch.randint(-30, 30, shape).float())
    stored = quantizer(x)
    for columnwise in (False, True):
        view = view_of(stored, columnwise)
        assert isinstance(view, QuantizedView)
        bm, bk = view.tile
        wide = view.scale_inv.repeat_interleave(bm, 0)[: shape[0]].repeat_interleave(bk, 1)[:, : shape[1]]
        assert torch.equal(view.values() * wide, stored.wide(columnwise))
        tile_amax = wide * 448.0
        assert ((view.values() * wide - x).abs() <= tile_amax * 0.0625).all()  # half a step of the largest binade


def test_mxfp8_modules_are_observed_whole(te: ModuleType, attach: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(te.LayerNormLinear(128, 256), te.Linear(256, 128))
    mxfp8(te, model)
    watch = attach(model)
    train(nn.Sequential(model, Mean()), steps=2)
    assert dict(watch.guard.errors) == {}
    _, rows = watch._recorder.step(1)
    assert len(rows) == 10
    assert "cannot be read" not in capsys.readouterr().err
    exact = rows["1", "input", "rowwise"]
    assert exact["measured"] & Measured.ENERGIES
    assert 0 < exact["noise_energy"] < 0.01 * exact["signal_energy"]


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


def test_what_cannot_be_read_is_told_once_and_is_a_fact(
    te: ModuleType, attach: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(te.Linear(128, 128), te.LayerNormLinear(128, 128), Mean())

    class LaterTensorStorage:
        def __init__(self, inner: Any) -> None:
            self.wide = inner.wide

    for quantizer in model[1].quantizers[0]:
        made = quantizer.quantize_impl
        quantizer.quantize_impl = lambda x, made=made: LaterTensorStorage(made(x))
    watch = attach(model)
    capsys.readouterr()
    facts: list[dict[str, Any]] = []
    monkeypatch.setattr(watch._recorder, "update_facts", lambda given: facts.append(dict(given)), raising=False)
    train(model, steps=3)
    said = [line for line in capsys.readouterr().err.splitlines() if "cannot be read" in line]
    line = (
        "Transformer Engine 2.20.imitation: 5 of 10 GEMM operands cannot be read: "
        "5 of LaterTensorStorage (its codes lie in a way that is not known); not observed: 1"
    )
    assert said == [f"fp8watch: {line}"]
    assert [f["te_unread"] for f in facts if "te_unread" in f] == [line]
    assert {s.module for s in watch._recorder.sites} == {"0"}
    assert dict(watch.guard.errors) == {}


def test_products_that_pass_elsewhere_are_told(
    te: ModuleType, attach: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with one fused call for all experts."""
    linear = te.Linear(128, 128)
    model = nn.Sequential(linear, Mean())
    attach(model)
    monkeypatch.setattr(type(linear), "forward", lambda self, x: x @ self.weight.t())
    train(model)
    assert "5 of 5 GEMM operands cannot be read: 5 of Linear (its products do not pass where they are seen" in (
        capsys.readouterr().err
    )


def test_an_operand_that_was_read_at_least_once_is_not_told(te: ModuleType, attach: Any, capsys: Any) -> None:
    model = nn.Sequential(te.Linear(128, 128), Mean())
    attach(model)
    train(model)
    for quantizer in model[0].quantizers[0]:
        made = quantizer.quantize_impl
        quantizer.quantize_impl = lambda x, made=made: SimpleNamespace(wide=made(x).wide)
    train(model)
    assert "cannot be read" not in capsys.readouterr().err


def stored(**more: Any) -> SimpleNamespace:
    codes = torch.zeros(16, 128, dtype=torch.uint8)
    held: dict[str, Any] = {"_fp8_dtype": "E4M3", "_rowwise_data": codes, "_rowwise_scale_inv": torch.ones(1, 16)}
    return SimpleNamespace(**held | more)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.ones(4, 4), "not in FP8: the module ran outside autocast"),
        (SimpleNamespace(_fp4_dtype=10), "it holds no codes of the direction that is multiplied"),
        (SimpleNamespace(data=1), "its codes lie in a way that is not known"),
        (stored(_fp8_dtype="kFloat6"), "format 'kFloat6' is not known"),
        (stored(_rowwise_data=None), "it holds no codes of the direction that is multiplied"),
        (stored(_data_format="COMPACT"), "its scales lie as they are communicated"),
        (stored(_rowwise_scale_inv=torch.ones(1, 15)), "[1, 15] scales do not fit [16, 128] codes in tiles of 1×128"),
        (stored(_scale_inv=torch.ones(2), _data=torch.zeros(2, 2, dtype=torch.uint8)), "it has 2 scales, where one"),
        (stored(_rowwise_scale_inv=torch.zeros(15, 4, dtype=torch.uint8)), "[15, 4] scales do not fit"),
        (
            stored(_rowwise_scale_inv=torch.zeros(16, 4, dtype=torch.uint8), _with_gemm_swizzled_scales=True),
            "[16, 4] scales do not fit",
        ),
        (SimpleNamespace(rowwise_sub_storage=None, columnwise_sub_storage=None), "its codes lie in a way"),
    ],
)
def test_each_reason_is_told(tensor: Any, reason: str) -> None:
    assert str(read(tensor, False)).startswith(reason)
    assert view_of(tensor, False) is None


@pytest.mark.parametrize(
    ("hip", "architecture", "is_read"),
    [
        ("7.0", "gfx942:sramecc+:xnack-", False),
        ("7.0", "gfx940", False),
        ("7.0", "gfx950:sramecc+:xnack-", True),
        ("7.0", "gfx90a", True),
        (None, "gfx942", True),
    ],
)
def test_amds_own_formats_are_not_read_by_the_names_of_others(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, architecture: str, is_read: bool
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    facts = SimpleNamespace(gcnArchName=architecture)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    one = stored(_scale_inv=torch.ones(1), _data=torch.zeros(2, 2, dtype=torch.uint8))
    for held in (stored(), one):
        got = read(held, False)
        assert isinstance(got, QuantizedView) if is_read else got == "AMD's fnuz formats are not read here"


@pytest.mark.parametrize(
    "names", [("rowwise_gemm_tensor", "columnwise_gemm_tensor"), ("rowwise_sub_storage", "columnwise_sub_storage")]
)
def test_tensors_of_two_directions_are_read_one_by_one(names: tuple[str, str]) -> None:
    column = stored(_columnwise_data=torch.zeros(128, 16, dtype=torch.uint8), _columnwise_scale_inv=torch.ones(1, 128))
    both = SimpleNamespace(**dict(zip(names, (stored(), column), strict=True)))
    row_view, column_view = read(both, False), read(both, True)
    assert isinstance(row_view, QuantizedView)
    assert isinstance(column_view, QuantizedView)
    assert (row_view.tile, column_view.tile, column_view.shape) == ((1, 128), (128, 1), (16, 128))


def test_formats_are_read_by_name_whatever_their_number(te: ModuleType) -> None:
    from transformer_engine.pytorch.quantized_tensor import DType

    assert str(DType.kFloat8E4M3) == "7"  # as in Transformer Engine from 2.17 on
    view = read(stored(_fp8_dtype=DType.kFloat8E5M2), False)
    assert isinstance(view, QuantizedView)
    assert view.fmt is FORMATS["E5M2"]


@pytest.mark.parametrize("shape", [(16, 128), (128, 16), (32, 64), (7, 5)])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_one_scale_a_tensor_is_told_by_itself_whatever_the_shape(shape: tuple[int, int], recipe: str) -> None:
    quantizer = SimpleNamespace() if recipe == "delayed" else SimpleNamespace(force_pow_2_scales=False)
    held = SimpleNamespace(
        _fp8_dtype="E4M3", _data=torch.zeros(shape, dtype=torch.uint8), _scale_inv=torch.ones(1), _quantizer=quantizer
    )
    view = read(held, False)
    assert isinstance(view, QuantizedView)
    assert view.tile == shape
    assert numerics_of(held, view, exact=True).recipe == recipe
