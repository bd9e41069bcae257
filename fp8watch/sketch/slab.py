"""The site slab: one row per site on the device, merged call by call over a step's micro-batches.

Upstream:   fp8watch.observer.observation_plan, fp8watch.numerics.row_fold
Shapes:     TileStats -> one uint8 buffer [capacity, ROW.itemsize]     Thread: training

The buffer keeps its address for its whole life, and nothing here reads it back but `copy_rows`: a CUDA graph may
capture `accumulate`. A row has the layout of `fp8watch_agent.record.ROW`, and merging has the meaning of
`fp8watch_agent.record.merge_rows`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from fp8watch.kernels import triton
from fp8watch.kernels.backend import Into
from fp8watch.kernels.cpu import look_into
from fp8watch.numerics.row_fold import RowViews, merge_sections, new_rows, row_span, row_views, sections
from fp8watch.numerics.tile_stats import TileStats
from fp8watch.quantize.output_checks import GemmCheck, ProbeNumbers
from fp8watch.quantize.self_consistency import QuantiserCheck
from fp8watch_agent.record import AMAX_BUCKET_OFFSET, NUM_AMAX_BUCKETS, ROW, Measured, merge_measured

LAST = 1 << 20
"""Place in the order of execution of what has none."""


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
        self._defaults = new_rows(1, torch.device(device))
        self.device = self._defaults.device  # with its index
        self.is_cpu = self.device.type == "cpu"
        self.buffer = self._defaults.repeat(capacity, 1)
        self.scratch = new_rows(2, self.device)  # where what is done once more to be timed is merged
        self._views: dict[int, RowViews] = {}
        self._places: dict[tuple[int, ...], tuple[int, int]] = {}  # addresses of rows that a call merges into
        self._on_host: tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]] | None = None  # num_nan, amax_max
        self._at = self.buffer.data_ptr()
        self._cleared = self._defaults.repeat(capacity, 1).numpy() if self.is_cpu else None

    def into(self, rows: tuple[int, ...], call_order: int, *, scratch: bool = False) -> Into:
        """Where a call merges what it measures of one or two rows; a slab on the CPU only.

        Args:
            rows: of the directions that it measures, 0 … capacity − 1.
            call_order: of the first; the second has the next.
            scratch: into rows that nobody reads.
        """
        if scratch:
            first = self.scratch.data_ptr()
            return Into(self.scratch, (first, first + ROW.itemsize), call_order)
        places = self._places.get(rows)
        if places is None:
            for row in rows:
                self._check_row(row)
            places = self._places[rows] = self._at + rows[0] * ROW.itemsize, self._at + rows[-1] * ROW.itemsize
        return Into(self.buffer, places, call_order)

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
        views = self._views.get(row)
        if views is None:
            self._check_row(row)
            views = self._views[row] = row_views(self.buffer[row])
        merge_sections(views, sections(stats), call_order)

    def accumulate_both(self, rows: tuple[int, ...], stats: Sequence[TileStats], call_order: int) -> bool:
        """`accumulate` of both directions of an operand in one launch, the second as the next call; False, and nothing done, where
        that cannot be."""
        if len(rows) != 2 or len(stats) != 2:
            return False
        first, second = stats[0].folded, stats[1].folded
        if first is None or getattr(first, "second", None) is not second:
            return False
        for row in rows:
            self._check_row(row)
        first.merge_both_into(self.buffer, rows, call_order)  # type: ignore[attr-defined]  # of kernels.triton_fold alone
        return True

    def take_off_zeros(self, row: int, num_elements: int | torch.Tensor, num_tiles: int | torch.Tensor) -> None:
        """Take padding off the counts of a row: zeros, and tiles of nothing else. 0-d integers on this device, or numbers."""
        self._check_row(row)
        mine = self.buffer[row]
        row_span(mine, "num_elements").sub_(num_elements)
        for name in ("num_tiles", "num_zero_tiles"):
            row_span(mine, name).sub_(num_tiles)
        row_span(mine, "amax_hist")[:1].sub_(num_tiles)

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

    def note_empty(self, row: int) -> None:
        """The operand of this row has no elements in this call, and its GEMM was looked at all the same: where nothing else
        of it is seen in this step, it comes last."""
        self._check_row(row)
        order = row_span(self.buffer[row], "order")
        order.masked_fill_(order < 0, LAST)

    def accumulate_probe(self, row: int, seen: ProbeNumbers, call_order: int) -> None:
        """Merge one look at an output into the row of its probe; a slab on the CPU only. As `accumulate` of
        `fp8watch.observer.probes.probe_stats` in what is measured."""
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
        mine["measured"] = merge_measured(int(mine["measured"]), int(Measured.COUNTS | Measured.AMAX) | energies)

    def look(self, row: int, y: torch.Tensor, call_order: int, *, energy: bool) -> bool:
        """`accumulate_probe` of a look at an output in one pass, where that can be done and all of it is finite; else
        nothing, and False. A slab on the CPU only."""
        if not 0 <= row < self.capacity:
            self._check_row(row)
        return look_into(y, self._at + row * ROW.itemsize, call_order, energy=energy)

    def look_there(self, row: int, y_MN: torch.Tensor, call_order: int, *, energy: bool) -> bool:
        """`accumulate_probe` of a look at an output in kernels of its device, where there are any; else nothing, and False."""
        self._check_row(row)
        return triton.look_into(y_MN, self.buffer, row, call_order, energy=energy)

    def count_outputs_there(self, row: int, y: torch.Tensor, *, nan_only: bool) -> bool:
        """`count_outputs` of all that is not finite in an output in kernels of its device, where there are any; else nothing,
        and False."""
        self._check_row(row)
        return triton.count_into(y, self.buffer, row, nan_only=nan_only)

    def count_outputs(self, row: int, count: torch.Tensor) -> None:
        """Merge the number of non-finite elements in the output of the GEMM that reads this operand. 0-d int64."""
        self._check_row(row)
        mine = self.buffer[row]
        row_span(mine, "num_nonfinite_outputs").add_(count)
        row_span(mine, "measured").bitwise_or_((count > 0).to(torch.int32) * int(Measured.OUTPUTS))

    def accumulate_quantiser(self, row: int, check: QuantiserCheck) -> None:
        """Merge what was found of what a GEMM reads of this operand."""
        self._check_row(row)
        mine = self.buffer[row]
        row_span(mine, "num_nan_codes", "num_off_grid").add_(check.elements)
        row_span(mine, "num_checked_tiles", "num_wrong_scales").add_(check.tiles)
        tile = row_span(mine, "fault_tile")
        torch.where(tile < 0, check.fault_tile, tile, out=tile)
        row_span(mine, "measured").bitwise_or_(int(Measured.QUANTISER))

    def accumulate_impact(self, row: int, energy: torch.Tensor, num_rows: torch.Tensor) -> None:
        """Merge what a forward GEMM in FP8 changes of the loss into the row of the operand that it reads.

        Args:
            energy: float64 0-d, nats²: the squared impacts of sampled rows of its output, added.
            num_rows: int64 0-d, how many.
        """
        self._check_row(row)
        mine = self.buffer[row]
        row_span(mine, "impact_energy").add_(energy)
        row_span(mine, "num_impact_rows").add_(num_rows)
        row_span(mine, "measured").bitwise_or_((num_rows > 0).to(torch.int32) * int(Measured.IMPACT))

    def tile_to_look_at(self, row: int) -> torch.Tensor:
        """Of a row the tile of the largest noise where that was measured, else of the largest amax: int32 [2], −1 where
        there is neither. A view or a new tensor, on this device."""
        self._check_row(row)
        noise, amax = (row_span(self.buffer[row], name) for name in ("noise_tile", "worst_tile"))
        return torch.where(noise < 0, amax, noise)

    def amax_if_finite(self, row: int) -> torch.Tensor:
        """The largest amax of a row in this step, Inf where anything of it was NaN: float32 [1]."""
        self._check_row(row)
        mine = self.buffer[row]
        return row_span(mine, "amax_max").masked_fill(row_span(mine, "num_nan") > 0, torch.inf)

    def amax_on_host(self, row: int) -> float:
        """As `amax_if_finite`, of a slab on the CPU."""
        self._check_row(row)
        if self._on_host is None:
            rows = self.rows_on_host()
            self._on_host = rows["num_nan"], rows["amax_max"]
        num_nan, amax = self._on_host
        return math.inf if num_nan[row] else float(amax[row])

    def keep_hash(self, row: int, value: torch.Tensor) -> None:
        """Put the hash of a weight into its row. 0-d int64; the last one stays."""
        self._check_row(row)
        if self.is_cpu and value.is_cpu:
            rows = self.rows_on_host()
            rows["weight_hash"][row] = value.item()
            rows["measured"][row] |= int(Measured.HASH)
            return
        mine = self.buffer[row]
        row_span(mine, "weight_hash").copy_(value)
        row_span(mine, "measured").bitwise_or_(int(Measured.HASH))

    def rows_on_host(self) -> npt.NDArray[np.void]:
        """All rows where they lie, of a slab on the CPU: [capacity] of ROW."""
        return self.buffer.numpy().reshape(-1).view(ROW)

    def copy_rows(self) -> npt.NDArray[np.void]:
        """Return a copy of all rows on the host: [capacity] of ROW. Waits for the device."""
        # copied as bytes: a copy of structured items would leave the padding at their end undefined
        return self.buffer.to("cpu", copy=True).numpy().reshape(-1).view(ROW)

    def clear(self) -> None:
        """Set every row to the defaults, in place."""
        if self._cleared is not None:
            self.buffer.numpy()[:] = self._cleared
        else:
            self.buffer.copy_(self._defaults.expand(self.capacity, -1))

    def _check_row(self, row: int) -> None:
        if not 0 <= row < self.capacity:
            raise ValueError(f"row={row}: must be 0 … {self.capacity - 1}; the slab has {self.capacity} rows")
