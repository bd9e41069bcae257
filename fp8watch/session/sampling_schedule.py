"""Which steps are observed, and how often each weight is hashed.

Thread:     training
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from fp8watch_agent.checks import Rule, argument

HASH_EVERY_STEPS = 32
HASH_EVERY = Annotated[int, Meta(ge=0), Rule("must be a whole number of steps, 0 for never")]
Window = tuple[int, "int | None"]
"""(first step, the step after the last, or None for no end)."""


@dataclass(frozen=True)
class Schedule:
    """Steps by their numbers, so that all ranks do the same in the same step.

    Outside of the windows nothing is measured and only the scalars of a step are sent; without windows there is no
    outside. `every` is not part of it, because the overhead budget may raise it.
    """

    windows: tuple[Window, ...] = ()
    hash_every: int = HASH_EVERY_STEPS  # 0: never

    @classmethod
    def checked(cls, windows: Sequence[Window] | None, hash_every: int) -> Schedule:
        """From attach's arguments.

        Raises:
            ValueError: a window without a step in it, or that is no pair of step numbers; a negative `hash_every`.
        """
        argument("hash_every", hash_every, HASH_EVERY)
        made: list[Window] = []
        for window in windows or ():
            try:
                start, stop = window
            except (TypeError, ValueError):
                raise ValueError(f"windows: {window!r}: must be a pair (first step, step after the last)") from None
            numbers = [n for n in (start, stop) if n is not None]
            whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers)
            if start is None or not whole or (stop is not None and stop <= start):
                raise ValueError(
                    f"windows: ({start!r}, {stop!r}): must be (first step, step after the last) with at least one step "
                    "between; None as the second for no end"
                )
            made.append((start, stop))
        return cls(tuple(made), hash_every)

    def inside(self, step: int) -> bool:
        """Whether a step is observed."""
        return not self.windows or any(a <= step and (b is None or step < b) for a, b in self.windows)
