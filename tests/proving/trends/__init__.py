"""Slow trends in real trainings, most of which reach a limit: what scores the forecasts (`proving.forecasts`).

Each comes in two ways: it *arrives* at the limit within the run, or *levels off* short of it, which nothing before the
bend tells. They were written from FAILURES.md's table, without knowledge of how a forecast is made.
"""

from __future__ import annotations

from proving.trends import activations, attention, gradients, steady, weights
from proving.trends._base import Trend

TRENDS: dict[str, type[Trend]] = {
    cls.name: cls
    for cls in (
        attention.LogitsClimb,
        activations.ChannelsFade,
        activations.SaturationNears,
        weights.ColumnsFade,
        gradients.TokensFade,
        steady.Steady,
    )
}
"""Name -> trend."""
