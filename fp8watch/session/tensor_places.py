"""Where the tensors of an optimizer lie: its moments, and the weights that it changes.

Shapes:     state of an optimizer -> whether each of T tensors is the same one, in the same memory
Thread:     training
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

Optimizer = torch.optim.Optimizer


class TensorPlace(NamedTuple):
    """Where one tensor lies."""

    name: str
    parameter: Tensor
    key: str | None  # in the optimizer's state; None: the weight itself
    holder: Any  # what the state holds; of a sharded one `local` is this rank's part
    local: Tensor


@dataclass
class TensorPlaces:
    """Where the tensors of one optimizer lie. It is asked twice a step, so what there is to compare stands in lists that are
    compared without a call of Python for each."""

    parameters: list[Tensor] = field(default_factory=list)  # that have a state
    states: list[dict[str, Any]] = field(default_factory=list)  # one each
    of_moment: list[dict[str, Any]] = field(default_factory=list)  # of each moment the state that holds it
    keys: list[str] = field(default_factory=list)  # and its key there
    moments: list[Any] = field(default_factory=list)
    holders: list[Any] = field(default_factory=list)  # moments, and weights behind them
    addresses: list[int] = field(default_factory=list)
    whole: bool = True  # none of them is a part of a sharded tensor

    @classmethod
    def of(cls, optimizer: Optimizer, places: list[TensorPlace]) -> TensorPlaces:
        """Of tensors, moments first."""
        found = cls(holders=[place.holder for place in places], addresses=[place.local.data_ptr() for place in places])
        known: set[int] = set()
        for place in places:
            if place.key is None:
                continue
            state = state_of(optimizer, place.parameter)
            if id(place.parameter) not in known:
                known.add(id(place.parameter))
                found.parameters.append(place.parameter)
                found.states.append(state)
            found.of_moment.append(state)
            found.keys.append(place.key)
            found.moments.append(place.holder)
        found.whole = not any(hasattr(holder, "_local_tensor") for holder in found.holders)
        return found

    def is_current(self, optimizer: Optimizer) -> bool:
        """Whether all of them are the same tensors, in the same memory."""
        if not (
            self.holders
            and all(map(is_, map(optimizer.state.get, self.parameters), self.states))
            and all(map(is_, map(dict.get, self.of_moment, self.keys), self.moments))
        ):
            return False
        held = self.holders if self.whole else [getattr(holder, "_local_tensor", holder) for holder in self.holders]
        return list(map(Tensor.data_ptr, held)) == self.addresses


def state_of(optimizer: Optimizer, parameter: Tensor) -> dict[str, Any]:
    """What it keeps of a parameter; empty where that is no dict."""
    state = optimizer.state.get(parameter)
    return state if isinstance(state, dict) else {}
