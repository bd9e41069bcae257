"""How long a step of Transformer Engine's layers takes, watched and not."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from te_place import Place, build, forward, shape_of

import fp8watch


def timing(at: Place, layer: str, recipe: str) -> dict[str, Any]:
    """Median time of a step without a watch, with attach's defaults, with every step sampled, and without one again."""
    modes: list[tuple[str, dict[str, Any] | None]] = [
        ("bare", None), ("default", {}), ("every step", {"overhead_budget": None}), ("bare again", None),
    ]  # fmt: skip
    found = {name: _timed(at, layer, recipe, arguments) for name, arguments in modes}
    base = min(found["bare"]["ms"], found["bare again"]["ms"])
    ratios = {name: round(each["ms"] / base, 4) for name, each in found.items()}
    errors = {name: each["internal_errors"] for name, each in found.items() if each.get("internal_errors")}
    return {
        "verdict": "ERRORS" if errors else "ok", "ms": found, "ratio": ratios, "internal_errors": errors,
        "told": ", ".join(f"{n} {found[n]['ms']:.2f} ms ×{r}" for n, r in ratios.items()),
    }  # fmt: skip


def _timed(at: Place, layer: str, recipe: str, attach: dict[str, Any] | None) -> dict[str, Any]:
    dim, tokens, steps, warm = (2048, 16384, 40, 12) if at.cuda else (128, 1024, 6, 2)
    model = build(at, layer, dim, 4 if at.cuda else 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **({"fused": True} if at.cuda else {}))
    x = torch.randn(shape_of(layer, dim, tokens), dtype=torch.bfloat16, device=at.device).requires_grad_()
    watch = None if attach is None else fp8watch.attach(model, run="te", run_id="te", **attach)
    made, marks = at.recipe(recipe), list[Any]()
    if at.cuda:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        if at.cuda:
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
        else:
            marks.append(time.perf_counter())
        with at.autocast(enabled=True, fp8_recipe=made):
            y = forward(model, layer, x)
        y.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    out: dict[str, Any] = {}
    if at.cuda:
        torch.cuda.synchronize()
        each = [a.elapsed_time(b) for a, b in zip(marks[warm:], marks[warm + 1 :], strict=False)]
        out["peak_mib"] = torch.cuda.max_memory_allocated() >> 20
    else:
        each = [(b - a) * 1e3 for a, b in zip(marks[warm:], marks[warm + 1 :], strict=False)]
    out |= {"ms": statistics.median(each), "ms_mean": statistics.fmean(each), "ms_max": max(each)}
    if watch is not None:
        said = watch.summary()
        out |= {k: said[k] for k in ("internal_errors", "overhead_ratio", "every", "light_every", "num_sites")}
        watch.detach()
    return out
