"""Trains one leg of one run as a person would, calls the seams of its change, and leaves a file about what happened.

Attach is called with nothing but what the person has to say: the collector's address, a name, and the recipe where it is not
the default. Everything else is at attach's defaults.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from proving.case import Case
from proving.families import build
from proving.training import Change, Fault, Training, Trap
from proving.trends import Trend
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fp8watch

FLUSH_S = 20.0
KEPT = ("recipe", "num_sites", "every", "overhead_ratio", "loss", "steps", "internal_errors")
"""What a line of results keeps of `watch.summary()`: at which sampling it was seen."""


class SeamError(Exception):
    """A change raised: a mistake of the proving ground, not of the training."""


class Seams:
    """Calls a change; what it raises is told apart from what the training raises."""

    def __init__(self, change: Change) -> None:
        self._change = change

    def __call__(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._change, name)(*arguments)
        except Exception as e:
            raise SeamError(f"{type(self._change).__name__}.{name}") from e


def train(
    case: Case, leg: int, rank: int, collector: str | None, folder: Path, steps: int | None = None
) -> dict[str, Any]:
    """Run one leg in this process; what happened, also when the training has died.

    Args:
        leg: 0, or 1 for what begins at the checkpoint in `folder`.
        collector: its URL; None trains unobserved.
        steps: ends earlier than the family would.
    """
    torch.set_num_threads(1)
    torch.manual_seed(case.seed)
    probe = build(case.family, case.seed, rank)
    change = case.draw(probe)
    if change is None:
        return {"absent": True}
    out: dict[str, Any] = {"leg": leg, "rank": rank, "change": describe(change), "loss": [], "grad_norm": []}
    seams = Seams(change)
    try:
        with group(probe.world_size):
            _train(case, leg, rank, collector, folder, seams, change, out, steps)
    except SeamError as e:
        out["broken"] = "".join(traceback.format_exception(e))[-4000:]
    except Exception as e:
        out["died"] = "".join(traceback.format_exception(e))[-2000:]
    finally:
        change.undo()
    return out


def describe(change: Change) -> dict[str, Any]:
    """What a line of results keeps of a change."""
    if isinstance(change, Fault):
        e = change.expected
        expected = {
            "modes": list(e.modes),
            "modules": None if e.modules is None else list(e.modules),
            "operand": e.operand,
        }
        return {
            "step": change.step,
            "until": change.until,
            "expected": expected | {"fp8": e.fp8},
            "drawn": change.drawn,
            "generator": change.generator,
        }
    return {"step": change.step, "drawn": change.drawn} if isinstance(change, Trap | Trend) else {}


@contextmanager
def group(world_size: int) -> Iterator[None]:
    """The process group of a run with several ranks, as a launcher's environment says."""
    if world_size == 1:
        yield
        return
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def _train(
    case: Case, leg: int, rank: int, collector: str | None, folder: Path, seams: Seams, change: Change,
    out: dict[str, Any], steps: int | None,
) -> None:  # fmt: skip
    torch.manual_seed(case.seed)
    seams("before_build")
    t = build(case.family, case.seed, rank)
    seams("started", t)
    total = t.steps if steps is None else steps
    boundary = change.step if change.resumes else t.resume_at
    checkpoint = folder / "checkpoint.pt"
    first, state = 0, None
    if leg:
        state = seams("before_resume", t, torch.load(checkpoint, weights_only=False))
        first = load(t, state)
    last = total if leg or boundary is None else min(boundary, total)
    out["first_step"], out["next_step"], out["steps"] = first, last, total
    seams("before_attach", t)
    model: nn.Module = t.model if t.world_size == 1 else DistributedDataParallel(t.model)
    watch = None
    if collector is not None:
        watch = fp8watch.attach(model, run=case.id, recipe=t.recipe, collector=collector, **t.attach)
        if state is not None:
            watch.load_state_dict(state["watch"])
        seams("attached", t, watch)
    took_s: list[float] = []
    try:
        for step in range(first, last):
            began = time.perf_counter()
            loss, norm = train_step(t, model, step, seams, watch)
            took_s.append(time.perf_counter() - began)
            out["loss"].append(plain(loss))
            out["grad_norm"].append(plain(norm))
        if last < total and rank == 0:
            torch.save(saved(t, watch, last), checkpoint)
    finally:
        out["step_ms"] = round(1000 * statistics.median(took_s), 2) if took_s else None
        if watch is not None:
            out["flushed"] = watch.flush(FLUSH_S)
            out["last_step"] = watch.last_step
            summary = watch.summary()
            out["watch"] = {name: summary[name] for name in KEPT}
            watch.detach()


