"""What a kernel backend is asked for: tile shape, format, scale rule, and how much to measure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from fp8watch.numerics.formats import Fp8Format, fp8_format
from fp8watch.numerics.operand_checks import check_eps, check_tile_shape


@dataclass(frozen=True, slots=True)
class QuantizeJob:
    """All that a quantisation needs beside the operand and a given scale. Made once, used for every call.

    Attributes:
        tile: (1, 128), (128, 1) for columnwise data in untransposed coordinates, (128, 128), or any other. Cells of
            the last tiles that lie beyond the edge count as 0 and enter no statistic.
        fmt: E4M3 or E5M2.
        power_2_scale: round each scale down to a power of two.
        eps: smallest amax a scale is computed from; 0 switches it off.
        force_scale_1: False leaves out the rule that a zero or infinite amax has scale 1, as kernels do that lack it: an
            all-zero tile then has scale Inf and NaN codes.
        invariant: False for a given scale that is not bound to this tensor's amax (delayed scaling): the only
            off-scale tiles are then those whose scale is not finite and positive.
        stats: whether to measure.
        heavy: whether to measure energies, moments and the depth histogram too; False where `stats` is.

    Raises:
        ValueError: a tile without rows or columns, or an eps that float32 does not hold.
    """

    tile: tuple[int, int]
    fmt: Fp8Format
    power_2_scale: bool = True
    eps: float = 0.0
    force_scale_1: bool = True
    invariant: bool = True
    stats: bool = True
    heavy: bool = True
    prepared: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What a backend has worked out for operands of one shape, by keys of its own."""
    _transposed: QuantizeJob | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, value in (
            ("tile", check_tile_shape(self.tile)),
            ("power_2_scale", bool(self.power_2_scale)),
            ("eps", check_eps(self.eps)),
            ("heavy", self.stats and self.heavy),
        ):
            object.__setattr__(self, name, value)

    def transposed(self) -> QuantizeJob:
        """The same with tiles in the other direction: (128, 1) for (1, 128)."""
        if self._transposed is None:
            object.__setattr__(self, "_transposed", replace(self, tile=self.tile[::-1]))
            assert self._transposed is not None
        return self._transposed


@lru_cache(maxsize=4096)
def quantize_jobs(
    tile: tuple[int, int],
    format_name: str,
    power_2_scale: bool = True,
    eps: float = 0.0,
    force_scale_1: bool = True,
    invariant: bool = True,
) -> tuple[QuantizeJob, QuantizeJob, QuantizeJob]:
    """Return the jobs without statistics, with light and with all statistics: entry `stats + (stats and heavy)`.

    Raises:
        ValueError: the format is unknown, or as for `QuantizeJob`.
    """
    fmt = fp8_format(format_name)
    none, light, full = (
        QuantizeJob(tile, fmt, power_2_scale, eps, force_scale_1, invariant, stats, heavy)
        for stats, heavy in ((False, False), (True, False), (True, True))
    )
    return none, light, full
