"""The site slab: one row per site on the device, merged call by call over a step's micro-batches.

Upstream:   fp8watch.quantize.fold     Downstream: fp8watch_agent.record
Shapes:     TileStats -> one uint8 buffer [capacity, ROW.itemsize]     Thread: training

The buffer keeps its address for its whole life, and nothing here reads it back but `copy_rows`: a CUDA graph may
capture `accumulate`. A row has the layout of `fp8watch_agent.record.ROW`, and merging has the meaning of
`fp8watch_agent.record.merge_rows`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fp8watch.formats import AMAX_BUCKET_OFFSET
from fp8watch.kernels.look import look_into
from fp8watch.quantize.fold import row_span, sections
from fp8watch_agent.record import NUM_AMAX_BUCKETS, ROW, Measured, empty_rows

if TYPE_CHECKING:
    from fp8watch.probes import ProbeNumbers
    from fp8watch.quantize.stats import TileStats
    from fp8watch.shadow import GemmCheck


class _RowViews(NamedTuple):
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


class Slab:
    """Rows of ROW on a device, each the sketch of one site in the running step.

    Args:
        capacity: number of rows.
        device: where the operands are quantised.
    """

    def __init__(self, capacity: int, device: torch.device | str = "cpu") -> None:
        if capacity < 1:
            raise ValueError(f"capacity={capacity}: must be at least 1 row, one for each site")
        self.capacity = capacity
        self.device = torch.device(device)
        defaults = torch.from_numpy(empty_rows(1).view(np.uint8).reshape(1, ROW.itemsize))
        self._defaults = defaults.to(self.device)
        self.buffer = self._defaults.repeat(capacity, 1)
        self._views: dict[int, _RowViews] = {}

    def accumulate(self, row: int, stats: TileStats, call_order: int) -> None:
        """Merge one quantisation into a row.

        Args:
            row: 0 … capacity − 1.
            stats: of the call, on this device.
            call_order: index of the call in the step's order of execution; kept as `order` for the first call of a
                row and as the third number of `first_nonfinite`.
        """
        if stats.folded is not None:
            self._check_row(row)
            stats.folded.merge_into(self.buffer, row, call_order)
            return
        into = self._views.get(row) or self._row_views(row)
        call = sections(stats)
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
        into.measured.bitwise_or_(call.measured)

    def accumulate_gemm(self, row: int, check: GemmCheck) -> None:
        """Merge what a shadow found of one GEMM into the row of the operand that it reads."""
        self._check_row(row)
        mine = self.buffer[row]
        for name, value in (("gemm_error", check.error), ("gemm_gain_max", check.gain)):
            into = row_span(mine, name)
            torch.maximum(into, value, out=into)
        gain = row_span(mine, "gemm_gain_min")
        torch.minimum(gain, check.gain, out=gain)
        row_span(mine, "output_num_nonfinite").add_(check.num_nonfinite)
        row_span(mine, "measured").bitwise_or_(int(Measured.GEMM))

    def accumulate_probe(self, row: int, seen: ProbeNumbers, call_order: int) -> None:
        """Merge one look at an output into the row of its probe; a slab on the CPU only. As `accumulate` of
        `fp8watch.probes.probe_stats` in what is measured."""
        self._check_row(row)
        mine = self.buffer.numpy()[row].view(ROW)[0]
        mine["num_elements"] += seen.num_elements
        mine["num_nan"] += seen.num_nan
        mine["num_inf"] += seen.num_inf
        for name in ("num_tiles", "num_calls"):
            mine[name] += 1
        mine["num_zero_tiles"] += seen.amax == 0
        mine["num_sentinel_tiles"] += seen.num_inf > 0
        bucket = (
            0 if seen.amax == 0 else 63 if seen.num_inf else math.frexp(seen.amax / 1.75)[1] - 1 + AMAX_BUCKET_OFFSET
        )
        mine["amax_hist"][bucket if seen.amax == 0 else min(max(bucket, 1), NUM_AMAX_BUCKETS - 1)] += 1
        if seen.amax > mine["amax_max"]:
            mine["amax_max"], mine["worst_tile"] = seen.amax, (0, 0)
        if 0 < seen.amax < mine["amax_min_nonzero"]:
            mine["amax_min_nonzero"] = seen.amax
        if seen.energy is not None:
            mine["signal_energy"] += seen.energy
        if mine["first_nonfinite"][0] < 0 <= seen.first[0]:
            mine["first_nonfinite"] = (*seen.first, call_order)
        if mine["order"] < 0:
            mine["order"] = call_order
        energies = 0 if seen.energy is None else int(Measured.ENERGIES)
        mine["measured"] |= int(Measured.COUNTS | Measured.AMAX) | energies

    def look(self, row: int, y: torch.Tensor, call_order: int, *, energy: bool) -> bool:
        """`accumulate_probe` of a look at an output in one pass, where that can be done and all of it is finite; else
        nothing, and False. A slab on the CPU only."""
        self._check_row(row)
        return look_into(y, self.buffer.data_ptr() + row * ROW.itemsize, call_order, energy=energy)

    def count_outputs(self, row: int, count: torch.Tensor) -> None:
        """Merge the number of non-finite elements in the output of the GEMM that reads this operand. 0-d int64."""
        self._check_row(row)
        mine = self.buffer[row]
        row_span(mine, "output_num_nonfinite").add_(count)
        row_span(mine, "measured").bitwise_or_((count > 0).to(torch.int32) * int(Measured.GEMM))

    def keep_hash(self, row: int, value: torch.Tensor) -> None:
        """Put the hash of a weight into its row. 0-d int64; the last one stays."""
        self._check_row(row)
        mine = self.buffer[row]
        row_span(mine, "weight_hash").copy_(value)
        row_span(mine, "measured").bitwise_or_(int(Measured.HASH))

    def copy_rows(self) -> npt.NDArray[np.void]:
        """Return a copy of all rows on the host: [capacity] of ROW. Waits for the device."""
        # copied as bytes: a copy of structured items would leave the padding at their end undefined
        return self.buffer.to("cpu", copy=True).numpy().reshape(-1).view(ROW)

    def clear(self) -> None:
        """Set every row to the defaults, in place."""
        self.buffer.copy_(self._defaults.expand(self.capacity, -1))

    @torch.inference_mode(False)  # views made in inference mode could never be written outside of it
    def _row_views(self, row: int) -> _RowViews:
        """Typed views of one row, derived from the offsets of FIELDS and kept: the address never changes."""
        self._check_row(row)
        mine = self.buffer[row]
        views = self._views[row] = _RowViews(
            sums=row_span(mine, "signal_energy", "moment4"),
            noise_max=row_span(mine, "tile_noise_ratio_max"),
            counts=row_span(mine, "num_elements", "num_inf"),
            counts_and_depth=row_span(mine, "num_elements", "depth_hist"),
            tiles=row_span(mine, "num_tiles", "amax_hist"),
            maxima=row_span(mine, "amax_max", "scale_ratio_max"),
            minima=row_span(mine, "amax_min_nonzero", "scale_ratio_min"),
            amax_max=row_span(mine, "amax_max"),
            worst_tile=row_span(mine, "worst_tile"),
            noise_tile=row_span(mine, "noise_tile"),
            firsts=row_span(mine, "off_scale_tile", "first_nonfinite")[:4],
            first_call=row_span(mine, "first_nonfinite")[2:],
            order=row_span(mine, "order"),
            measured=row_span(mine, "measured"),
        )
        return views

    def _check_row(self, row: int) -> None:
        if not 0 <= row < self.capacity:
            raise ValueError(f"row={row}: must be 0 … {self.capacity - 1}; the slab has {self.capacity} rows")