def train_step(t: Training, model: nn.Module, step: int, seams: Seams, watch: Any) -> tuple[float, float]:
    """One optimizer step; its loss and its gradient norm before clipping."""
    if t.schedule is not None:
        for options in t.optimizer.param_groups:
            options["lr"] = t.schedule(step) * options.get("lr_scale", 1.0)
    seams("before_step", t, step)
    t.optimizer.zero_grad()
    losses = []
    for micro in range(t.accumulate):
        number = (step * t.accumulate + micro) * t.world_size + t.rank
        torch.manual_seed(t.seed * 1_000_003 + number)  # dropout: the same in the twin, and after a resume
        batch = seams("on_batch", t, step, t.batch(number))
        last = micro == t.accumulate - 1
        with nullcontext() if last or not isinstance(model, DistributedDataParallel) else model.no_sync():
            loss: Tensor = seams("on_loss", t, step, t.loss(model, batch))
            losses.append(loss.detach())
            share = loss / t.accumulate
            (share if t.scaler is None else t.scaler.scale(share)).backward()
    seams("after_backward", t, step)
    if t.scaler is not None:
        t.scaler.unscale_(t.optimizer)
    trained = [p for p in t.model.parameters() if p.grad is not None]
    norm = nn.utils.clip_grad_norm_(trained, math.inf if t.clip_norm is None else t.clip_norm)
    if t.clip_value is not None:
        nn.utils.clip_grad_value_(trained, t.clip_value)
    mean = torch.stack(losses).mean()
    if watch is not None and t.logs:
        watch.log(loss=mean, grad_norm=norm, **(t.log(t, step) if t.log is not None else {}))
    seams("before_update", t, step)
    if t.scaler is None:
        t.optimizer.step()
    else:
        t.scaler.step(t.optimizer)
        t.scaler.update()
    seams("after_update", t, step)
    return float(mean), float(norm)


def saved(t: Training, watch: Any, step: int) -> dict[str, Any]:
    """A checkpoint: what the next leg needs."""
    return {
        "model": t.model.state_dict(),
        "optimizer": t.optimizer.state_dict(),
        "scaler": None if t.scaler is None else t.scaler.state_dict(),
        "watch": {} if watch is None else watch.state_dict(),
        "step": step,
    }


def load(t: Training, state: dict[str, Any]) -> int:
    """Put a checkpoint into a training that was just built; the first step to come."""
    t.model.load_state_dict(state["model"])
    t.optimizer.load_state_dict(state["optimizer"])
    if t.scaler is not None and state["scaler"] is not None:
        t.scaler.load_state_dict(state["scaler"])
    return int(state["step"])


def plain(value: float) -> float | None:
    """As JSON has it: six digits, None where it is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def leg_in_child(case: Case, leg: int, rank: int, collector: str | None, folder: Path, steps: int | None) -> None:
    """Only in a process of its own: run the leg and leave `leg<n>.rank<r>.json` in the folder."""
    out = train(case, leg, rank, collector, folder, steps)
    path = folder / f"leg{leg}.rank{rank}.json"
    path.with_suffix(".part").write_text(json.dumps(out))
    os.replace(path.with_suffix(".part"), path)
