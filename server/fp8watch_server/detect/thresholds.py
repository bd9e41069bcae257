"""The one table of the detectors' thresholds: default, unit, possible range, and where the default comes from.

Upstream:   fp8watch_server.detect.rules     Downstream: fp8watch_server.detect.engine
Shapes:     name -> Threshold; Thresholds is the frozen set of values of one run
Thread:     any; only data

A rules file may change any of them for some runs (`fp8watch_server.detect.rules`). The bounds of the scale invariant
are not in the table: they are arithmetic, and there is nothing to tune.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["TABLE", "Threshold", "Thresholds"]


@dataclass(frozen=True)
class Threshold:
    """One number that a detector compares with."""

    name: str
    default: float
    unit: str  # steps | octaves | octaves/step | dB | share | ratio | s | logit | count
    low: float  # smallest and largest value that can be meant
    high: float
    source: str
    whole: bool = False


def _t(name: str, default: float, unit: str, low: float, high: float, source: str) -> Threshold:
    return Threshold(name, default, unit, low, high, source, whole=unit in ("steps", "count"))


_SPEC = "failure catalogue"
_TRAIN = "recorded training, tuning split"

TABLE: tuple[Threshold, ...] = (
    # how the engine counts
    _t("warmup_steps", 50, "steps", 0, 100_000, _SPEC),
    _t("after_lr_warmup_steps", 10, "steps", 0, 100_000, _SPEC),
    _t("min_baseline_steps", 12, "steps", 4, 32, "a median of fewer values moves by more than a third of σ"),
    _t("close_after_steps", 20, "steps", 1, 10_000, _SPEC),
    _t("late_rank_s", 10, "s", 0, 3600, _SPEC),
    _t("heartbeat_s", 10, "s", 0.1, 3600, "the agent's longest silence is its retry of 30 s: 3 heartbeats"),
    _t("missing_heartbeats", 3, "count", 1, 1000, _SPEC),
    # spread of log2 amax from step to step that is believed, by role
    _t("input_floor_octaves", 0.12, "octaves", 0.001, 8, _SPEC),
    _t("weight_floor_octaves", 0.01, "octaves", 0.001, 8, _SPEC),
    _t("grad_output_floor_octaves", 0.5, "octaves", 0.001, 8, _SPEC),
    # optimizer-divergence
    _t("divergence_rate_octaves", 0.05, "octaves/step", 0.001, 8, "LR ×30 grows 0.2–0.5, a start from scratch 0.012"),
    _t("divergence_total_octaves", 0.20, "octaves", 0.01, 16, _TRAIN),
    _t("divergence_layers", 0.6, "share", 0.1, 1, "most layers: the optimizer moves all of them, a quantiser one"),
    # outlier-growth
    _t("outlier_weight_octaves", 0.8, "octaves", 0.05, 16, "healthy layers part by 0.6 octave in 100 steps"),
    _t("outlier_input_octaves", 1.5, "octaves", 0.2, 16, _TRAIN),
    _t("outlier_leap_octaves", 6, "octaves", 1, 64, _SPEC),
    _t("outlier_kurtosis_octaves", 1.0, "octaves", 0.1, 16, _TRAIN),
    _t("outlier_layers", 0.4, "share", 0.01, 0.9, "one layer or a few: more is the optimizer"),
    # attention-logit-growth
    _t("attention_logit_warning", 100, "logit", 1, 1e9, _SPEC),
    _t("attention_logit_critical", 1e4, "logit", 1, 1e9, _SPEC),
    _t("attention_logit_rate_octaves", 0.03, "octaves/step", 0.001, 4, _TRAIN),
    _t("attention_logit_floor", 20, "logit", 0.1, 1e9, "below it growth is the model finding its feet"),
    # delayed-clip, frozen-scale, scale-collapse
    _t("clip_depth", 1.5, "ratio", 1.01, 1e6, _SPEC),
    _t("clip_depth_grad_output", 16, "ratio", 1.01, 1e6, _SPEC),
    _t("clip_sqnr_db", 24, "dB", 1, 60, _SPEC),
    _t("frozen_clip_depth", 1.1, "ratio", 1.001, 1e6, _SPEC),
    _t("frozen_steps", 6, "steps", 2, 10, _SPEC),
    _t("frozen_drift_octaves", 0.25, "octaves", 0.01, 16, "twice the floor of inputs"),
    _t("collapse_octaves", 3, "octaves", 0.5, 32, _SPEC),
    _t("collapse_window_steps", 100, "steps", 8, 100_000, _SPEC),
    _t("collapse_halvings", 3, "count", 1, 100, _SPEC),
    # gradient-underflow, chronic-quantization-noise
    _t("underflow_points", 0.05, "share", 0.001, 1, _SPEC),
    _t("underflow_alarm_points", 0.08, "share", 0.001, 1, "a change of domain moves healthy gradients by 6 points"),
    _t("chronic_sqnr_e4m3_db", 28, "dB", 1, 60, _SPEC),
    _t("chronic_sqnr_e5m2_db", 22, "dB", 1, 60, _SPEC),
    _t("chronic_underflow", 0.10, "share", 0.001, 1, _SPEC),
    _t("sqnr_drop_db", 3, "dB", 0.1, 60, _SPEC),
    # dying-tile, dead-layer
    _t("dying_log2_amax", -90, "octaves", -149, 0, _SPEC),
    _t("dying_fall_octaves", 6, "octaves", 1, 140, _TRAIN),
    _t("dead_octaves", 3, "octaves", 0.5, 64, _SPEC),
    # bad-batch
    _t("loss_jump_sigma", 6, "ratio", 1, 1000, "the public spike rule's 6σ, over a median that a spike does not move"),
    _t("loss_jump_min", 0.2, "share", 0.001, 100, _TRAIN),
    _t("grad_norm_jump", 2.5, "ratio", 1.1, 1e6, _TRAIN),
    _t("recover_steps", 5, "steps", 1, 100, _SPEC),
    # silent-data-corruption
    _t(
        "corruption_jump_octaves",
        0.3,
        "octaves",
        0.01,
        64,
        "30 × the floor of weights; the largest healthy step is 0.04",
    ),
    # accumulator-precision, kernel-output-fault
    _t("gemm_error", 0.002, "ratio", 1e-6, 1, "a 14-bit accumulator without promotion: 0.35 % RMS at K = 4096"),
    _t("gemm_gain", 0.05, "ratio", 1e-3, 1, "a gain off by 5 % is no rounding"),
    # what is compared between sessions
    _t("resume_scale_octaves", 2, "octaves", 0.5, 32, "a saved scale continues within the spread of gradients, 2σ"),
)

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
