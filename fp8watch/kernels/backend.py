"""What a kernel backend is: the functions of its module, those that it must have and those that save a read.

Upstream:   fp8watch.quantize.site_quantizer

`fp8watch.kernels.reference` documents the numbers and judges every other backend. A backend that reads an operand once
for both directions, or measures without writing what it quantised, says so by having `quantize_both`,
`quantize_dequantize_both`, `values_and_codes`, `measure` or `measure_both`; for one that does not, the functions below
and `fp8watch.quantize.site_quantizer` call the plain ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import torch

from fp8watch.numerics.quantize_job import QuantizeJob
from fp8watch.numerics.tile_stats import TileStats

Quantized: TypeAlias = tuple[torch.Tensor, torch.Tensor, TileStats | None]
"""Codes or dequantised operand [M, K], scale_inv float32 [Mt, Kt], statistics or None."""

Scales: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Given scales of both directions: rowwise [M, ceil(K/length)], columnwise [ceil(M/length), K]."""


Codes: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Codes [M, K] of an FP8 dtype, scale_inv float32 [Mt, Kt]."""


class Into(NamedTuple):
    """Rows of a slab in the host's memory, into which a call merges what it measures.

    A backend with `MERGES = True` has the functions of `Merging`.
    """

    buffer: torch.Tensor  # in which they lie: it lives as long as the call
    addresses: tuple[int, int]  # of the row of each direction
    order: int  # of the call in its step, for the first direction; the second has the next


class Backend(Protocol):
    """The functions that every backend's module has."""

    NAME: str

    def probe(self, device: torch.device) -> str | None:
        """Return why this backend cannot serve the device, or None when it can."""

    def quantize(self, x: torch.Tensor, job: QuantizeJob, scale: torch.Tensor | None = None) -> Quantized:
        """Return the codes, scale_inv and, when asked for, the statistics."""

    def quantize_dequantize(self, x: torch.Tensor, job: QuantizeJob, scale: torch.Tensor | None = None) -> Quantized:
        """As `quantize`, with what the codes stand for (float32) in place of the codes."""

    def dequantize(self, data: torch.Tensor, scale_inv: torch.Tensor, tile_shape: tuple[int, int]) -> torch.Tensor:
        """Return the codes' values times scale_inv, float32."""


class Merging(Protocol):
    """The functions of a backend with `MERGES = True`, which write what they measure into a slab on the way."""

    def values_into(
        self, x: torch.Tensor, job: QuantizeJob, into: Into, *, codes: tuple[bool, ...]
    ) -> tuple[list[Any], list[TileStats]]:
        """`quantize_dequantize` of a job with statistics in one direction, or in both: what the codes stand for, or `Codes`
        where `codes`, one a direction, says so, and what was measured."""

    def measure_into(self, x: torch.Tensor, job: QuantizeJob, into: Into, *, both: bool) -> list[TileStats]:
        """The statistics alone."""


def quantize_dequantize_both(
    backend: Backend, x: torch.Tensor, job: QuantizeJob, scales: Scales | None = None
) -> tuple[Quantized, Quantized]:
    """Both directions of one operand: `quantize_dequantize` with the tiles of the job, (1, length), and transposed.

    Args:
        backend: its own function of this name is used, else it is called twice.
        x: [M, K].
        job: of the rowwise direction.
        scales: to use in place of computed ones.

    Returns:
        What rowwise gives, what columnwise gives.
    """
    both = getattr(backend, "quantize_dequantize_both", None)
    if both is not None:
        return cast("tuple[Quantized, Quantized]", both(x, job, scales))
    rowwise, columnwise = scales or (None, None)
    return backend.quantize_dequantize(x, job, rowwise), backend.quantize_dequantize(x, job.transposed(), columnwise)


def measure(backend: Backend, x: torch.Tensor, job: QuantizeJob, scale: torch.Tensor | None = None) -> TileStats:
    """The statistics of `quantize` alone, for operands that nobody multiplies in FP8; the job has `stats`.

    Of a backend without a function of this name the codes are thrown away.
    """
    alone = getattr(backend, "measure", None)
    if alone is not None:
        return cast(TileStats, alone(x, job, scale))
    stats = backend.quantize(x, job, scale)[2]
    assert stats is not None
    return stats


def measure_both(
    backend: Backend, x: torch.Tensor, job: QuantizeJob, scales: Scales | None = None
) -> tuple[TileStats, TileStats]:
    """Both directions of one operand: `measure` with the tiles of the job, (1, length), and transposed."""
    both = getattr(backend, "measure_both", None)
    if both is not None:
        return cast("tuple[TileStats, TileStats]", both(x, job, scales))
    rowwise, columnwise = scales or (None, None)
    return measure(backend, x, job, rowwise), measure(backend, x, job.transposed(), columnwise)
