"""Trainings of Transformer Engine's layers, watched and not: losses and weights bit by bit, who waits, and which sites left records."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import os
from pathlib import Path
from typing import Any

import torch
from te_place import SPLITS, Place, build, forward, not_here, shape_of
from training_heard import Waits
from training_run import FIRST_WATCHED_STEP

import fp8watch
from fp8watch_agent import wire
from fp8watch_agent.batch import Kind
from fp8watch_agent.spool_segment import SEGMENT_SUFFIX, read_segment


def train(
    at: Place, layer: str, recipe: str, variant: str, attach: dict[str, Any] | None, steps: int = 7
) -> dict[str, Any]:
    """One training: losses, weights, who waited, and what the watch said."""
    dim, tokens = 512, sum(SPLITS)
    context: Any = contextlib.nullcontext()
    made = at.recipe(recipe)
    if variant == "fp8_weights":
        context = at.te.fp8_model_init(enabled=True, recipe=made)
    if variant == "te_debug" and attach is not None:
        fp8watch.te_debug(every=2)
    with context:
        model = build(at, layer, dim, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    data = [
        torch.randn(shape_of(layer, dim, tokens), generator=generator).bfloat16().to(at.device) for _ in range(steps)
    ]
    if variant == "graphed":
        sample = torch.randn_like(data[0]).requires_grad_()
        with at.autocast(enabled=True, fp8_recipe=made):
            pass
        graphed = at.te.make_graphed_callables(model[0], (sample,), **_graph_options(at, made))
        if graphed is not model[0]:
            model[0] = graphed
    watch = None if attach is None else fp8watch.attach(model, run="te", run_id="te", **attach)
    waits = Waits(at.cuda)
    losses: list[Any] = []
    for step in range(steps):
        x = data[step].clone().requires_grad_()
        if step >= FIRST_WATCHED_STEP:
            waits.begin()
        for micro in range(2 if variant == "microbatches" else 1):
            more = {"is_first_microbatch": micro == 0} if variant == "microbatches" else {}
            with at.autocast(enabled=True, fp8_recipe=made):
                if variant == "checkpoint":
                    again = importlib.import_module("transformer_engine.pytorch.distributed").checkpoint
                    y = again(lambda t: forward(model, layer, t), x, use_reentrant=False)
                else:
                    y = forward(model, layer, x, **more)
            loss = y.float().square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        waits.end()
        losses.append(loss.detach().clone())
    out: dict[str, Any] = {"losses": [float(loss) for loss in losses], "waits": waits.total, "waits_ours": waits.ours,
                           "waits_places": dict(waits.places), "first_wait": waits.first}  # fmt: skip
    waits.close()
    out["weights"] = {n: _bits(p) for n, p in model.state_dict().items() if _is_number(n, p)} | _histories(model)
    if watch is not None:
        watch.flush(10)
        out["summary"] = watch.summary()
        registration = watch._recorder._registration
        out["facts"] = {
            k: v for k, v in registration.session.facts.items() if k in ("te_unread", "left_out", "silent", "blind")
        }
        watch.detach()
    return out


def _is_number(name: str, value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not name.endswith("_extra_state")  # a pickle: not the same twice


def _histories(model: Any) -> dict[str, Any]:
    """Scales and amax histories of delayed scaling."""
    found = {}
    for name, part in model.named_modules():
        for key, state in (getattr(part, "fp8_meta", None) or {}).items():
            for what in ("scale", "amax_history"):
                if isinstance(value := getattr(state, what, None), torch.Tensor):
                    found[f"{name}.{key}.{what}"] = _bits(value)
    return found


def _graph_options(at: Place, made: Any) -> dict[str, Any]:
    known = inspect.signature(at.te.make_graphed_callables).parameters
    new = {"enabled": True, "recipe": made} if "enabled" in known and "recipe" in known else None
    return new or {"fp8_enabled": True, "fp8_recipe": made}


def _bits(value: Any) -> Any:
    value = value.detach()
    if hasattr(value, "dequantize") and type(value) is not torch.Tensor and hasattr(value, "_fp8_dtype"):
        value = value.dequantize()
    return value.to("cpu", copy=True)


def _same(a: dict[str, Any], b: dict[str, Any]) -> tuple[bool, bool]:
    weights = a["weights"].keys() == b["weights"].keys() and all(
        v.dtype == b["weights"][n].dtype
        and v.reshape(-1).view(torch.uint8).equal(b["weights"][n].reshape(-1).view(torch.uint8))
        for n, v in a["weights"].items()
    )
    return a["losses"] == b["losses"], weights


def training(at: Place, layer: str, recipe: str, variant: str = "") -> dict[str, Any]:
    """The same training twice without a watch and once with it."""
    arguments: dict[str, Any] = {"overhead_budget": None}
    if variant == "not_sampled":
        arguments = {"every": 4}
    spool = Path(os.environ["FP8WATCH_SPOOL_DIR"])
    bare = [train(at, layer, recipe, variant, None) for _ in range(2)]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        got = train(at, layer, recipe, variant, arguments)
    losses, weights = _same(got, bare[0])
    steady = all(_same(*bare))
    recorded, records, sites = recorded_sites(spool)
    summary, flags = got["summary"], []
    if not (losses and weights):
        far = max(abs(a - b) / max(abs(b), 1e-9) for a, b in zip(got["losses"], bare[0]["losses"], strict=True))
        rounding = variant == "te_debug" and far < 1e-2  # documented: a module's turn may differ in the last bit
        flags.append("rounding" if rounding else "CHANGED" if steady else "changed, base too")
    if summary["internal_errors"]:
        flags.append("ERRORS")
    if got["waits_ours"]:
        flags.append("WAITS")
    if summary["num_steps"] != len(got["losses"]):
        flags.append("STEPS")
    expected = {s for s in sites if not (recipe != "block" and s.endswith(".columnwise"))}
    if missing := sorted(expected - recorded):
        flags.append("SILENT")
    return {
        "verdict": ", ".join(flags) or "ok", "losses_equal": losses, "weights_equal": weights, "base_deterministic": steady,
        "losses": got["losses"], "base_losses": bare[0]["losses"], "internal_errors": summary["internal_errors"],
        "waits_ours": got["waits_ours"], "waits_all": got["waits"], "base_waits": bare[0]["waits"],
        "waits_places": got["waits_places"], "first_wait": got["first_wait"][-3000:], "records": records, "num_sites": len(sites),
        "missing": missing, "facts": got["facts"], "said": [s for s in said.getvalue().splitlines() if "fp8watch" in s],
        "told": f"{records} records of {len(recorded)}/{len(expected)} sites, equal {losses}/{weights}, waits {got['waits_ours']}",
    }  # fmt: skip


def recorded_sites(spool: Path) -> tuple[set[str], int, set[str]]:
    """Sites that have records, how many records, and all sites, from a spool."""
    names: dict[int, str] = {}
    seen: set[int] = set()
    count = 0
    for path in sorted(spool.rglob(f"*{SEGMENT_SUFFIX}")):
        held = read_segment(path)
        if held.registration is not None:
            names |= {s.id: f"{s.module}.{s.operand}.{s.direction}" for s in held.registration.sites()}
        for parcel in held.parcels:
            if parcel.kind == Kind.BATCH:
                batch = wire.decode_batch(parcel.body)
                seen |= {int(s) for s in batch.site}
                count += int(batch.header.num_records)
    operands = {name for name in names.values() if name.rsplit(".", 1)[-1] in ("rowwise", "columnwise")}
    return {names[s] for s in seen if s in names} & operands, count, operands


def blackwell(at: Place, recipe: str) -> dict[str, Any]:
    """A training where the device can, and else the reason."""
    reason = not_here(at, recipe)
    return {"verdict": "left out", "told": reason} if reason else training(at, "Linear", recipe)
