"""One call quantises an operand, measures it and merges that into its rows: as in three steps, bit by bit."""

from __future__ import annotations

import pytest
import torch
from benchmarks import kernels
from quantize.measured_operands import KINDS, operand, same

from fp8watch.kernels import cpu, cpu_call, cpu_library
from fp8watch.kernels.registry import available
from fp8watch.numerics.formats import E4M3, E5M2
from fp8watch.numerics.quantize_job import QuantizeJob
from fp8watch.numerics.tile_stats import TileStats
from fp8watch.sketch.slab import Slab

pytestmark = pytest.mark.skipif(available("cpu")["cpu"] is not None, reason="no C compiler here: set CC")

SHAPES = ((1, 1), (7, 130), (40, 224), (130, 352), (260, 640))
"""Less than a vector, ragged, and tiles that fill vectors but no blocks of them; more than a panel."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_call_into_the_slab_is_quantising_and_accumulating(kind: str, shape: tuple[int, int]) -> None:
    for dtype, fmt in ((torch.float32, E4M3), (torch.bfloat16, E5M2), (torch.float16, E4M3)):
        x = operand(kind, shape, dtype)
        for heavy in (False, True):
            for tile, both in (((1, 128), True), ((128, 128), False), ((1, 32), True), (shape, False)):
                job = QuantizeJob(tile, fmt, True, 0.0, heavy=heavy)
                apart = [(cpu.quantize_dequantize_both if both else _alone)(x, job) for _ in range(2)]
                want = Slab(3)
                for call, results in enumerate(apart):  # two micro-batches
                    for k, (_, _, stats) in enumerate(results):
                        assert stats is not None
                        want.accumulate(k, stats, len(results) * call + k)
                rows = (0, 1) if both else (0,)
                for measures in (False, True):
                    slab, seen = Slab(3), list[TileStats]()
                    for call in range(2):
                        into = slab.into(rows, len(rows) * call)
                        if measures:
                            seen = cpu.measure_into(x, job, into, both=both)
                        else:
                            outs, seen = cpu.values_into(x, job, into, codes=(False, False) if both else (False,))
                            assert [out.numpy().tobytes() for out in outs] == [r[0].numpy().tobytes() for r in apart[0]]
                    assert slab.buffer.numpy().tobytes() == want.buffer.numpy().tobytes()
                    for mine, (_, _, stats) in zip(seen, apart[0], strict=True):
                        same(mine, stats)


def _alone(x, job):
    return (cpu.quantize_dequantize(x, job),)


def test_what_was_measured_stays_while_it_is_held_whatever_comes_after() -> None:
    """Calls leave what they measured side by side in blocks."""
    job, slab = QuantizeJob((1, 128), E4M3, heavy=False), Slab(2)
    held, want = [], []
    for i in range(120):
        x = torch.randn(200 + i, 512) * (i + 1)
        held.append(cpu.measure_into(x, job, slab.into((0, 1), 0), both=True))
        want.append(cpu.measure_both(x, job))
    assert len({stats[0].memory.data_ptr() for stats in held}) > 2, "more than two blocks were filled"
    for some, others in zip(held, want, strict=True):
        for mine, stats in zip(some, others, strict=True):
            same(mine, stats)


def test_an_operand_larger_than_a_block_has_one_of_its_own() -> None:
    x = torch.randn(1, cpu_call._BLOCK_BYTES)
    job = QuantizeJob((1, 1), E4M3, heavy=False)
    (stats,) = cpu.measure_into(x, job, Slab(1).into((0,), 0), both=False)
    assert stats.memory.numel() >= 12 * cpu_call._BLOCK_BYTES
    same(stats, cpu.measure(x, job))


def test_operands_of_many_shapes_are_each_told_apart() -> None:
    """What is prepared belongs to a shape and a dtype, not to the call before."""
    job = QuantizeJob((1, 128), E4M3)
    x = torch.randn(64, 256)
    for given in (x, x[:, :128], x[:32], x.half(), x.t().contiguous().t(), x, x[::2], x[:, ::2]):
        row, column = cpu.measure_both(given, job)
        same(row, cpu.measure_both(given.clone().contiguous(), QuantizeJob((1, 128), E4M3))[0])
        assert row.shape == tuple(given.shape)
        assert torch.equal(column.amax, given.float().abs().amax(0, keepdim=True))
    for length in range(1, cpu_call._MAX_SHAPES + 20):
        cpu.measure(torch.ones(1, length), job)
    assert len(job.prepared) <= cpu_call._MAX_SHAPES, "sequences of any length fill no memory"


@pytest.mark.parametrize(("stats", "heavy"), [(False, False), (True, False), (True, True)])
def test_what_the_benchmark_times_is_a_call_of_the_library(stats, heavy) -> None:
    x = torch.randn(16, 256)
    call = kernels.arguments(x, QuantizeJob((1, 128), E4M3, stats=stats, heavy=heavy))
    assert cpu_library.load().fp8watch_operand(*call) == 0
    codes, scale_inv, _ = cpu.quantize(x, QuantizeJob((1, 128), E4M3, stats=False))
    out, its_scale_inv = kernels._alive[-3], kernels._alive[-1]
    assert torch.equal(out, codes.view(torch.uint8))
    assert torch.equal(its_scale_inv, scale_inv)
