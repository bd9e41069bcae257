"""One look at all rows of a step: which are broken, whether anything computed wrongly, whether any row is not there.

Shapes:     slab rows [sites] of ROW -> mask [sites], and three answers     Thread: training
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fp8watch.kernels import cpu_jumps
from fp8watch.kernels.cpu_jumps import ANY_ABSENT, ANY_BROKEN, IS_WRONG
from fp8watch_agent.record import QUANTISER_FAULTS


class Glance(NamedTuple):
    """What is seen at once."""

    broken: npt.NDArray[np.bool_]  # [sites], those with a non-finite value, a broken invariant or a sentinel tile
    any_broken: bool
    is_wrong: bool  # an output is not finite, or a quantiser computed something else
    all_there: bool  # each row was measured


def glance(rows: npt.NDArray[np.void]) -> Glance:
    """Look at the rows of a step.

    Args:
        rows: [sites] of ROW.
    """
    if (seen := cpu_jumps.glance(rows)) is not None:
        broken, bits = seen
        return Glance(broken, bool(bits & ANY_BROKEN), bool(bits & IS_WRONG), not bits & ANY_ABSENT)
    broken = (
        (rows["num_nan"] > 0)
        | (rows["num_inf"] > 0)
        | (rows["num_off_scale_tiles"] > 0)
        | (rows["num_sentinel_tiles"] > 0)
    )
    is_wrong = any(rows[name].any() for name in ("num_nonfinite_outputs", *QUANTISER_FAULTS))
    return Glance(broken, bool(broken.any()), is_wrong, bool((rows["measured"] != 0).all()))
