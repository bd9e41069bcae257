"""Codes and scales of Transformer Engine's quantisers, against those of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from te_place import Place, not_here, wide

from fp8watch.integrations.te_tensors import read
from fp8watch.kernels import resolve
from fp8watch.numerics.formats import FORMATS
from fp8watch.numerics.quantize_job import QuantizeJob
from fp8watch.quantize import quantize_mxfp8, quantize_per_tensor


def _kinds() -> dict[str, Callable[[Any], Any]]:
    def put(value: float) -> Callable[[Any], Any]:
        return lambda x: x.index_put((torch.tensor(3), torch.tensor(5)), torch.tensor(value))

    return {
        "normal": lambda x: x,
        "octaves": lambda x: x * torch.exp2(torch.randint(-16, 4, x.shape)),
        "rows": lambda x: x * torch.logspace(-12, 3, x.shape[0])[:, None],
        "zeros": lambda x: x * 0,
        "tiny": lambda x: x * 1e-38,
        "huge": lambda x: x * 1e37,
        "inf": put(float("inf")),
        "nan": put(float("nan")),
    }


def _operands(formats: tuple[str, ...]) -> Iterator[tuple[str, Any, str]]:
    torch.manual_seed(0)
    for shape in ((256, 512), (144, 272), (128, 128)):
        for kind, made in _kinds().items():
            values = made(torch.randn(shape))
            for dtype in (torch.bfloat16, torch.float32, torch.float16):
                for fmt in formats:
                    yield f"{kind} {list(shape)} {str(dtype)[6:]} {fmt}", values.to(dtype), fmt


def _unequal(ours: tuple[Any, Any], theirs: tuple[Any, Any]) -> str:
    """What is not the same of codes and scales; NaN is one."""
    a, b = (t.contiguous().view(torch.uint8) for t in (ours[0], theirs[0]))
    found = []
    if not torch.equal(a, b):
        differ = a != b
        found.append(f"{int(differ.sum())} codes, first {a[differ][0].item():#x} where it has {b[differ][0].item():#x}")
    s, t = (scale.float().contiguous().view(torch.int32) for scale in (ours[1], theirs[1]))
    nan = ours[1].float().isnan() & theirs[1].float().isnan()
    if bool(((s != t) & ~nan).any()):
        at = ((s != t) & ~nan).nonzero()[0].tolist()
        found.append(
            f"{int(((s != t) & ~nan).sum())} scales, first {ours[1][tuple(at)].item()} where it has {theirs[1][tuple(at)].item()}"
        )
    return "; ".join(found)


def bytes_block(at: Place) -> dict[str, Any]:
    """Float8BlockQuantizer against each of our backends, both directions, 1×128 and 128×128."""
    quantizer, wrong, num = at.cls("float8_blockwise_tensor", "Float8BlockQuantizer"), list[str](), 0
    backends = ("cpu", "reference") if at.stand_in else ("triton", "reference")
    for name, x, fmt in _operands(("E4M3", "E5M2")):
        x = x.to(at.device)
        for dims in (1, 2):
            for power_2, eps in ((True, 0.0), (False, 0.0), (True, 1e-3)):
                made = quantizer(
                    fp8_dtype=at.dtype(fmt), rowwise=True, columnwise=True, amax_epsilon=eps,
                    force_pow_2_scales=power_2, block_scaling_dim=dims,
                )  # fmt: skip
                theirs = made(x)
                for columnwise in (False, True):
                    view = read(theirs, columnwise)
                    if isinstance(view, str):
                        wrong.append(f"{name}: {view}")
                        continue
                    tile = (128, 128) if dims == 2 else (128, 1) if columnwise else (1, 128)
                    for backend in backends:
                        got = resolve(backend, torch.device(at.device)).quantize(
                            x, QuantizeJob(tile, FORMATS[fmt], power_2, eps)
                        )
                        num += 1
                        if what := _unequal(got[:2], (view.codes, view.scale_inv)):
                            wrong.append(f"{backend} {name} {tile} power_2={power_2} eps={eps}: {what}")
    return _bytes(num, wrong)


def _bytes(num: int, wrong: list[str]) -> dict[str, Any]:
    return {"verdict": "DIFFERENT" if wrong else "ok", "compared": num, "num_wrong": len(wrong), "wrong": wrong[:200],
            "told": f"{num} compared, {len(wrong)} differ{': ' + wrong[0] if wrong else ''}"}  # fmt: skip


def bytes_current(at: Place) -> dict[str, Any]:
    """Float8CurrentScalingQuantizer against quantize_per_tensor."""
    quantizer, wrong, num = at.cls("float8_tensor", "Float8CurrentScalingQuantizer"), list[str](), 0
    for name, x, fmt in _operands(("E4M3", "E5M2")):
        x = x.to(at.device)
        for power_2, eps in ((False, 0.0), (True, 0.0), (False, 1e-3)):
            made = quantizer(
                fp8_dtype=at.dtype(fmt), device=torch.device(at.device), force_pow_2_scales=power_2, amax_epsilon=eps
            )
            theirs, num = made(x), num + 1
            ours = quantize_per_tensor(x, fmt, power_2, eps)
            if what := _unequal((ours.data, ours.scale_inv), (theirs._data, theirs._scale_inv.reshape(1, 1))):
                wrong.append(f"{name} power_2={power_2} eps={eps}: {what}")
    return _bytes(num, wrong)


def bytes_delayed(at: Place) -> dict[str, Any]:
    """Float8Quantizer, whose scale is given, against quantize_per_tensor with that scale, and its amax."""
    quantizer, wrong, num = at.cls("float8_tensor", "Float8Quantizer"), list[str](), 0
    for name, x, fmt in _operands(("E4M3", "E5M2")):
        x = x.to(at.device)
        for factor in (1.0, 0.37, 1024.0):
            scale = torch.full((1,), factor, device=at.device)
            amax = torch.zeros(1, device=at.device)
            theirs = quantizer(scale=scale, amax=amax, fp8_dtype=at.dtype(fmt))(x)
            ours, num = quantize_per_tensor(x, fmt, scale=scale.reshape(1, 1).clone()), num + 1
            if what := _unequal((ours.data, ours.scale_inv), (theirs._data, theirs._scale_inv.reshape(1, 1))):
                wrong.append(f"{name} scale {factor}: {what}")
            if float(ours.stats.amax) != float(amax):
                wrong.append(f"{name} scale {factor}: amax {float(ours.stats.amax)} where it has {float(amax)}")
    return _bytes(num, wrong)


def bytes_mxfp8(at: Place) -> dict[str, Any]:
    """MXFP8Quantizer against quantize_mxfp8, where its kernels run."""
    if (reason := not_here(at, "mxfp8")) is not None:
        return {"verdict": "left out", "told": reason}
    quantizer, wrong, num = at.cls("mxfp8_tensor", "MXFP8Quantizer"), list[str](), 0
    for name, x, fmt in _operands(("E4M3", "E5M2")):
        x = x.to(at.device)
        if x.shape[0] % 32 or x.shape[1] % 32 or name.startswith("nan"):  # which is documented as another
            continue
        view = read(quantizer(fp8_dtype=at.dtype(fmt))(x), False)
        ours, num = quantize_mxfp8(x, fmt), num + 1
        if isinstance(view, str):
            wrong.append(f"{name}: {view}")
            continue
        theirs = view.values() * wide(view.scale_inv, view)
        if not torch.equal(ours.dequantize().nan_to_num(7.5), theirs.nan_to_num(7.5)):
            wrong.append(f"{name}: values differ")
    return _bytes(num, wrong)


def bytes_nvfp4(at: Place) -> dict[str, Any]:
    return {"verdict": "left out", "told": not_here(at, "nvfp4") or "see tests/te/real/check_nvfp4.py"}


AGAINST: dict[str, Callable[[Place], dict[str, Any]]] = {
    "block": bytes_block, "current": bytes_current, "delayed": bytes_delayed, "mxfp8": bytes_mxfp8, "nvfp4": bytes_nvfp4,
}  # fmt: skip


def quantisers(at: Place, recipe: str) -> dict[str, Any]:
    """Those of one recipe."""
    return AGAINST[recipe](at)
