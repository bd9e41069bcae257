"""Where the tensors of an optimizer lie: its moments, and the weights that it changes.

Shapes:     state of an optimizer -> whether each of T tensors is the same one, in the same memory
Thread:     training
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8watch.selection.wrappers import named_modules

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
    ids: list[int] = field(default_factory=list)  # of all that the optimizer's state has, and of what it has of each

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
            and self._has_states(optimizer.state)
            and all(map(is_, map(dict.get, self.of_moment, self.keys), self.moments))
        ):
            return False
        held = self.holders if self.whole else [getattr(holder, "_local_tensor", holder) for holder in self.holders]
        return list(map(Tensor.data_ptr, held)) == self.addresses

    def _has_states(self, state: Any) -> bool:
        """Whether the parameters have these states. Asked parameter by parameter, torch hashes each in Python; so that is done
        where not all of the ids are those of the last time. Ids of what is held here stand for nothing else."""
        ids = [*map(id, state), *map(id, state.values())] if isinstance(state, dict) else []
        if ids and ids == self.ids:
            return True
        found = all(map(is_, map(state.get, self.parameters), self.states))
        self.ids = ids if found else []
        return found


def state_of(optimizer: Optimizer, parameter: Tensor) -> dict[str, Any]:
    """What it keeps of a parameter; empty where that is no dict."""
    state = optimizer.state.get(parameter)
    return state if isinstance(state, dict) else {}


def parameter_names(model: nn.Module) -> Iterator[tuple[int, str]]:
    """(id, name) of each parameter, and of the copy that Megatron keeps on it."""
    for module_name, module in named_modules(model):
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{module_name}.{name}".lstrip(".")
            yield id(parameter), full
            if (copy := getattr(parameter, "main_param", None)) is not None:
                yield id(copy), full
