"""The one table of the detectors' thresholds: those of the engine, then those that each mode brings.

Shapes:     name -> Threshold; Thresholds is the frozen set of values of one run
Thread:     any; only data

A rules file may change any of them for some runs (`fp8watch_server.detect.rules`). The bounds of the scale invariant
are not in the table: they are arithmetic, and there is nothing to tune.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from fp8watch_server.detect.limits import SPEC, Threshold, threshold
from fp8watch_server.detect.modes import MODE_BY_SLUG, SLUGS

__all__ = ["TABLE", "Threshold", "Thresholds"]

_ENGINE = (
    # how the engine counts
    threshold("warmup_steps", 50, "steps", 0, 100_000, SPEC),
    threshold("after_lr_warmup_steps", 10, "steps", 0, 100_000, SPEC),
    threshold("min_baseline_steps", 12, "steps", 4, 32, "a median of fewer values moves by more than a third of σ"),
    threshold("close_after_steps", 20, "steps", 1, 10_000, SPEC),
    threshold("late_rank_s", 10, "s", 0, 3600, SPEC),
    threshold("heartbeat_s", 10, "s", 0.1, 3600, "the agent's longest silence is its retry of 30 s: 3 heartbeats"),
    threshold("missing_heartbeats", 3, "count", 1, 1000, SPEC),
    # spread of log2 amax from step to step that is believed, by role
    threshold("input_floor_octaves", 0.12, "octaves", 0.001, 8, SPEC),
    threshold("weight_floor_octaves", 0.01, "octaves", 0.001, 8, SPEC),
    threshold("grad_output_floor_octaves", 0.5, "octaves", 0.001, 8, SPEC),
)

_LISTED = (
    "optimizer-divergence",
    "outlier-growth",
    "attention-logit-growth",
    "delayed-clip",
    "frozen-scale",
    "scale-collapse",
    "gradient-underflow",
    "chronic-quantization-noise",
    "dying-tile",
    "dead-layer",
    "bad-batch",
    "silent-data-corruption",
    "accumulator-precision",
    "kernel-output-fault",
    "recipe-mismatch",
)
"""Modes in the order of the table; those of others stand behind them, by number."""


_LATER = (
    "loss_level_min",
    "chronic_gain",
    "destroyed_gain",
    "starved_looks",
    "expert_octaves",
    "chronic_sqnr_e2m1_db",
    "standing_looks",
    "repeated_steps",
    "gradient_factor_octaves",
    "collapse_skipped_steps",
)
"""Thresholds that a mode of the table was given later: `fp8watch rules list` keeps the order that people know."""


def _by_mode() -> Iterator[Threshold]:
    others = [slug for slug in SLUGS if slug not in _LISTED]
    every = [t for slug in (*_LISTED, *others) for t in MODE_BY_SLUG[slug].thresholds]
    yield from sorted(every, key=lambda t: _LATER.index(t.name) if t.name in _LATER else -1)


TABLE: tuple[Threshold, ...] = (*_ENGINE, *_by_mode())

BY_NAME: Mapping[str, Threshold] = MappingProxyType({t.name: t for t in TABLE})


class Thresholds:
    """The values of one run, as attributes. Frozen; unknown names raise."""

    __slots__ = ("_values", "disabled")
    _values: dict[str, float]
    disabled: frozenset[str]

    def __init__(self, changed: Mapping[str, float] | None = None, disabled: frozenset[str] = frozenset()) -> None:
        values = {t.name: t.default for t in TABLE}
        for name, value in (changed or {}).items():
            if name not in values:
                raise KeyError(f"{name!r} is no threshold; known are {', '.join(values)}")
            values[name] = value
        object.__setattr__(self, "_values", values)
        object.__setattr__(self, "disabled", disabled)

    def __getattr__(self, name: str) -> float:
        try:
            got: float = object.__getattribute__(self, "_values")[name]
        except KeyError:
            raise AttributeError(name) from None
        return got

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name}: thresholds are frozen; make new ones")

    def changed(self) -> dict[str, float]:
        """Those that are not the default."""
        return {t.name: v for t in TABLE if (v := self._values[t.name]) != t.default}


DEFAULTS = Thresholds()
