"""What is observed of the operands of Transformer Engine's GEMMs, against float64 on the operand and the codes of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from te_place import Place, build, forward, wide

from fp8watch.integrations import te_modules
from fp8watch.integrations.transformer_engine import TeObserver
from fp8watch_agent.guard import Guard


def stats(at: Place, layer: str, recipe: str) -> dict[str, Any]:
    """Each observation against float64 on the operand and the codes of its GEMM; products against the codes."""
    dim, tokens, wrong, told = 256, 512, list[str](), list[Any]()
    model = build(at, layer, dim, 1, bias=False)
    modules, guard = te_modules.find(model.named_modules()), Guard()
    places = [site for module in modules for site in module.sites]
    views: dict[int, Any] = {}
    last: dict[int, Any] = {}
    num = {"observations": 0, "seen": 0, "products": 0, "saturated": 0, "nan": 0, "inf": 0}
    worst = [0.0]
    plain = [True]

    def record(row: int, shape: tuple[int, int], got: Any) -> None:
        last[row] = got

    observer = TeObserver(modules, 0, record, guard, tell=lambda line, facts: told.append(line), output=lambda row, y: check_product(row, y))  # fmt: skip
    observe = observer._observe

    def checked(
        frame: Any, index: int, tensor: Any, operand: str, columnwise: bool, offset: Any, view: Any, row: int
    ) -> None:
        again = (index, operand, columnwise) in frame.observed or (columnwise and view.tile == view.shape)
        x = None if again else frame.operand(index, operand, view, offset)
        observe(frame, index, tensor, operand, columnwise, offset, view, row)
        if again:
            return
        views[row] = view
        num["observations"] += 1
        num["seen"] += x is not None
        said = last[row].summary()
        for what in _differences(x, tensor, view, columnwise, said):
            wrong.append(f"{places[row].fqn} {operand} {'columnwise' if columnwise else 'rowwise'}: {what}")
        for name in ("saturated", "nan", "inf"):
            num[name] += int(said[f"num_{name}"])

    def check_product(row: int, y: Any) -> None:
        if not plain[0]:
            return
        site = places[row]
        rows = {(s.operand, s.direction): i for i, s in enumerate(places) if s.fqn == site.fqn}

        def value(operand: str, direction: str = "rowwise") -> Any:
            view = views.get(rows[operand, direction], views.get(rows[operand, "rowwise"]))
            return view.values().double() * wide(view.scale_inv.double(), view)

        try:
            if site.gemm == "fprop":
                want = value("input") @ value("weight").t()
            elif site.gemm == "dgrad":
                want = value("grad_output") @ value("weight")
            else:
                want = value("grad_output", "columnwise").t() @ value("input", "columnwise")
        except AttributeError:
            wrong.append(f"{site.fqn} {site.gemm}: an operand of the product was not observed")
            return
        num["products"] += 1
        error = float((y.reshape(want.shape).double() - want).norm() / want.norm().clamp_min(1e-300))
        worst[0] = max(worst[0], error)
        if not error < 0.01:
            wrong.append(f"{site.fqn} {site.gemm}: the product is {error:.3g} from that of the codes")

    observer._observe = checked  # type: ignore[method-assign]
    reason = observer.start()
    made = at.recipe(recipe)
    generator = torch.Generator().manual_seed(1)
    for step in range(5):
        x = torch.randn((tokens, dim), generator=generator).bfloat16()
        x *= 64 if step == 2 else 1
        plain[0] = step != 4
        if step == 4:  # nothing but Inf and NaN in the end: they stay in the history of delayed scaling
            x[3, 5], x[7, 130], x[200, 9] = float("inf"), float("nan"), float("-inf")
        x = x.to(at.device).requires_grad_()
        with at.autocast(enabled=True, fp8_recipe=made):
            y = forward(model, layer, x)
        y.float().square().mean().backward()
        observer.end_step()
        model.zero_grad()
    observer.stop()
    if recipe == "delayed" and layer in ("Linear", "GroupedLinear") and not num["saturated"]:
        wrong.append("an input of 64 times its history saturated nothing")
    flags = (
        ["NOT OBSERVED"] * bool(reason)
        + ["DIFFERENT"] * bool(wrong)
        + ["ERRORS"] * bool(guard.errors)
        + ["UNREAD"] * bool(told)
    )
    return {
        "verdict": ", ".join(flags) or "ok", "reason": reason, **num, "worst_product": worst[0], "wrong": wrong[:60],
        "num_wrong": len(wrong), "internal_errors": dict(guard.errors), "unread": told,
        "told": f"{num['observations']} observations, {num['products']} products within {worst[0]:.2g}, {len(wrong)} wrong"
        f"{': ' + wrong[0] if wrong else ''}",
    }  # fmt: skip


def _tiles(values: Any, tile: tuple[int, int]) -> Any:
    """Largest of each tile."""

    (rows, columns), (bm, bk) = values.shape, tile
    full = F.pad(values, (0, -columns % bk, 0, -rows % bm))
    return full.reshape(full.shape[0] // bm, bm, full.shape[1] // bk, bk).amax((1, 3))


def _differences(x: Any, tensor: Any, view: Any, columnwise: bool, said: dict[str, Any]) -> Iterator[str]:
    """What the statistics say, against float64."""
    scale_inv = view.scale_inv.double()
    value = (view.values() * wide(view.scale_inv, view)).double()  # rounded to float32, as a dequantised tensor is
    finite = value[value.isfinite()]
    if not columnwise and hasattr(tensor, "dequantize"):  # its own kernel reads the same
        theirs = tensor.dequantize(dtype=torch.float32).reshape(value.shape).double()
        if not torch.equal(theirs.nan_to_num(1.5e300), value.nan_to_num(1.5e300)):
            yield "codes and scales do not dequantise as Transformer Engine does it"
    want: dict[str, Any] = {
        "scale_inv_max": scale_inv.max(),
        "scale_inv_min": scale_inv.min(),
        "num_elements": value.numel(),
    }
    if x is None:
        want |= {"amax_max": finite.abs().max(), "num_nan": value.isnan().sum(), "num_nonzero": (value != 0).sum()}
    else:
        x = x.double()
        fine, largest = x.isfinite(), view.fmt.max_finite
        midpoint = {448.0: 464.0, 57344.0: 61440.0}[largest]
        amax = _tiles(x.abs().nan_to_num(0.0, posinf=float("inf")), view.tile)
        ratio = (x.abs() / wide(scale_inv, view)).where(fine, 0.0)
        noise = (value - x).where(fine & value.isfinite(), 0.0)
        want |= {
            "amax_max": amax.max(), "amax_min_nonzero": amax[amax > 0].min(), "num_zero_tiles": (amax == 0).sum(),
            "num_nonzero": (x != 0).sum(), "num_nan": x.isnan().sum(), "num_inf": x.isinf().sum(),
            "num_saturated": (ratio >= midpoint).sum(), "num_underflow": ((x != 0) & (value == 0)).sum(),
            "signal_energy": x.where(fine, 0.0).square().sum(), "noise_energy": noise.square().sum(),
        }  # fmt: skip
        step = x.abs() * (2.0**-4 if largest == 448.0 else 2.0**-3)
        limit = step.maximum(wide(scale_inv, view) * (2.0**-10 if largest == 448.0 else 2.0**-17)) * (1 + 1e-6)
        inside = fine & (ratio <= largest)
        if bool(((noise.abs() > limit) & inside).any()):
            yield "codes are not those of the operand that it was held against"
    for name, number in want.items():
        number = float(number)
        near = name.endswith("energy")
        if not (abs(said[name] - number) <= 1e-5 * abs(number) if near else float(said[name]) == number):
            yield f"{name} {said[name]} where the reference has {number}"
