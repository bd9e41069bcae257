"""One training, watched or not: its losses and weights, who waits for the device, times, memory, and what the watch says."""

from __future__ import annotations

import gc
import itertools
import logging
import math
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from training_heard import Kept, Tee, Waits

import fp8watch
from fp8watch_agent.batch import Kind
from fp8watch_agent.spool_segment import SEGMENT_SUFFIX, read_segment

FIRST_WATCHED_STEP = 3
"""Before it allocators grow and kernels compile."""
FIRST_TIMED_STEP = 10
KEPT_FACTS = (
    "gemm_flops_observed",
    "not_taken",
    "left_out",
    "silent",
    "blind",
    "not_in_fp8",
    "gradients_unseen",
    "not_counted",
)


class Run:
    """What a scenario is given: where it trains, and what it tells.

    Args:
        device: "cuda" or "cpu".
        arguments: of attach; None: not watched.
        steps: how many are asked for.
        name: of the run.
        folder: for files of the scenario.
        looks: whether it is counted who waits for the device, which takes time itself.
    """

    def __init__(
        self, device: str, arguments: dict[str, Any] | None, steps: int, name: str, folder: Path, *, looks: bool = True
    ) -> None:
        self.device, self.arguments, self.num_steps, self.name = device, arguments, steps, name
        self.folder, self.looks, self.cuda = folder, looks, device == "cuda"
        self.losses: list[Any] = []
        self.watches: list[Any] = []
        self.models: list[nn.Module] = []
        self.summaries: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        self.ended = 0  # steps that a watch must have seen
        self.notes: dict[str, Any] = {}
        self.peak = 0
        self.host: list[float] = []
        self._events: list[Any] = []
        self.step = 0
        self.waits = Waits(self.cuda)
        self.log = Kept()
        logger = logging.getLogger("fp8watch")
        self._level, self._logger = logger.level, logger
        logger.setLevel(logging.INFO)
        logger.addHandler(self.log)
        self.tee = Tee(sys.stderr)
        sys.stderr = self.tee  # type: ignore[assignment]
        gc.collect()
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated() if self.cuda else 0
        torch.manual_seed(0)

    # ---- for scenarios

    @property
    def watched(self) -> bool:
        """Whether a watch is to be attached."""
        return self.arguments is not None

    def size(self, device: int, rehearsed: int) -> int:
        """A size on the device, and one for a rehearsal on a CPU."""
        return device if self.cuda else rehearsed

    def keep(self, model: nn.Module) -> None:
        """The weights of `model` belong to what is compared."""
        self.models.append(model)

    def attach(self, model: nn.Module, *, keep: bool = True, **more: Any) -> Any:
        """Attach where this training is watched; returns the watch, or None."""
        if keep:
            self.keep(model)
        if self.arguments is None:
            return None
        watch = fp8watch.attach(model, **({"run": self.name, "run_id": self.name} | self.arguments | more))
        self.watches.append(watch)
        return watch

    def adapter_arguments(self) -> dict[str, Any]:
        """Arguments of attach for an adapter of a trainer."""
        return {"run": self.name, "run_id": self.name} | (self.arguments or {})

    def each(self, steps: int | None = None) -> Iterator[int]:
        """Steps, measured."""
        for _ in range(self.num_steps if steps is None else steps):
            self.begin()
            yield self.step
            self.end()

    def begin(self) -> None:
        """A step begins."""
        if self.looks and self.step >= FIRST_WATCHED_STEP:
            self.waits.begin()
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        self.host.append(time.perf_counter())

    def end(self) -> None:
        """A step has ended."""
        self.waits.end()
        self.step += 1
        self.ended += 1

    def loss(self, value: Tensor | float) -> None:
        """Of a step."""
        self.losses.append(value.detach().clone() if isinstance(value, Tensor) else float(value))

    # ---- for who measures

    def finish(self) -> None:
        """The training is over: read what it gave, and detach."""
        for watch in self.watches:
            watch.flush(10)
            self._summarise(watch)
            watch.detach()  # ends a step of an optimizer that stepped inside backward
            behind = watch.summary()
            self.summaries[-1] |= {k: behind[k] for k in ("num_steps", "internal_errors")}
        if self.cuda:
            torch.cuda.synchronize()
            self.peak = torch.cuda.max_memory_allocated() - self._before
        self.losses = [float(loss) for loss in self.losses]

    def _summarise(self, watch: Any) -> None:
        self.summaries.append(watch.summary())
        registration = getattr(getattr(watch, "_recorder", None), "_registration", None)
        if registration is not None:
            self.facts |= registration.session.facts

    def weights(self) -> dict[str, Tensor]:
        """Of all models that were kept, on the host."""
        found = {}
        for i, model in enumerate(self.models):
            for name, value in model.state_dict().items():
                if isinstance(value, Tensor):
                    plain = value.to_local() if hasattr(value, "to_local") else value
                    found[f"{i}.{name}"] = plain.detach().to("cpu", copy=True)
        return found

    def times(self) -> tuple[float, float]:
        """Median milliseconds of a step on the device, and on the host."""
        if len(self.host) < FIRST_TIMED_STEP + 3:
            return math.nan, math.nan
        host = [(b - a) * 1e3 for a, b in itertools.pairwise(self.host[FIRST_TIMED_STEP:])]
        if not self.cuda:
            return statistics.median(host), statistics.median(host)
        device = [a.elapsed_time(b) for a, b in itertools.pairwise(self._events[FIRST_TIMED_STEP:])]
        return statistics.median(device), statistics.median(host)

    def close(self) -> None:
        """Put the process back as it was."""
        self.waits.close()
        sys.stderr = self.tee._under
        self._logger.removeHandler(self.log)
        self._logger.setLevel(self._level)
        self.models, self.watches = [], []
        torch._dynamo.reset()
        gc.collect()


def left_behind(models: list[nn.Module]) -> list[str]:
    """Names of modules whose class is still one of fp8watch's after detach."""
    return [n for m in models for n, part in m.named_modules() if type(part).__module__.startswith("fp8watch")][:5]


def spooled(folder: Path) -> dict[str, int]:
    """What lies in a spool: sessions, records, tile maps, bytes, and what is damaged."""
    out = {"sessions": 0, "records": 0, "maps": 0, "bytes": 0, "damaged": 0, "other_files": 0}
    sessions = set()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        out["bytes"] += path.stat().st_size
        if path.suffix != SEGMENT_SUFFIX:
            out["other_files"] += 1
            continue
        contents = read_segment(path)
        sessions.add(path.name.rsplit("-", 1)[0])
        out["damaged"] += contents.num_damaged_bytes + contents.num_lost_frames
        for parcel in contents.parcels:
            out["records" if parcel.kind == Kind.BATCH else "maps"] += parcel.amount
    out["sessions"] = len(sessions)
    return out
