"""Statistics of one call folded into the sections of a slab row, and merged into it, in torch.

Downstream: fp8watch.sketch.slab
Shapes:     one call -> sections of one ROW     Thread: training

The way of backends that do not fold by themselves; nothing here reads a value back to the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from fp8watch.numerics.per_tile import INF, Call, Invariant, PerTile
from fp8watch_agent.record import (
    AMAX_BUCKET_OFFSET,
    EVERY_CALL,
    FIELD_BY_NAME,
    LAYOUT,
    NUM_AMAX_BUCKETS,
    ROW,
    empty_rows,
    merge_measured,
)

_AMAX_BUCKET_SHIFT = 128 - AMAX_BUCKET_OFFSET  # exponent field of amax/1.75, rounded down, minus this = bucket
_TORCH_DTYPES = {"<f8": torch.float64, "<i8": torch.int64, "<i4": torch.int32, "<f4": torch.float32}


class Sections(NamedTuple):
    """One call as the sections of a slab row: fields side by side, of one dtype and one way of merging."""

    sums: torch.Tensor | None  # float64 [5]: signal_energy … moment4
    noise_max: torch.Tensor | None  # float64 [1]
    counts: torch.Tensor  # int64 [6] or [38]: num_elements … num_inf, and depth_hist when it was measured
    tiles: torch.Tensor  # int32 [70]: num_tiles … num_calls, amax_hist
    maxima: torch.Tensor  # float32 [3]: amax, scale_inv, scale_ratio
    minima: torch.Tensor  # float32 [3]
    worst_tile: torch.Tensor  # int32 [2], of the largest amax even if that is 0
    noise_tile: torch.Tensor | None  # int32 [2], of the largest noise ratio even if that is 0
    firsts: torch.Tensor | None  # int32 [4]: off_scale_tile, first_nonfinite without its call; None: nowhere
    measured: int
    later: Mapping[str, torch.Tensor]  # fields with a group of their own, of those that were measured


def row_span(row: torch.Tensor, first: str, last: str | None = None) -> torch.Tensor:
    """Typed view [num elements] of consecutive fields of a row (uint8 [ROW.itemsize]), `last` included."""
    names = [f.name for f in LAYOUT]
    fields = LAYOUT[names.index(first) : names.index(last or first) + 1]
    if len({(f.dtype, f.merge) for f in fields}) != 1:
        raise ValueError(f"fields {first} … {last} differ in dtype or in merging: they are not one section")
    assert ROW.fields is not None
    start = int(ROW.fields[first][1])
    stop = start + sum(np.dtype(f.dtype).itemsize * f.size for f in fields)
    return row[start:stop].view(_TORCH_DTYPES[FIELD_BY_NAME[first].dtype])


def sections(stats: Call) -> Sections:
    """Fold what a backend in plain torch left into the sections of one slab row, on the device."""
    tiles = stats.tiles
    assert tiles is not None
    # numbers are written on the device: copied there, each would make the host wait
    whole = partial(torch.full, dtype=torch.int32, device=stats.amax.device)
    bits = stats.amax.view(torch.int32) + (1 << 21)  # carries into the exponent where the mantissa is 1.75 or more
    buckets = bits.bitwise_right_shift_(23).sub_(_AMAX_BUCKET_SHIFT).clamp_(1, NUM_AMAX_BUCKETS - 1)
    found = [stats.amax.view(-1).argmax(keepdim=True)]
    if tiles.invariant is None:
        low, high = torch.stack((stats.amax, stats.scale_inv, tiles.scale_ratio)).view(3, -1).aminmax(dim=1)
        specials, worst = whole((4,), 0), None
    else:
        low, high, specials, worst, index = _unusual(stats, tiles, tiles.invariant, buckets)
        found.append(index)
    counts = [whole((1,), math.prod(stats.shape), dtype=torch.int64), tiles.counts.sum((1, 2))]
    sums = noise_max = noise_tile = None
    if tiles.heavy is not None:
        noise_max, index = tiles.heavy.noise_ratio.view(-1).max(0, keepdim=True)
        found.append(index)
        sums = tiles.heavy.sums
        counts.append(tiles.heavy.depth_hist)
    places = _places(found, -(-stats.shape[1] // stats.tile_shape[1]))
    if tiles.heavy is not None:
        noise_tile = places[-1]
    firsts = None
    if worst is not None or tiles.first_nonfinite is not None:
        off = whole((2,), -1) if worst is None else places[1].masked_fill(worst == 0, -1)
        firsts = torch.cat((off, whole((2,), -1) if tiles.first_nonfinite is None else tiles.first_nonfinite))
    return Sections(
        sums,
        noise_max,
        torch.cat(counts),
        torch.cat((whole((1,), stats.amax.numel()), specials, whole((1,), 1), histogram(buckets, NUM_AMAX_BUCKETS))),
        high,
        low,
        places[0],
        noise_tile,
        firsts,
        stats.measured,
        tiles.later and {name: tiles.later[name] for name in tiles.later if groups_of((name,)) & ~stats.measured == 0},
    )


def groups_of(later: Iterable[str]) -> int:
    """Bits of the groups that these fields have for themselves."""
    bits = 0
    for name in later:
        bits |= int(FIELD_BY_NAME[name].group & EVERY_CALL)
    return bits


def _unusual(
    stats: Call, tiles: PerTile, invariant: Invariant, buckets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What differs where tiles are zero, clamped, sentinel or off-scale: minima, maxima, how many there are of each, and how
    far off scale the worst is, with its index. Zero tiles go to bucket 0."""
    amax, scale_inv, ratio = stats.amax, stats.scale_inv, tiles.scale_ratio
    zero = amax == 0
    buckets.masked_fill_(zero, 0)
    clamped = (amax < stats.eps) & ~zero
    specials = torch.stack((zero, clamped, amax == INF, invariant.off_scale)).sum((1, 2), dtype=torch.int32)
    highest = torch.stack((amax, scale_inv, ratio.where(invariant.included, 0.0)))
    lowest = torch.stack((amax.masked_fill(zero, INF), scale_inv, ratio.where(invariant.included, INF)))
    return lowest.amin((1, 2)), highest.amax((1, 2)), specials, *invariant.badness.view(-1).max(0, keepdim=True)


