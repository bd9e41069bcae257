"""How far apart the samples of a field are, site by site: full statistics, shadows and hashes go round over sites.

Shapes:     groups that were measured in a step [S] -> steps between samples of one site
Thread:     detect worker

In one step some sites have energies, others a shadow of their GEMM or a hash, and each has its turn once in so many
steps. An incident that rests on such a field lasts from one sample of its site to the next, so its windows are counted
in these. After something broke everything is sampled for some steps: such a burst does not make the samples behind it
come sooner.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8watch_agent.record import FIELD_BY_NAME
from fp8watch_server.detect.step_view import StepView

ENERGIES = "tile_noise_ratio_sum"
FIELDS = (ENERGIES, "moment4", "weight_hash", "gemm_error", "num_checked_tiles")
"""One field of each group that is not in every record."""
KEPT_GAPS = 20
"""Of each site: more than the samples that an agent sends in a row after something broke."""

KNOWN_GAPS, UNKNOWN = 8, 4
"""With fewer gaps the sampling is not known yet, as in the burst at the start of a session: an incident of then is kept
open over the 64 steps that the next sample may take, which are fewer than 20 times this."""

Gaps = npt.NDArray[np.int32]


class SampleGaps:
    """The last gaps between samples of each site, for each of FIELDS."""

    def __init__(self) -> None:
        self._last: dict[str, npt.NDArray[np.int64]] = {name: np.zeros(0, dtype=np.int64) for name in FIELDS}
        self._gaps: dict[str, Gaps] = {name: np.zeros((0, KEPT_GAPS), dtype=np.int32) for name in FIELDS}

    def restart(self) -> None:
        """A new attempt: its steps may begin earlier; the sampling is as it was."""
        for last in self._last.values():
            last[:] = -1

    def observe(self, step: int, views: Iterable[StepView], num_sites: int) -> None:
        """Take in which groups were measured in a step, on any rank."""
        measured = np.zeros(num_sites, dtype=np.int32)
        for view in views:
            measured[view.row] |= view.raw("measured")
        for name in FIELDS:
            self._grow(name, num_sites)
            at = np.flatnonzero(measured & int(FIELD_BY_NAME[name].group))
            if not len(at):
                continue
            last, gaps = self._last[name], self._gaps[name]
            again = at[(last[at] >= 0) & (last[at] < step)]
            gaps[again] = np.column_stack([gaps[again, 1:], step - last[again]])
            last[at] = step

    def of(self, name: str | Any, rows: npt.NDArray[np.int64]) -> int:
        """Steps between samples of a field at one of these sites: the second largest of the last, so that one pause counts
        no more than a burst does. At least UNKNOWN while few are known.

        Args:
            name: one of FIELDS; anything else that is true stands for the energies.
        """
        gaps = self._gaps[name if name in FIELDS else ENERGIES]
        rows = rows[rows < len(gaps)]
        if not len(rows):
            return UNKNOWN
        two = np.sort(gaps[rows], axis=1)[:, -2:]
        longest = int(np.where(two[:, 0] > 0, two[:, 0], two[:, 1]).max())
        known = int(np.count_nonzero(gaps[rows], axis=1).max()) >= KNOWN_GAPS
        return max(longest, 1 if known else UNKNOWN)

    def not_before(self, step: int, extra: Mapping[str, Any], rows: npt.NDArray[np.int64]) -> dict[str, int]:
        """`not_before` of a finding that rests on looks in turns, from its own, which is 0: the step behind the last look at
        these sites, which was good; nothing where there was none."""
        last = self._last[extra["sampled"] if extra.get("sampled") in FIELDS else ENERGIES]
        looks = last[rows[rows < len(last)]]
        looked = extra.get("not_before") == 0 and len(looks) and looks.max() < step
        return {"not_before": int(looks.max()) + 1} if looked else {}

    def _grow(self, name: str, num_sites: int) -> None:
        more = num_sites - len(self._last[name])
        if more > 0:
            self._last[name] = np.concatenate([self._last[name], np.full(more, -1, dtype=np.int64)])
            self._gaps[name] = np.concatenate([self._gaps[name], np.zeros((more, KEPT_GAPS), dtype=np.int32)])
