"""Whether the tail of a weight got heavier while its amax grew: its root mean square and its kurtosis, then and now.

Shapes:     energies and moments of full samples [S] -> octaves gained since a step [R]
Thread:     detect worker

Growth of amax is an outlier's only as far as the rest of the weight does not grow with it. Both are known of full samples alone;
between them what was measured last stands.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
import numpy.typing as npt

from fp8watch_agent.record import Measured
from fp8watch_server.detect.baseline import Baseline
from fp8watch_server.detect.cross_rank_step import CrossRankStep, Floats
from fp8watch_server.detect.step_view import Mask


class WeightTail:
    """What was measured last of each site, and how that was in the past, next to a series of its amax."""

    def __init__(self, num_sites: int) -> None:
        self._rms, self.log2_kurtosis = np.full(num_sites, np.nan), np.full(num_sites, np.nan)
        self._at = np.full(num_sites, -1, dtype=np.int64)  # step of what was measured last
        self._past_rms, self._past_kurtosis = Baseline(num_sites), Baseline(num_sites)

    def grow(self, num_sites: int) -> None:
        """More sites were registered."""
        more = np.full(max(0, num_sites - len(self._rms)), np.nan)
        self._rms, self.log2_kurtosis = (np.concatenate([a, more]) for a in (self._rms, self.log2_kurtosis))
        self._at = np.concatenate([self._at, np.full(len(more), -1, dtype=np.int64)])
        self._past_rms.grow(num_sites)
        self._past_kurtosis.grow(num_sites)

    def forget(self) -> None:
        """The past; what was measured last stands."""
        self._past_rms.forget()
        self._past_kurtosis.forget()

    def measure(self, now: CrossRankStep) -> None:
        """Take what a step has of full samples."""
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = now.column("signal_energy") / now.beside("num_elements", Measured.ENERGIES)
            rms = np.where(now.nonfinite, np.nan, 0.5 * np.log2(mean))
        known = np.isfinite(rms)
        self._rms, self._at = np.where(known, rms, self._rms), np.where(known, now.step, self._at)
        self.log2_kurtosis = np.where(np.isnan(now.log2_kurtosis), self.log2_kurtosis, now.log2_kurtosis)

    def push(self, seen: Mask) -> None:
        """One more place in the past, of sites that were seen: kept in step with a series of their amax. [S]"""
        self._past_rms.push(self._rms, seen)
        self._past_kurtosis.push(self.log2_kurtosis, seen)

    def rms_growth(self, steps: list[int], since: int) -> Floats:
        """Octaves that the root mean square gained since a step; NaN where it was not measured behind that step. [S]

        Args:
            steps: of the past.
            since: the step; where nothing is known of it, the first behind it of which something is.
        """
        if not steps:
            return np.full(len(self._rms), np.nan)
        past = self._past_rms.ordered().astype(np.float64)[:, -len(steps) :]
        gained = self._rms - _first(past[:, max(bisect_right(steps, since) - 1, 0) :])
        return np.where(self._at > since, gained, np.nan)

    def kurtosis_before(self) -> Floats:
        """log2 of the first kurtosis that the past holds; NaN where none does. [S]"""
        return _first(self._past_kurtosis.ordered().astype(np.float64))


def _first(values: npt.NDArray[np.float64]) -> Floats:
    """The first number of each row; NaN where there is none."""
    if not values.shape[1]:
        return np.full(len(values), np.nan)
    return np.asarray(values[np.arange(len(values)), np.argmax(~np.isnan(values), axis=1)])
