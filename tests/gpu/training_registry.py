"""Trainings by name, and the ways in which attach is called on them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from training_run import Run

MODES: dict[str, Callable[[], dict[str, Any]]] = {
    "defaults": dict,
    "observe": lambda: {"recipe": "observe"},
    "observe-all": lambda: {"recipe": "observe", "overhead_budget": None, "tile_maps": "all"},
    "observe-delayed": lambda: {"recipe": _recipes().observe(_recipes().delayed())},
    "observe-reference": lambda: {"recipe": "observe", "backend": "reference"},
    "defaults-all": lambda: {"overhead_budget": None, "tile_maps": "all", "hash_every": 4},
    "emulated": lambda: {"gemm": "emulated"},
    "current": lambda: {"gemm": "emulated", "recipe": "current"},
    "delayed": lambda: {"gemm": "emulated", "recipe": "delayed"},
    "mxfp8": lambda: {"gemm": "emulated", "recipe": "mxfp8"},
    "rowwise": lambda: {"gemm": "emulated", "recipe": "rowwise"},
    "nvfp4": lambda: {"gemm": "emulated", "recipe": "nvfp4"},
    "current-auto": lambda: {"recipe": "current"},  # on a GPU observed, with the reason in the line
    "scaled_mm": lambda: {"gemm": "scaled_mm"},
    "scaled_mm-hybrid": lambda: {"gemm": "scaled_mm", "recipe": _recipes().blockwise(fp8_format="HYBRID")},
    "scaled_mm-fp32-scales": lambda: {"gemm": "scaled_mm", "recipe": _recipes().blockwise(power_2_scale=False)},
    "triton": lambda: {"gemm": "emulated", "backend": "triton"},
    "reference": lambda: {"gemm": "emulated", "backend": "reference"},
    "warmup": lambda: {"gemm": "emulated", "recipe": _recipes().blockwise(warmup_steps=5)},
    "backward-high": lambda: {"gemm": "emulated", "recipe": _recipes().blockwise(high_precision=["grad_output"])},
}
"""Arguments of attach."""
CUDA_MODES = ("scaled_mm", "scaled_mm-hybrid", "scaled_mm-fp32-scales", "triton")
BOTH = ("defaults", "observe")
THREE = ("defaults", "observe", "emulated")
ROOMS = (
    "training_loops",
    "training_ways",
    "training_shapes",
    "training_compiled",
    "training_families",
    "training_trainers",
    "training_processes",
    "training_faults",
    "training_timing",
)


def _recipes() -> Any:
    import fp8watch

    return fp8watch


@dataclass(frozen=True)
class Scenario:
    """A training, and how it is run."""

    name: str
    train: Callable[[Run], None]
    modes: tuple[str, ...]
    steps: int
    timeout_s: int
    cuda: bool  # cannot be rehearsed on a CPU
    world: int  # processes
    held: bool  # against the same training without a watch
    deterministic: bool
    alone: bool  # nothing runs beside it
    apart: bool  # in a process that no other training runs in: what it does to a process stays there
    needs: str  # a package that is not fp8watch's
    weight: int  # what is long begins first


SCENARIOS: dict[str, Scenario] = {}


def scenario(
    modes: tuple[str, ...] = BOTH,
    *,
    steps: int = 14,
    timeout_s: int = 90,
    cuda: bool = False,
    world: int = 1,
    held: bool = True,
    deterministic: bool = True,
    alone: bool = False,
    apart: bool = False,
    needs: str = "",
    weight: int = 1,
) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Enter a training under the name of its function."""

    def enter(train: Callable[[Run], None]) -> Callable[[Run], None]:
        name = train.__name__
        own = apart or alone or world > 1
        SCENARIOS[name] = Scenario(
            name, train, modes, steps, timeout_s, cuda, world, held, deterministic, alone, own, needs, weight
        )
        return train

    return enter


def scenarios() -> dict[str, Scenario]:
    """All of them."""
    for room in ROOMS:
        importlib.import_module(room)
    return SCENARIOS
