"""Records short real trainings as traces: `PYTHONPATH=tests python -m benchmarks.detection.record FOLDER [NAME ...]`. Needs torch.

A one-layer causal language model on the sources of Python's standard library, in FP8 on the CPU; healthy runs, among
them the hard ones, and faults put in where the real ones would be. A trace is one file: the sites as JSON, and wire
bodies of eight steps. Numbers are cut to seven bits of mantissa, histograms and coordinates that no detector reads are left out:
all traces together stay under 2 MiB.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from benchmarks.operating_point import refuse_other_settings
from torch import Tensor, nn

import fp8watch
from fp8watch.demo import faults
from fp8watch.demo.model import ByteModel
from fp8watch.demo.text import batches, load_text
from fp8watch_agent.record import FIELDS, ROW, Site
from fp8watch_agent.recorder import Recorder
from fp8watch_agent.wire import Header, encode_batch

STEPS, ONSET, PER_BATCH = 184, 120, 8
DROPPED = {"amax_hist", "depth_hist", "signal_energy", "noise_energy", "tile_noise_ratio_max", "moment2", "num_calls", "worst_tile", "noise_tile"}  # fmt: skip
DOWN = "layers.0.mlp.down_proj"

Change = Callable[[nn.Module, torch.optim.Optimizer, int], Any]


class Captured(msgspec.Struct):
    """One recorded run."""

    name: str
    sites: list[Site]
    bodies: list[bytes]
    onset: int = -1
    mode: str = ""
    module: str = ""
    operand: str = ""


def _cut(values: np.ndarray) -> np.ndarray:
    """Seven bits of mantissa: what detection needs of a number. Floats are rounded towards zero."""
    if values.dtype == np.float64:
        return (values.view(np.int64) & ~((1 << 45) - 1)).view(np.float64)
    if values.dtype == np.float32:
        return (values.view(np.int32) & ~((1 << 16) - 1)).view(np.float32)
    if values.dtype == np.int64:
        keep = np.maximum(values.astype(np.float64), 1)
        unit = np.exp2(np.maximum(np.floor(np.log2(keep)) - 6, 0)).astype(np.int64)
        return values // unit * unit
    return values


def _compact(rows: np.ndarray) -> np.ndarray:
    out = np.zeros(rows.shape, dtype=ROW)
    for f in FIELDS:
        value = rows[f.name]
        if f.name == "moment4":  # as it would be if Σ(x/amax)² were 1 a tile element: the kurtosis is kept
            value = rows["moment4"] / np.where(rows["moment2"] > 0, rows["moment2"], 1.0) ** 2  # light rows have none
        if f.name in DROPPED:
            value = np.full_like(value, 1 if f.name == "moment2" else f.default)
        exact = f.name in ("scale_inv_max", "scale_inv_min", "scale_ratio_max", "scale_ratio_min", "measured", "order", "first_nonfinite", "off_scale_tile")  # fmt: skip
        out[f.name] = value if exact or f.size > 1 else _cut(np.ascontiguousarray(value))
    return out


def run(
    name: str,
    *,
    change: Change | None = None,
    every_step: Change | None = None,
    data: Callable[[Tensor, int], Iterator[tuple[Tensor, Tensor]]] | None = None,
    recipe: str = "blockwise",
    accumulate: int = 1,
    seed: int = 0,
    expect: tuple[str, str, str] = ("", "", ""),
    onset: int = -1,
) -> Captured:
    """Train STEPS steps and keep what the agent was handed."""
    steps: list[np.ndarray] = []
    rows: list[np.ndarray] = []
    sites: dict[int, Site] = {}
    ids: list[np.ndarray] = []

    def record_step(
        _self: Any, step: Any, site_ids: Any, got: Any, logs: Any = None, batch_id: Any = None, **_: Any
    ) -> None:
        steps.append(np.array(step).reshape(1).copy())
        ids.append(np.array(site_ids))
        rows.append(got.copy())

    Recorder.record_step = record_step  # type: ignore[method-assign]
    Recorder.register_sites = lambda _self, fresh: sites.update({s.id: s for s in fresh})  # type: ignore[method-assign]
    torch.manual_seed(seed)
    model = ByteModel(dim=128, num_layers=1, num_heads=2, hidden=320)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    stream = (data or (lambda text, s: batches(text, 4, 64, s)))(load_text(), seed)
    watch = fp8watch.attach(model, recipe=recipe, overhead_budget=None, optimizer=optimizer)
    began = time.time()
    for step in range(STEPS):
        undo = change(model, optimizer, step) if change is not None and step == ONSET else None
        if every_step is not None:
            every_step(model, optimizer, step)
        optimizer.zero_grad()
        for _ in range(accumulate if step >= ONSET else 1):
            (model(*next(stream)) / (accumulate if step >= ONSET else 1)).backward()
        watch.log(grad_norm=torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        if callable(undo):
            undo()
    watch.detach()
    bodies = []
    for seq, first in enumerate(range(0, STEPS, PER_BATCH)):
        part = range(first, min(first + PER_BATCH, len(steps)))
        head = np.concatenate([steps[t] for t in part])
        number = sum(len(ids[t]) for t in part)
        header = Header(run="run", session=name.replace("-", ""), rank=0, seq=seq, step0=int(head["step"][0]), num_steps=len(head), num_records=number)  # fmt: skip
        step = np.concatenate([np.full(len(ids[t]), int(steps[t]["step"][0])) for t in part])
        bodies.append(
            encode_batch(header, head, step, np.concatenate([ids[t] for t in part]), _compact(np.concatenate([rows[t] for t in part])), level=19)
        )  # fmt: skip
    size = sum(map(len, bodies))
    sys.stderr.write(
        f"{name}: {time.time() - began:.0f} s, {size / 1024:.0f} KiB, {size / sum(map(len, rows)):.1f} B/record\n"
    )
    return Captured(name, list(sites.values()), bodies, onset, *expect)


def lr_at(schedule: Callable[[int], float]) -> Change:
    def set_lr(_model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = schedule(step)

    return set_lr


def switched(text: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Another domain from the onset on: the same bytes backwards, upper case."""
    first, upper = batches(text, 4, 64, seed), text.flip(0).clone()
    lower = (upper >= 97) & (upper <= 122)
    upper[lower] -= 32
    second = batches(upper, 4, 64, seed)
    for step in range(10**9):
        yield next(first if step < ONSET else second)


