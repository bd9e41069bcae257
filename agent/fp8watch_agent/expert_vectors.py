"""Side vectors over experts: what one site of experts says of each of them in one step, beside its record.

Shapes:     VECTOR [E] a (step, site) <-> one byte string a column     Thread: training (made), sender, collector

Experts share one site for each parameter, operand and direction, and its record is of all of them together. A part of
these sites sends a vector in each step, in turns. In a body they are a map of their own beside the columns of the
records, so collectors that do not know them read the rest. They are kept with the batch, not in blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fp8watch_agent.bounded_decompress import TooLarge, WireError
from fp8watch_agent.envelope import Array, exact

VECTOR = np.dtype(
    [("amax", "<f4"), ("num_nonfinite", "<u4"), ("num_underflow", "<u4"), ("num_tokens", "<u4")]
)  # fmt: skip
"""Of one expert: largest |x| (NaN ignored), elements that are NaN or Inf, x ≠ 0 that became 0, rows; 0 rows of a weight."""

MAX_EXPERTS = 1 << 16
MAX_ENTRIES = 1 << 20
"""Experts in all vectors of one body."""

_KEYS = {"step": "<u4", "site": "<u8", "num_experts": "<u4"}


@dataclass(frozen=True)
class ExpertVector:
    """One site in one step."""

    step: int
    site: int
    experts: npt.NDArray[np.void]  # [E] of VECTOR


def encode_vectors(vectors: Sequence[ExpertVector], step0: int) -> dict[str, bytes]:
    """Columns of all vectors, one behind the other; a column of zeros is left out."""
    if not vectors:
        return {}
    whole = np.concatenate([v.experts for v in vectors])
    columns = {
        "step": np.array([v.step - step0 for v in vectors], dtype="<u4").tobytes(),
        "site": np.array([v.site for v in vectors], dtype="<u8").tobytes(),
        "num_experts": np.array([len(v.experts) for v in vectors], dtype="<u4").tobytes(),
    }
    for name in VECTOR.names or ():
        if whole[name].any():  # NaN is true
            columns[name] = np.ascontiguousarray(whole[name]).tobytes()
    return columns


def decode_vectors(columns: Mapping[str, bytes], step0: int, steps: Array) -> list[ExpertVector]:
    """Inverse of `encode_vectors`. Columns that are not known are ignored.

    Args:
        columns: as they came.
        step0: of the batch.
        steps: of the batch: a vector of any other step is refused.

    Raises:
        WireError: naming the column.
    """
    if not columns:
        return []
    for name in _KEYS:
        if name not in columns:
            raise WireError(f"experts.{name}", "missing; it is a key of every vector")
    count = len(columns["num_experts"]) // 4
    keys = {name: exact(f"experts.{name}", columns[name], dtype, count) for name, dtype in _KEYS.items()}
    sizes = keys["num_experts"].astype(np.int64)
    total = int(sizes.sum())
    if total > MAX_ENTRIES:
        raise TooLarge("experts.num_experts", f"{total} experts in one body; at most {MAX_ENTRIES}")
    if count and (int(sizes.min()) < 1 or int(sizes.max()) > MAX_EXPERTS):
        raise WireError("experts.num_experts", f"1 to {MAX_EXPERTS} are allowed")
    step = keys["step"].astype(np.int64) + step0
    if not np.all(np.isin(step, steps)):
        raise WireError("experts.step", "a vector names a step that the batch does not hold")
    whole = np.zeros(total, dtype=VECTOR)
    for name in VECTOR.names or ():
        if name in columns:
            whole[name] = exact(f"experts.{name}", columns[name], VECTOR[name].str, total)
    ends = np.cumsum(sizes)
    return [ExpertVector(int(step[i]), int(keys["site"][i]), whole[ends[i] - sizes[i] : ends[i]]) for i in range(count)]


def pack(vectors: Mapping[int, npt.NDArray[np.void]]) -> dict[int, bytes]:
    """Site -> vector, for the frame of one step."""
    return {int(site): np.ascontiguousarray(v, dtype=VECTOR).tobytes() for site, v in vectors.items()}


def unpack(packed: Mapping[int, bytes], step: int) -> list[ExpertVector]:
    """Inverse of `pack`; what has no whole number of experts is left out."""
    whole = {site: raw for site, raw in packed.items() if raw and len(raw) % VECTOR.itemsize == 0}
    return [ExpertVector(step, site, np.frombuffer(raw, dtype=VECTOR)) for site, raw in whole.items()]
