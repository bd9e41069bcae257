"""What one launch of the Triton kernels is asked for: the job, what it writes, and how it casts. Needs no Triton."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from fp8watch.numerics.quantize_job import QuantizeJob


class Output(IntEnum):
    """What is written of the operand's size; the kernels know it by number."""

    CODES = 0
    VALUES = 1
    NOTHING = 2


class How(NamedTuple):
    """What a launch is asked for."""

    job: QuantizeJob
    output: Output
    hardware_cast: bool
