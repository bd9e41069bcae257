"""Which attention modules never see a later token; those that begin to are told.

Shapes:     a number a look, by module     Thread: training, behind the end of a step
"""

from __future__ import annotations

from collections import Counter

from fp8watch_agent.training_names import SEES_AHEAD

MIN_LOOKS = 6
"""Looks at which a module saw no later token, before it counts as causal. One that ever did before is not."""


class CausalAttention:
    """What the modules of one watch have shown so far."""

    def __init__(self) -> None:
        self._looks: Counter[str] = Counter()
        self._not_causal: set[str] = set()

    def only_news(self, numbers: dict[str, float]) -> None:
        """Leave of the numbers of a step those of causal modules that saw ahead."""
        for name in [n for n in numbers if n.startswith(SEES_AHEAD)]:
            if not numbers[name]:
                self._looks[name] += 1
            elif self._looks[name] < MIN_LOOKS:
                self._not_causal.add(name)
            if not numbers[name] or name in self._not_causal:
                del numbers[name]
