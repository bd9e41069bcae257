"""Operands of a timed step, quantised or measured more than once, so that what observing adds can be told apart.

Thread:     training, and autograd's
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fp8watch.kernels.backend import Into
from fp8watch.numerics.tile_stats import TileStats
from fp8watch.observer.site_rows import OperandRows
from fp8watch.observer.stopwatch import EXTRA, LIGHT, SAMPLING, Stopwatch
from fp8watch.quantize.site_quantizer import Wanted, measure_operand, run_quantizers


def timed_quantize(
    stopwatch: Stopwatch,
    asked: OperandRows,
    x_MK: Tensor,
    *,
    wanted: tuple[Wanted, ...],
    into: Into | None,
    scratch: Into | None,
) -> list[tuple[Any, TileStats | None]]:
    """Quantise as training would without being observed, with the light statistics, and with all. What is merged by the
    call itself goes to the scratch rows but for the last."""
    marks = [stopwatch.mark()]
    ways = ((False, False, None), (False, False, None), (True, False, scratch), (True, True, into))
    for stats, heavy, where in ways:  # the first warms the caches
        results = run_quantizers(
            asked.quantizers, x_MK, together=asked.together, stats=stats, heavy=heavy, wanted=wanted, into=where
        )
        marks.append(stopwatch.mark())
    start, warm, bare, light, full = marks
    stopwatch.add(EXTRA, start, light)
    stopwatch.add(LIGHT, bare, light)
    stopwatch.add(LIGHT, warm, bare, -1)
    stopwatch.add(SAMPLING, light, full)
    stopwatch.add(SAMPLING, bare, light, -1)
    return results


def timed_measure(
    stopwatch: Stopwatch, asked: OperandRows, x_MK: Tensor, *, heavy: bool, into: Into | None, scratch: Into | None
) -> list[TileStats]:
    """Measure with the light statistics, and with all: what the second take more is what sampling costs. Whoever
    calls times all of it as light, so the second is taken off again."""
    of_light, of_full = (scratch, into) if heavy else (into, scratch)
    begin = stopwatch.mark()
    light = measure_operand(asked.quantizers, x_MK, together=asked.together, heavy=False, into=of_light)
    middle = stopwatch.mark()
    full = measure_operand(asked.quantizers, x_MK, together=asked.together, heavy=True, into=of_full)
    end = stopwatch.mark()
    stopwatch.add(LIGHT, middle, end, -1)
    stopwatch.add(SAMPLING, middle, end)
    stopwatch.add(SAMPLING, begin, middle, -1)
    stopwatch.add(EXTRA, begin, middle)
    return full if heavy else light
