"""The sketch: what one site says about one step. The one table of its fields.

Shapes:     one slab row = one ROW item, a packed little-endian structured dtype
Thread:     any; only data and pure functions

Slab layout, ring, wire, store and API derive from `FIELDS`. A later field has a group of its own (`EVERY_CALL`): where no
backend computes it, it is absent everywhere, and what a backend fills is added to that backend. docs/how-to/
add-a-sketch-field.md has the steps; tests/house/test_sketch_fields.py names what a field still lacks.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Merge = Literal["sum", "max", "min", "first", "of_amax_max", "of_noise_max", "or", "keep"]

NUM_AMAX_BUCKETS = 64
AMAX_BUCKET_OFFSET = 48
"""Bucket k = 1…63 of amax_hist holds floor(log2(amax / 1.75)) = k − 48, the outermost what lies beyond; bucket 0 holds the zero tiles.
448 = 1.75·2^8, 57344 = 1.75·2^15."""
NUM_DEPTH_BUCKETS = 32


class Measured(IntFlag):
    """Groups of fields, one bit each: what was measured for this record. What is not, is absent, never 0.

    A bit up to GEMM is set if any call of a record measured the group, one above CAST only if every call did
    (`EVERY_CALL`), but for `SOME_CALLS`. A later field has a bit above CAST, alone or with the fields that are always
    filled together with it.
    """

    COUNTS = 1
    AMAX = 2
    SCALE = 4
    RATIO = 8
    ENERGIES = 16
    MOMENTS = 32
    DEPTH = 64
    HASH = 128
    GEMM = 256
    CODES = 512  # COUNTS and AMAX come from codes alone, which do not tell what the cast did
    CAST = 1024  # is never set: a field that has it needs a record without CODES
    QUANTISER = 8192  # what a GEMM reads was held against its operand
    OUTPUTS = 16384  # the output of a GEMM was looked at, and something in it was not finite
    GAIN = 32768  # goes with ENERGIES
    IMPACT = 65536  # what FP8 changed of sampled rows of an output met the gradient of the loss
    WINDOW = 131072  # the record stands for several steps (fp8watch.session.window_merge); no device fills it


SOME_CALLS = Measured.QUANTISER | Measured.OUTPUTS | Measured.IMPACT | Measured.WINDOW
"""Groups of looks that are taken at some calls and on some ranks, in turn: a merged record holds them if any had one. And
WINDOW: over ranks, a record stands for several steps if that of any rank does."""

LATER = Measured(sum(group for group in Measured if group > Measured.CAST))
"""Groups whose fields lie behind those that every backend fills."""

EVERY_CALL = LATER & ~SOME_CALLS
"""Groups that a merged record holds only if every call and every rank in it measured them: a backend that does not know
a group makes it absent, not smaller."""

WITH_ENERGIES = Measured.GAIN
"""Of these, groups of full statistics: only calls and ranks that measured energies are asked."""


class StepStatus(IntEnum):
    """How a step ended."""

    OK = 0
    SKIPPED = 1  # no update: GradScaler found a non-finite gradient
    ABORTED = 2  # an exception, SIGTERM or the end of the process came first


@dataclass(frozen=True)
class Field:
    """One field of the sketch.

    `default` is the value before anything was merged; on the wire a column of defaults is left out. `code` is the number
    of its column in stored blocks, 0 … 255, and never changes; 0, 1 and 33 … 36 are the store's own, histograms are
    numbered apart. `label` is what pages call it; without one they show its name.
    """

    name: str
    dtype: str
    merge: Merge
    group: Measured
    default: float
    unit: str
    doc: str
    code: int
    size: int = 1  # elements per record: 1 for scalars, 2–3 for coordinates, 64 or 32 for histograms
    label: str = ""


_INF = float("inf")
_C, _A, _S, _R = Measured.COUNTS, Measured.AMAX, Measured.SCALE, Measured.RATIO
_CK, _AK = Measured.COUNTS | Measured.CAST, Measured.AMAX | Measured.CAST
_E, _M, _D, _H = Measured.ENERGIES, Measured.MOMENTS, Measured.DEPTH, Measured.HASH
_G, _Q, _O, _B = Measured.GEMM, Measured.QUANTISER, Measured.OUTPUTS, Measured.GAIN
_I, _W = Measured.IMPACT, Measured.WINDOW

FIELDS: tuple[Field, ...] = (
    # float64 sums
    Field("signal_energy", "<f8", "sum", _E, 0, "x²", "Σ x² over finite elements", 16),
    Field("noise_energy", "<f8", "sum", _E, 0, "x²", "Σ (x − dequantised x)² over finite elements", 17),
    Field("gain_energy", "<f8", "sum", _B, 0, "x²", "Σ x · (dequantised x − x) over finite elements", 51,
          label="gain energy"),
    Field("impact_energy", "<f8", "sum", _I, 0, "nats²",
          "Σ over sampled rows of (∂ℒ/∂y · (y − what F.linear gives))²", 52, label="impact energy"),
    Field("tile_noise_ratio_sum", "<f8", "sum", _E, 0, "ratio", "Σ over tiles of noise energy / signal energy", 6),
    Field("moment2", "<f8", "sum", _M, 0, "1", "Σ (x / tile amax)² over finite elements", 24),
    Field("moment4", "<f8", "sum", _M, 0, "1", "Σ (x / tile amax)⁴ over finite elements", 25),
    # float64 maximum
    Field("tile_noise_ratio_max", "<f8", "max", _E, 0, "ratio", "largest noise energy / signal energy of a tile", 18),
    # int64 sums
    Field("num_elements", "<i8", "sum", _C, 0, "elements", "elements seen, padding left out", 11),
    Field("num_nonzero", "<i8", "sum", _C, 0, "elements", "x ≠ 0 (NaN and Inf count as non-zero)", 9),
    Field("num_saturated", "<i8", "sum", _CK, 0, "elements",
          "finite x with |x·scale| ≥ the midpoint above FP8_MAX", 12),
    Field("num_underflow", "<i8", "sum", _CK, 0, "elements", "x ≠ 0 that became 0", 10),
    Field("num_nan", "<i8", "sum", _C, 0, "elements", "NaN before the cast", 13),
    Field("num_inf", "<i8", "sum", _CK, 0, "elements", "±Inf before the cast", 14),
    Field("depth_hist", "<i8", "sum", _D, 0, "elements",
          "octave buckets of log2(tile amax / |x|)", 1, NUM_DEPTH_BUCKETS),
    Field("output_num_nonfinite", "<i8", "sum", _G, 0, "elements",
          "NaN and ±Inf in the sampled output of the site's GEMM", 37),
    Field("num_nonfinite_outputs", "<i8", "sum", _O, 0, "elements",
          "NaN and ±Inf in the output of the site's GEMM; 1 where they were not counted", 44,
          label="non-finite outputs"),
    Field("num_nan_codes", "<i8", "sum", _Q, 0, "elements",
          "NaN that the GEMM reads where the operand is finite, in sampled tiles", 45, label="NaN codes"),
    Field("num_off_grid", "<i8", "sum", _Q, 0, "elements",
          "elements that the GEMM reads further than half a step from the operand, in sampled tiles", 46,
          label="codes off the grid"),
    # a hash is compared across replicas, never merged
    Field("weight_hash", "<i8", "keep", _H, 0, "bits",
          "Σ bits(element i)·odd(i) mod 2^64, read as two's complement", 28),
    # int32 sums
    Field("num_tiles", "<i4", "sum", _C, 0, "tiles", "tiles seen", 7),
    Field("num_zero_tiles", "<i4", "sum", _A, 0, "tiles", "amax 0: all zero, or NaN only", 8),
    Field("num_eps_tiles", "<i4", "sum", _A, 0, "tiles", "0 < amax < eps: clamped", 21),
    Field("num_sentinel_tiles", "<i4", "sum", _AK, 0, "tiles", "amax Inf: the scale was forced to 1", 19),
    Field("num_off_scale_tiles", "<i4", "sum", _R, 0, "tiles",
          "scale invariant broken, or scale not finite and positive", 20),
    Field("num_calls", "<i4", "sum", _C, 0, "calls", "quantisations merged into this record (micro-batches)", 27),
    Field("num_checked_tiles", "<i4", "sum", _Q, 0, "tiles",
          "sampled tiles that were held against their operand", 47, label="tiles held against the operand"),
    Field("num_zeroed_tiles", "<i4", "sum", _Q, 0, "tiles",
          "sampled tiles of which the GEMM reads zeros only, and whose amax is above the flush limit", 48,
          label="tiles that became zero"),
    Field("num_wrong_scales", "<i4", "sum", _Q, 0, "tiles",
          "sampled tiles whose scale_inv is not what their amax gives", 49, label="wrong scales"),
    Field("num_impact_rows", "<i4", "sum", _I, 0, "rows",
          "sampled rows of the output whose impact on the loss was taken", 53, label="rows with their impact"),
    Field("amax_hist", "<i4", "sum", _A, 0, "tiles", "octave buckets of the tile amax", 0, NUM_AMAX_BUCKETS),
    # float32 maxima and minima
    Field("amax_max", "<f4", "max", _A, 0, "x", "largest tile amax; Inf where an element is", 3),
    Field("scale_inv_max", "<f4", "max", _S, 0, "1", "largest scale_inv of a tile", 4),
    Field("scale_ratio_max", "<f4", "max", _R, 0, "ratio", "largest amax·scale/FP8_MAX of a tile: the clip depth", 15),
    Field("gemm_error", "<f4", "max", _G, 0, "ratio", "RMS of (output − shadow) / RMS of shadow, on sampled rows", 38),
    Field("gemm_gain_max", "<f4", "max", _G, 0, "ratio", "largest Σ output·shadow / Σ shadow², on sampled rows", 39),
    Field("amax_min_nonzero", "<f4", "min", _A, _INF, "x", "smallest tile amax above 0", 23),
    Field("scale_inv_min", "<f4", "min", _S, _INF, "1", "smallest scale_inv of a tile", 5),
    Field("scale_ratio_min", "<f4", "min", _R, _INF, "ratio", "smallest amax·scale/FP8_MAX of a tile", 22),
    Field("gemm_gain_min", "<f4", "min", _G, _INF, "ratio", "smallest Σ output·shadow / Σ shadow²", 40),
    # coordinates, −1 where there is none
    Field("worst_tile", "<i4", "of_amax_max", _A, -1, "tile", "(row, column) of the tile of amax_max", 29, 2),
    Field("noise_tile", "<i4", "of_noise_max", _E, -1, "tile",
          "(row, column) of the tile of tile_noise_ratio_max", 30, 2),
    Field("off_scale_tile", "<i4", "first", _R, -1, "tile",
          "(row, column) of the worst off-scale tile of the first call that had one", 31, 2),
    Field("fault_tile", "<i4", "first", _Q, -1, "tile",
          "(row, column) of the first sampled tile that the quantiser got wrong", 50, 2),
    Field("first_nonfinite", "<i4", "first", _C, -1, "element", "(row, column, call) of the first NaN or Inf", 32, 3),
    # steps of a window, back from the record's own
    Field("window_steps_back", "<i4", "max", _W, 0, "steps",
          "from the first step that the record stands for to its own; 0: its own step alone", 54,
          label="steps of the window"),
    Field("amax_steps_back", "<i4", "of_amax_max", _W, 0, "steps", "from the step in which amax_max lay to the record's own",
          55, label="steps since the largest amax"),
    # bookkeeping
    Field("order", "<i4", "first", _C, -1, "index", "place in the order of execution of the step's first call", 26),
    Field("measured", "<i4", "or", _C, 0, "bits", "Measured: groups of fields that this record holds", 2),
)  # fmt: skip

FIELD_BY_NAME: dict[str, Field] = {f.name: f for f in FIELDS}
HISTOGRAMS = ("amax_hist", "depth_hist")
QUANTISER_FAULTS = ("num_nan_codes", "num_off_grid", "num_zeroed_tiles", "num_wrong_scales")
"""Counts of the group QUANTISER that are 0 whatever the data are."""


def holds(measured: npt.NDArray[np.int32], groups: Measured) -> npt.NDArray[np.bool_]:
    """Which records hold all of some groups of fields, by their field `measured`. [N] -> bool [N]"""
    wanted = int(groups & ~Measured.CAST)
    asked = wanted | int(Measured.CODES) if groups & Measured.CAST else wanted
    return np.asarray((measured & asked) == wanted)


_BASE: dict[str, Any] = {"<f8": np.float64, "<i8": np.int64, "<i4": np.int32, "<f4": np.float32}


def _layout() -> tuple[Field, ...]:
    """Fields that every backend fills lie first: kernels write them section by section, a section of one dtype and one
    way of merging with one operation. Later ones lie behind them, the wide before the narrow."""
    later = [f for f in FIELDS if f.group & LATER]
    return (*(f for f in FIELDS if f not in later), *sorted(later, key=lambda f: -np.dtype(f.dtype).itemsize))


def _row_dtype() -> np.dtype[np.void]:
    members: list[Any] = [(f.name, f.dtype) if f.size == 1 else (f.name, f.dtype, (f.size,)) for f in LAYOUT]
    odd = np.dtype(members).itemsize % 8
    if odd:  # rows stay aligned to 8 bytes, so that typed views exist; named, or numpy drops it when it joins arrays
        members.append(("padding", f"V{8 - odd}"))
    return np.dtype(members)


LAYOUT: tuple[Field, ...] = _layout()
"""FIELDS in the order in which they lie in a row."""

ROW: np.dtype[np.void] = _row_dtype()
"""One record as it lies in the slab and in the ring: packed, little-endian, 8-byte aligned."""


def empty_rows(num_rows: int) -> npt.NDArray[np.void]:
    """Rows [num_rows] of ROW with every field at its default."""
    rows = np.zeros(num_rows, dtype=ROW)
    for f in FIELDS:
        if f.default != 0:
            rows[f.name] = f.default
    return rows


def lacking(measured: Any) -> Any:
    """Groups of EVERY_CALL that a record with calls does not hold: they are taken from whatever it is merged with.

    Works bit by bit, so `measured` may be an int, a numpy array or a tensor: a record has calls where COUNTS, bit 0, is set,
    and those of WITH_ENERGIES are asked of it where ENERGIES, bit 4, is.
    """
    of_calls = -(measured & int(Measured.COUNTS)) & int(EVERY_CALL & ~WITH_ENERGIES)
    of_energies = -((measured >> 4) & 1) & int(WITH_ENERGIES)
    return ~measured & (of_calls | of_energies)


def merge_measured(into: Any, other: Any) -> Any:
    """`measured` of two records merged. The way of merging that FIELDS calls "or"."""
    return (into | other) & ~(lacking(into) | lacking(other)) if EVERY_CALL else into | other


def merge_rows(into: npt.NDArray[np.void], other: npt.NDArray[np.void]) -> None:
    """Merge records of the same sites, row by row, in place: the host twin of the device kernels.

    Args:
        into: [N] of ROW, the earlier records.
        other: [N] of ROW, the later ones. Of two coordinates of equal rank the earlier stays.
    """
    later_amax = other["amax_max"] > into["amax_max"]
    later_noise = other["tile_noise_ratio_max"] > into["tile_noise_ratio_max"]
    for f in FIELDS:
        a, b = into[f.name], other[f.name]
        if f.merge == "sum":
            a += b
        elif f.merge == "max":
            np.maximum(a, b, out=a)
        elif f.merge == "min":
            np.minimum(a, b, out=a)
        elif f.merge == "or":
            a[:] = merge_measured(a, b)
        else:
            if f.merge == "of_amax_max":
                take = later_amax
            elif f.merge == "of_noise_max":
                take = later_noise
            elif f.merge == "first":
                take = (a if f.size == 1 else a[:, 0]) < 0
            else:
                take = a == f.default
            a[take] = b[take]


def site_id(module: str, operand: str, direction: str) -> int:
    """Identity of a site, equal on all ranks and in all sessions: 53 bits of blake2b, so that JSON keeps it exact."""
    digest = hashlib.blake2b(f"{module}\0{operand}\0{direction}".encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") & ((1 << 53) - 1)


STEP = np.dtype(
    [
        ("step", "<i8"),
        ("status", "<u1"),  # StepStatus
        ("present", "<u1"),  # StepPresent: which of the scalars below were given; an absent one is never 0
        ("time", "<f8"),  # seconds since 1970, by the clock of this process
        ("loss", "<f8"),
        ("grad_norm", "<f8"),
        ("lr", "<f8"),
        ("loss_scale", "<f8"),
    ]
)
"""One optimizer step."""


class StepPresent(IntFlag):
    """Which scalars of a step were given."""

    LOSS = 1
    GRAD_NORM = 2
    LR = 4
    LOSS_SCALE = 8


STEP_SCALARS: dict[str, StepPresent] = {
    "loss": StepPresent.LOSS,
    "grad_norm": StepPresent.GRAD_NORM,
    "lr": StepPresent.LR,
    "loss_scale": StepPresent.LOSS_SCALE,
}


PROBE = "probe"
"""`recipe` of what no quantiser reads: outputs of modules, and what is given to Linears in high precision. `gemm` where none made it."""


def is_probe(operand: str, recipe: str) -> bool:
    """Whether no quantiser reads a site of this operand and recipe."""
    return recipe == PROBE or operand == "output"


@dataclass(frozen=True)
class Site:
    """One quantised operand: static facts, sent once, and again when they change."""

    id: int
    module: str  # fully qualified name
    operand: str  # input | weight | grad_output; output: what a probed module returned
    direction: str  # rowwise | columnwise
    gemm: str  # fprop | dgrad | wgrad: the GEMM that reads it; of an output the one that made it
    order: int  # place in data-flow order within the model: modules as they run, input before weight before grad_output
    shape: tuple[int, int]  # of the operand as quantised, rows × columns, at registration
    tile: tuple[
        int, int
    ]  # (1, 128) or (128, 128), in the operand's own (untransposed) rows × columns: columnwise is (128, 1)
    format: str  # E4M3 | E5M2 | E2M1
    power_2_scale: bool
    eps: float
    recipe: str  # blockwise | current | delayed | mxfp8 | nvfp4 | rowwise | observe; PROBE
    backend: str
    evidence: dict[str, str]  # group of fields -> exact | derived | absent


@dataclass(frozen=True)
class TileMap:
    """Every tile of one site in one step. Arrays are [Mt·Kt], row-major."""

    site: int
    step: int
    shape: tuple[int, int]  # Mt, Kt
    amax: npt.NDArray[np.uint16]  # bfloat16 bits, rounded up in magnitude only by the cast
    scale_inv: npt.NDArray[np.float32]  # as the GEMM used it
    flags: npt.NDArray[np.uint8]  # TileFlag
    num_nonfinite: npt.NDArray[np.uint16]
    num_underflow: npt.NDArray[np.uint16]


class TileFlag(IntFlag):
    """What is to be said of one tile."""

    NAN = 1
    INF = 2
    SENTINEL = 4
    ZERO = 8
    EPS = 16
    OFF_SCALE = 32
    SATURATED = 64
    UNDERFLOW = 128
