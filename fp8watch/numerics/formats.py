"""FP8 formats: the only table of their constants.

Source: NVIDIA, Arm, Intel, "FP8 formats for deep learning" (arXiv 2209.05433), table 1; OCP Microscaling
Formats v1.0 for E8M0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Fp8Format:
    """One 8-bit floating-point format."""

    name: str
    torch_name: str
    max_finite: float
    saturation_midpoint: float  # |x·scale| at or above this would round past max_finite: a real clip
    min_normal: float
    min_subnormal: float
    has_inf: bool

    @property
    def dtype(self) -> torch.dtype:
        """torch's dtype of the codes."""
        import torch

        dtype = getattr(torch, self.torch_name)
        assert isinstance(dtype, torch.dtype)
        return dtype


E4M3 = Fp8Format("E4M3", "float8_e4m3fn", 448.0, 464.0, 2.0**-6, 2.0**-9, has_inf=False)
E5M2 = Fp8Format("E5M2", "float8_e5m2", 57344.0, 61440.0, 2.0**-14, 2.0**-16, has_inf=True)
FORMATS: dict[str, Fp8Format] = {f.name: f for f in (E4M3, E5M2)}

E2M1 = Fp8Format("E2M1", "float8_e4m3fn", 6.0, 7.0, 1.0, 0.5, has_inf=False)
"""Of NVFP4. Each of its numbers is one of E4M3, and as such they are kept here: a byte a number."""


def number_format(name: str) -> Fp8Format:
    """The format of a recipe's numbers: as `fp8_format`, and E2M1.

    Raises:
        ValueError: as `fp8_format`.
    """
    return E2M1 if name == E2M1.name else fp8_format(name)


def fp8_format(name: str) -> Fp8Format:
    """Look a format up by name.

    Raises:
        ValueError: for a format that is not here, with the reason.
    """
    got = FORMATS.get(name)
    if got is not None:
        return got
    if "fnuz" in name.lower():
        raise ValueError(
            f"fp8_format={name!r}: AMD's fnuz formats (max 240, NaN 0x80) are not supported here; use 'E4M3' or 'E5M2'"
        )
    raise ValueError(f"fp8_format={name!r}: must be one of {', '.join(map(repr, FORMATS))}")
