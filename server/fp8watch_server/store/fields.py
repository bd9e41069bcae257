"""Fields that charts can show: those of the sketch, and derived ones.

Shapes:     Records [N] -> values [N] and whether they were measured [N]
Thread:     any; only pure functions

Source of the formulas: docs/glossary.md. What was not measured, or is undefined for a record (a ratio with denominator
0), is absent: never 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8watch_agent.record import FIELD_BY_NAME, FIELDS, Measured, holds
from fp8watch_server.store.light_rounding import WITHIN

Array = npt.NDArray[Any]
Columns = dict[str, Array]

NAMES_OF_CLASS = {1: "nan", 2: "inf", 3: "-inf"}


class FieldError(ValueError):
    """An unknown field."""


@dataclass(frozen=True)
class SeriesField:
    """One chartable number per record."""

    name: str
    needs: tuple[str, ...]  # columns of the sketch
    groups: Measured  # all of these must have been measured
    unit: str
    doc: str
    worst: str  # max | min: which end is bad
    values: Callable[[Columns], Array]
    defined: Callable[[Columns], Array] | None = None  # where the value is defined
    derived: bool = True

    @property
    def rounded_within(self) -> float:
        """Largest relative error of its values in light records in order (light_rounding); 0: they are not rounded."""
        return max((WITHIN.get(name, 0.0) for name in self.needs), default=0.0)

    @property
    def said(self) -> dict[str, Any]:
        """What answers say of it: its name and unit, and `rounded_within` where it is rounded."""
        within = self.rounded_within
        return {"field": self.name, "unit": self.unit, **({"rounded_within": within} if within else {})}


def _ratio(top: Array, bottom: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.asarray(top.astype(np.float64) / bottom.astype(np.float64))


def _db(ratio: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(10.0 * np.log10(ratio))


_C, _A, _R = Measured.COUNTS, Measured.AMAX, Measured.RATIO
_CK = _C | Measured.CAST
_E, _M = Measured.ENERGIES, Measured.MOMENTS

_DERIVED: tuple[SeriesField, ...] = (
    SeriesField(
        "tile_sqnr_db",
        ("tile_noise_ratio_sum", "num_tiles", "num_zero_tiles"),
        _E | _C | _A,
        "dB",
        "−10·log10 of the mean over non-zero tiles of noise energy / signal energy",
        "min",
        lambda c: -_db(_ratio(c["tile_noise_ratio_sum"], c["num_tiles"] - c["num_zero_tiles"])),
        lambda c: c["num_tiles"] > c["num_zero_tiles"],
    ),
    SeriesField(
        "sqnr_db",
        ("signal_energy", "noise_energy"),
        _E,
        "dB",
        "10·log10 of signal energy / noise energy of the whole operand",
        "min",
        lambda c: _db(_ratio(c["signal_energy"], c["noise_energy"])),
        lambda c: c["signal_energy"] != 0,
    ),
    SeriesField(
        "gain_error",
        ("gain_energy", "signal_energy"),
        _E | Measured.GAIN,
        "ratio",
        "Σ x·(dequantised x) / Σ x² − 1: what quantising adds to the size of an operand, or takes from it",
        "max",
        lambda c: _ratio(c["gain_energy"], c["signal_energy"]),
        lambda c: c["signal_energy"] != 0,
    ),
    SeriesField(
        "impact_rms",
        ("impact_energy", "num_impact_rows"),
        Measured.IMPACT,
        "nats",
        "RMS over sampled tokens of what this forward GEMM in FP8 changes of the loss, to first order",
        "max",
        lambda c: np.sqrt(_ratio(c["impact_energy"], c["num_impact_rows"])),
        lambda c: c["num_impact_rows"] > 0,
    ),
    SeriesField(
        "underflow_ratio",
        ("num_underflow", "num_nonzero"),
        _CK,
        "ratio",
        "non-zero elements that became 0 / non-zero elements",
        "max",
        lambda c: _ratio(c["num_underflow"], c["num_nonzero"]),
        lambda c: c["num_nonzero"] > 0,
    ),
    SeriesField(
        "saturated_ratio",
        ("num_saturated", "num_elements"),
        _CK,
        "ratio",
        "clipped elements / elements",
        "max",
        lambda c: _ratio(c["num_saturated"], c["num_elements"]),
        lambda c: c["num_elements"] > 0,
    ),
    SeriesField(
        "clip_depth",
        ("scale_ratio_max",),
        _R,
        "ratio",
        "largest amax·scale/FP8_MAX of a tile",
        "max",
        lambda c: c["scale_ratio_max"],
    ),
    SeriesField(
        "num_nonfinite",
        ("num_nan", "num_inf"),
        _C,
        "elements",
        "NaN and ±Inf before the cast; NaN alone where only codes were seen",
        "max",
        lambda c: c["num_nan"] + c["num_inf"],
    ),
    SeriesField(
        "kurtosis",
        ("moment2", "moment4", "num_elements"),
        _M | _C,
        "1",
        "n·Σx⁴/(Σx²)² of x over its tile's amax",
        "max",
        lambda c: _ratio(c["num_elements"] * c["moment4"], c["moment2"] ** 2),
        lambda c: c["moment2"] != 0,
    ),
)


def _plain(name: str) -> SeriesField:
    f = FIELD_BY_NAME[name]
    defined: Callable[[Columns], Array] | None = None
    needs: tuple[str, ...] = (name,)
    if name == "amax_min_nonzero":  # its default, Inf, means "no tile above 0" unless there was an Inf
        needs = (name, "amax_max")
        defined = lambda c: ~((c["amax_min_nonzero"] == np.inf) & (c["amax_max"] == 0))  # noqa: E731
    if name == "amax_steps_back":  # over ranks, of the one with the largest amax
        needs = (name, "amax_max")
    groups = Measured(0) if name in ("measured", "order", "num_calls") else f.group
    worst = "min" if f.merge == "min" else "max"
    return SeriesField(name, needs, groups, f.unit, f.doc, worst, lambda c: c[name], defined, derived=False)


def _with_rounding(f: SeriesField) -> SeriesField:
    within = f.rounded_within
    return (
        replace(f, doc=f"{f.doc}; of a light record in order within 2^{math.log2(within):.0f} of it") if within else f
    )


SERIES_FIELDS: dict[str, SeriesField] = {
    f.name: _with_rounding(f) for f in (*(_plain(f.name) for f in FIELDS if f.size == 1), *_DERIVED)
}


def series_field(name: str) -> SeriesField:
    """Look a field up.

    Raises:
        FieldError: for one that nobody knows; the text lists the known ones.
    """
    got = SERIES_FIELDS.get(name)
    if got is None:
        raise FieldError(f"field {name!r} is not known; known are {', '.join(sorted(SERIES_FIELDS))}")
    return got


def evaluate(field: SeriesField, columns: Columns) -> tuple[Array, npt.NDArray[np.bool_]]:
    """Values [N] in the field's own dtype (derived floats: float32), and a mask where they are measured and defined."""
    present = holds(columns["measured"], field.groups)
    if field.defined is not None:
        present &= field.defined(columns)
    values = field.values(columns)
    if field.derived and values.dtype == np.float64:  # the dtype of summaries: the same number from either source
        with np.errstate(over="ignore"):
            values = values.astype(np.float32)
    return values, np.asarray(present, dtype=bool)


def as_data(values: Array, present: npt.NDArray[np.bool_]) -> tuple[list[Any], list[list[Any]]]:
    """A JSON-safe list (null where absent or non-finite) and [[index, "nan" | "inf" | "-inf"], …]."""
    out: list[Any] = values.tolist()
    nonfinite: list[list[Any]] = []
    finite = np.isfinite(values)
    for i in np.flatnonzero(~(finite & present)).tolist():
        if present[i]:
            nonfinite.append([i, name_of(out[i])])
        out[i] = None
    return out, nonfinite


def name_of(value: float) -> str:
    """Return "nan", "inf" or "-inf"."""
    return "nan" if value != value else "inf" if value > 0 else "-inf"


def badness(values: Array, present: npt.NDArray[np.bool_], worst: str) -> npt.NDArray[np.float64]:
    """One order for all fields: larger is worse, NaN is worst, and absent is −Inf: below all."""
    with np.errstate(invalid="ignore"):  # a signalling NaN is a NaN, too
        v = values.astype(np.float64)
    v = -v if worst == "min" else v
    v[np.isnan(v)] = np.inf
    return np.where(present, np.maximum(v, -np.finfo(np.float64).max), -np.inf)
