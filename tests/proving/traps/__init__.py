"""Healthy events that look like faults: restarts, schedules, data, parts that are frozen, things done between steps.

Whatever is raised about one of these above information is a false alarm. Where and how much is drawn, as with faults. Each is
something that people do on purpose, and after which training goes on well.
"""

from __future__ import annotations

from proving.training import Trap
from proving.traps import adjustments, batches, between, habits, modules, practices, regimes, schedules, stages

TRAPS: dict[str, type[Trap]] = {
    found.name: found
    for module in (adjustments, batches, between, habits, modules, practices, regimes, schedules, stages)
    for found in vars(module).values()
    if isinstance(found, type) and issubclass(found, Trap) and found.__module__ == module.__name__
}
"""Name -> trap."""