def _places(indices: list[torch.Tensor], kt: int) -> torch.Tensor:
    """Row and column of tiles whose indices are given, each int64 [1], where Kt of them are a row: int32 [len, 2]."""
    index = torch.cat(indices)
    return torch.stack((index // kt, index % kt), dim=1).to(torch.int32)


def histogram(buckets: torch.Tensor, num_buckets: int) -> torch.Tensor:
    """Count int32 buckets 0 … num_buckets − 1, without reading the device: [num_buckets] of int64."""
    flat = buckets.view(-1)
    if flat.is_cpu:
        return torch.bincount(flat, minlength=num_buckets)
    # bincount reads the maximum back to the host on other devices
    counts = torch.zeros(num_buckets, dtype=torch.int64, device=flat.device)
    return counts.scatter_add_(0, flat.long(), torch.ones_like(flat, dtype=torch.int64))


class RowViews(NamedTuple):
    """One row by section."""

    sums: torch.Tensor
    noise_max: torch.Tensor
    counts: torch.Tensor
    counts_and_depth: torch.Tensor
    tiles: torch.Tensor
    maxima: torch.Tensor
    minima: torch.Tensor
    amax_max: torch.Tensor
    worst_tile: torch.Tensor
    noise_tile: torch.Tensor
    firsts: torch.Tensor  # off_scale_tile, row and column of first_nonfinite
    first_call: torch.Tensor  # call of first_nonfinite
    order: torch.Tensor
    measured: torch.Tensor
    later: Mapping[str, torch.Tensor]


@torch.inference_mode(False)  # views made in inference mode could never be written outside of it
def row_views(row: torch.Tensor) -> RowViews:
    """Typed views of one row (uint8 [ROW.itemsize]), derived from the offsets of FIELDS."""
    return RowViews(
        sums=row_span(row, "signal_energy", "moment4"),
        noise_max=row_span(row, "tile_noise_ratio_max"),
        counts=row_span(row, "num_elements", "num_inf"),
        counts_and_depth=row_span(row, "num_elements", "depth_hist"),
        tiles=row_span(row, "num_tiles", "amax_hist"),
        maxima=row_span(row, "amax_max", "scale_ratio_max"),
        minima=row_span(row, "amax_min_nonzero", "scale_ratio_min"),
        amax_max=row_span(row, "amax_max"),
        worst_tile=row_span(row, "worst_tile"),
        noise_tile=row_span(row, "noise_tile"),
        firsts=row_span(row, "off_scale_tile", "first_nonfinite")[:4],
        first_call=row_span(row, "first_nonfinite")[2:],
        order=row_span(row, "order"),
        measured=row_span(row, "measured"),
        later={f.name: row_span(row, f.name) for f in LAYOUT if f.group & EVERY_CALL},
    )


_MERGE: dict[str, Callable[..., torch.Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def merge_sections(into: RowViews, call: Sections, call_order: int) -> None:
    """Merge one call into a row, as `fp8watch_agent.record.merge_rows` does."""
    # Of two equals the earlier stays. A maximum of 0 is never larger, so its coordinates stay at −1.
    torch.where(call.maxima[0] > into.amax_max, call.worst_tile, into.worst_tile, out=into.worst_tile)
    if call.sums is None or call.noise_max is None or call.noise_tile is None:
        into.counts.add_(call.counts)
    else:
        torch.where(call.noise_max > into.noise_max, call.noise_tile, into.noise_tile, out=into.noise_tile)
        torch.maximum(into.noise_max, call.noise_max, out=into.noise_max)
        into.sums.add_(call.sums)
        into.counts_and_depth.add_(call.counts)
    into.tiles.add_(call.tiles)
    torch.maximum(into.maxima, call.maxima, out=into.maxima)
    torch.minimum(into.minima, call.minima, out=into.minima)
    if call.firsts is not None:
        # A coordinate is −1 as a whole or not at all, so element by element is the same as field by field.
        fresh = into.firsts < 0
        torch.where(fresh, call.firsts, into.firsts, out=into.firsts)
        into.first_call.masked_fill_((fresh[3:] & (call.firsts[3:] >= 0)), call_order)
    into.order.masked_fill_(into.order < 0, call_order)
    for name, value in call.later.items():
        mine = into.later[name]
        _MERGE[FIELD_BY_NAME[name].merge](mine, value.to(mine.dtype), out=mine)
    if EVERY_CALL:
        into.measured.copy_(merge_measured(into.measured, call.measured))
    else:
        into.measured.bitwise_or_(call.measured)


def new_rows(capacity: int, device: torch.device) -> torch.Tensor:
    """Rows of ROW at their defaults: uint8 [capacity, ROW.itemsize]."""
    defaults = torch.from_numpy(empty_rows(1).view(np.uint8).reshape(1, ROW.itemsize))
    return defaults.to(device).repeat(capacity, 1)


def merge_call(rows: torch.Tensor, row: int, call: Call, call_order: int) -> None:
    """Merge one call into `rows[row]`, whichever way its backend folds."""
    if call.folded is not None:
        call.folded.merge_into(rows, row, call_order)
    else:
        merge_sections(row_views(rows[row]), sections(call), call_order)