def resized(text: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    first, second = batches(text, 4, 64, seed), batches(text, 8, 32, seed)
    for step in range(10**9):
        yield next(first if step < ONSET else second)


def masked(text: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Fine-tuning: from the onset on only the last quarter of each row counts."""
    for step, (tokens, targets) in enumerate(batches(text, 4, 64, seed)):
        if step >= ONSET:
            targets = targets.clone()
            targets[:, :48] = -100
        yield tokens, targets


def one_bad(text: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for step, pair in enumerate(batches(text, 4, 64, seed)):
        if step == ONSET:
            noise = torch.randint(128, 256, (4, 65), generator=generator)
            pair = (noise[:, :-1], noise[:, 1:])
        yield pair


def freeze(model: nn.Module, _o: torch.optim.Optimizer, _s: int) -> None:
    for name, p in model.named_parameters():
        if "attention" in name:
            p.requires_grad_(False)


def flip_bit(model: nn.Module, _o: torch.optim.Optimizer, _s: int) -> None:
    weight = model.get_submodule("layers.0.attention.o_proj").weight.data  # type: ignore[union-attr]
    weight.view(torch.int32)[5, 70] ^= 1 << 25  # type: ignore[operator, index]


def outlier(model: nn.Module, _o: torch.optim.Optimizer, _s: int) -> Callable[[], None]:
    def grow(_m: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = args[0].clone()
        x[..., 40:42] *= 30
        return (x,)

    return model.get_submodule(DOWN).register_forward_pre_hook(grow).remove


def nan_loss(model: nn.Module, _o: torch.optim.Optimizer, _s: int) -> Callable[[], None]:
    return model.register_forward_hook(lambda _m, _a, out: out * float("nan"), prepend=True).remove


def qk_growth(model: nn.Module, _o: torch.optim.Optimizer, step: int) -> None:
    if step >= ONSET:
        for name in ("q_proj", "k_proj"):
            model.get_submodule(f"layers.0.attention.{name}").weight.data.mul_(1.05)  # type: ignore[union-attr, operator]


def _fault(name: str) -> Change:
    """A fault of the demo, in the module of this one-layer model."""

    def inject(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Any:
        faults.FAULT_MODULE, faults.STALE_MODULE = DOWN, "layers.0.mlp.up_proj"
        return faults.FAULTS[name].inject(model, optimizer, step)

    return inject


UP = "layers.0.mlp.up_proj"
RUNS: dict[str, dict[str, Any]] = {
    "healthy-1": {"seed": 1},
    "healthy-fp32-scales": {"seed": 2},
    "healthy-delayed": {"seed": 3, "recipe": "delayed"},
    "healthy-rewarmup": {"seed": 4, "every_step": lr_at(lambda s: 2e-3 * min(1.0, (s + 1) / 20 if s < ONSET else (s - ONSET + 1) / 40))},
    "healthy-lr-x2": {"seed": 5, "every_step": lr_at(lambda s: 1e-3 if s < ONSET else 2e-3)},
    "healthy-domain": {"seed": 6, "data": switched},
    "healthy-resized": {"seed": 7, "data": resized},
    "healthy-accumulate": {"seed": 8, "accumulate": 2},
    "healthy-masked": {"seed": 9, "data": masked},
    "healthy-frozen": {"seed": 10, "change": freeze},
    "inf": {"seed": 11, "change": _fault("inf"), "expect": ("inf-laundering", DOWN, "input"), "onset": ONSET},
    "zero-tile": {"seed": 12, "change": _fault("zero-tile"), "expect": ("zero-tile-eps", DOWN, "input"), "onset": ONSET},
    "stale": {"seed": 13, "change": _fault("stale-weight-scale"), "expect": ("stale-weight-scale", UP, "weight"), "onset": ONSET},
    "lr-x30": {"seed": 14, "change": _fault("lr"), "expect": ("optimizer-divergence", "", ""), "onset": ONSET},
    "bad-batch": {"seed": 15, "data": one_bad, "expect": ("bad-batch", "", ""), "onset": ONSET},
    "bit-flip": {"seed": 16, "change": flip_bit, "expect": ("silent-data-corruption", "layers.0.attention.o_proj", "weight"), "onset": ONSET},
    "delayed-outlier": {"seed": 17, "recipe": "delayed", "change": outlier, "expect": ("delayed-clip", DOWN, "input"), "onset": ONSET},
    "nan-loss": {"seed": 18, "change": nan_loss, "expect": ("nan-in-loss", "", ""), "onset": ONSET},
    "qk-growth": {"seed": 19, "every_step": qk_growth, "expect": ("attention-logit-growth", "layers.0.attention", "weight"), "onset": ONSET},
}  # fmt: skip


def main() -> None:
    refuse_other_settings()
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as spool:
        os.environ["FP8WATCH_SPOOL_DIR"] = spool
        for name in sys.argv[2:] or list(RUNS):
            os.environ["NVTE_FP8_BLOCK_SCALING_FP32_SCALES"] = "1" if "fp32" in name else "0"
            try:
                got = run(name, **RUNS[name])
            except ValueError as e:  # a recipe that this version does not compute
                sys.stderr.write(f"{name}: {e}\n")
                continue
            (folder / f"{name}.trace").write_bytes(msgspec.msgpack.encode(got))


if __name__ == "__main__":
    main()
