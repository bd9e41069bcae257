"""How many programs, over which regions, writing where: the host's side of the Triton kernels.

Shapes:     x [M, K] -> codes or values [M, K], scale_inv [Mt, Kt], TileStats     Thread: training, and autograd's

Imported only where Triton is there. Nothing here waits for the device.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, cast

import torch

from fp8watch.kernels import triton_fold, triton_strip, triton_tiles
from fp8watch.kernels.backend import Quantized, Scales
from fp8watch.kernels.triton_job import How, Output
from fp8watch.numerics.operand_checks import check_scale
from fp8watch.numerics.quantize_job import QuantizeJob
from fp8watch.numerics.tile_stats import HEAVY, LIGHT, TileStats
from fp8watch_agent.record import Measured

REGION = 128
"""Rows and columns of what one program reads: one 128×128 block, or the 128 tiles of 128 in it."""

STRIP, HEAVY_STRIP = 16, 8
"""Rows that it reads at once, 16 and 8 elements a thread: with more, the statistics (with energies and moments) no
longer fit into registers."""

NUM_WARPS = 4

INTERPRETED = type(triton_tiles.quantize_kernel).__name__ == "InterpretedFunction"
"""Whether TRITON_INTERPRET=1 was set when the kernels were imported."""

interpreted_region, interpreted_strip = 512, 512
"""The interpreter is slow by the operation and hardly by the element: it reads as much at once as will do."""

_SMALLEST_TILE = 16  # elements; below it a region has too many tiles for one program


class _Side:
    """What one direction of a call writes."""

    def __init__(
        self, x: torch.Tensor, job: QuantizeJob, output: Output, num_programs: int, *, whole: bool = False, transposed: bool = False,
        lines: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self.shape, self.job, self.output = (x.shape[0], x.shape[1]), job, output
        self.num_tiles = (-(-x.shape[0] // job.tile[0]), -(-x.shape[1] // job.tile[1]))
        if output is Output.NOTHING:
            self.out = _nothing(x.device)
        else:
            dtype = torch.float32 if output is Output.VALUES else torch.uint8
            out = torch.empty(self.shape[::-1] if transposed else self.shape, dtype=dtype, device=x.device)
            self.out = out.t() if transposed else out
        self.scale_inv = torch.empty(self.num_tiles, dtype=torch.float32, device=x.device)
        self.amax: torch.Tensor | None = None
        self.marks: torch.Tensor | None = None
        self.lines = lines
        if job.stats and lines is None:
            self.lines = torch.empty((num_programs, triton_fold.NUM_WORDS), dtype=torch.int32, device=x.device)
        if job.stats and not whole:
            marks = torch.uint8 if job.tile[0] * job.tile[1] < 256 else torch.int16
            self.amax = torch.empty_like(self.scale_inv)
            self.marks = torch.empty((*self.num_tiles, 8), dtype=marks, device=x.device)

    def result(self) -> Quantized:
        job = self.job
        out = self.out.view(job.fmt.dtype) if self.output is Output.CODES else self.out
        if self.lines is None or self.amax is None:
            return out, self.scale_inv, None
        measured = int(LIGHT | HEAVY | Measured.GAIN) if job.heavy else int(LIGHT)
        (rows, columns), (mt, kt) = self.shape, self.num_tiles
        folded = triton_fold.FoldedLines(
            self.lines, self.amax, self.marks, rows * columns, mt * kt, columns, kt, measured, job.heavy
        )
        stats = TileStats(self.shape, job.tile, job.power_2_scale, job.eps, self.scale_inv, measured, folded=folded)
        return out, self.scale_inv, stats


@lru_cache(maxsize=64)
def _nothing(device: torch.device) -> torch.Tensor:
    """What kernels are given in place of an output that they do not write: made once, for each operation on a device costs."""
    return torch.empty((0, 0), dtype=torch.uint8, device=device)


def try_out(device: torch.device) -> None:
    """Compile and launch a small kernel; whatever it raises is why none runs there. Nothing waits for it."""
    x = torch.zeros((STRIP, STRIP), dtype=torch.bfloat16, device=device)
    with triton_fold.on_device_of(x):
        extremes = torch.empty((1, 2), dtype=torch.int32, device=device)
        triton_strip.amax_kernel[(1,)](
            x, extremes, STRIP, STRIP, STRIP, 1, 1, BM=STRIP, BK=STRIP, SUB=STRIP, num_warps=1
        )


def has_kernel(tile: tuple[int, int]) -> bool:
    """Whether operands are quantised in tiles of this shape here: powers of two that a region holds."""
    return all(n <= REGION and n & (n - 1) == 0 for n in tile) and tile[0] * tile[1] >= _SMALLEST_TILE


def quantize(x: torch.Tensor, how: How, scale: torch.Tensor | None, *, whole: bool) -> Quantized:
    """One direction. With `whole` the operand is one tile, and is read once more before for its amax."""
    job = how.job
    (rows, columns), (bm, bk) = x.shape, job.tile
    region = rm, rk = _region(x, job.tile, whole)
    mt, kt = -(-rows // bm), -(-columns // bk)
    if scale is not None:
        scale = check_scale(scale, (mt, kt), x).contiguous()
    regions_k = -(-columns // rk)
    num_programs = -(-rows // rm) * regions_k
    with triton_fold.on_device_of(x):
        side = _Side(x, job, how.output, num_programs, whole=whole)
        amax = None
        if whole:
            extremes = torch.empty((num_programs, 2), dtype=torch.int32, device=x.device)
            triton_strip.amax_kernel[(num_programs,)](
                x, extremes, rows, columns, *x.stride(), regions_k,
                BM=rm, BK=rk, SUB=strip_of(region, False), num_warps=NUM_WARPS,
            )  # fmt: skip
            amax = extremes.amax(0).view(torch.float32)  # of the bits, which for magnitudes is of the values
        triton_tiles.quantize_kernel[(num_programs,)](
            x, side.out, side.scale_inv, side.amax, side.marks, scale, side.lines, amax,
            rows, columns, *x.stride(), *side.out.stride(), mt, kt, regions_k, job.eps,
            TM=rm if whole else bm, TK=rk if whole else bk, WHOLE=whole,
            **_constants(x, how, scale is not None, region),
        )  # fmt: skip
        if amax is not None:
            side.amax = amax[:1].view(1, 1)
    return side.result()


def both(x: torch.Tensor, how: How, scales: Scales | None, *, transposed: bool) -> tuple[Quantized, Quantized]:
    """Tiles (1, length), as the job has them, and (length, 1) from one read.

    Raises:
        ValueError: no kernel has tiles of that length.
    """
    job, length = how.job, how.job.tile[1]
    if not has_kernel((1, length)):
        raise ValueError(f"length={length}: must be a power of two from {_SMALLEST_TILE} to {REGION}")
    rows, columns = x.shape
    region = rm, rk = _region(x, (length, length), whole=False)
    mt, kt = -(-rows // length), -(-columns // length)
    given: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if scales is not None:
        given = (
            check_scale(scales[0], (rows, kt), x).contiguous(),
            check_scale(scales[1], (mt, columns), x).contiguous(),
        )
    regions_k = -(-columns // rk)
    num_programs = -(-rows // rm) * regions_k
    with triton_fold.on_device_of(x):
        lines: list[torch.Tensor | None] = [None, None]
        if job.stats:
            words = torch.empty((2, num_programs, triton_fold.NUM_WORDS), dtype=torch.int32, device=x.device)
            lines = [*words.unbind()]
        a = _Side(x, job, how.output, num_programs, lines=lines[0])
        b = _Side(x, job.transposed(), how.output, num_programs, transposed=transposed, lines=lines[1])
        triton_tiles.both_kernel[(num_programs,)](
            x,
            a.out, a.scale_inv, a.amax, a.marks, given[0], a.lines,
            b.out, b.scale_inv, b.amax, b.marks, given[1], b.lines,
            rows, columns, *x.stride(), *a.out.stride(), *b.out.stride(), mt, kt, regions_k, job.eps,
            **_constants(x, how, scales is not None, region),
        )  # fmt: skip
    one, other = a.result(), b.result()
    if one[2] is not None and other[2] is not None and isinstance(one[2].folded, triton_fold.FoldedLines):
        one[2].folded.second = cast("triton_fold.FoldedLines", other[2].folded)
    return one, other


def _constants(x: torch.Tensor, how: How, given: bool, region: tuple[int, int]) -> dict[str, Any]:
    """The constants that kernels are compiled for. Fused multiply-add would round once where the rule rounds twice."""
    job = how.job
    return {
        "BM": region[0], "BK": region[1], "SUB": strip_of(region, job.heavy), "E4M3": job.fmt.name == "E4M3",
        "LARGEST_INPUT": torch.finfo(x.dtype).max, "POWER_2": job.power_2_scale, "GUARD": job.force_scale_1, "GIVEN": given,
        "INVARIANT": job.invariant, "STATS": job.stats, "HEAVY": job.heavy,
        "OUTPUT": int(how.output), "HARDWARE": how.hardware_cast,
        "num_warps": NUM_WARPS, "enable_fp_fusion": False,
    }  # fmt: skip


def _region(x: torch.Tensor, tile: tuple[int, int], whole: bool) -> tuple[int, int]:
    """Rows and columns of what one program reads: as many rows as the tile has, if it has more than one."""
    most = max(interpreted_region, REGION) if INTERPRETED and not whole else REGION
    rows, columns = (min(1 << (n - 1).bit_length(), most) if INTERPRETED else most for n in x.shape)
    if whole:
        return rows, columns
    return rows if tile[0] == 1 else tile[0], max(columns, tile[1])


def strip_of(region: tuple[int, int], heavy: bool) -> int:
    """Rows of a region that a program reads at once."""
    rows = HEAVY_STRIP if heavy else STRIP
    return min(interpreted_strip if INTERPRETED else rows, region[0])
