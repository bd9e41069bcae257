"""Gradients of which each process keeps a part of the sum: what this one gave of one part, and what its optimizer got if it is its own.

Shapes:     the rows of one shard of a gradient, [rows, ...] -> a sample of them, in all processes the same elements
Thread:     training, and autograd's; nothing waits for a device

FSDP2 shows a parameter as a DTensor. While its module runs there is a plain one in its place; autograd gives that the gradient of
this process alone, and a reduce-scatter leaves to each process the sum of its own rows. So in one turn all processes sample the rows of
one of them: each says what it gave of these (`gradient_sketch`), and who holds them says what arrived. The turns go from shard to shard.

Where the plain parameter is, FSDP2 tells nobody; it is read from its own state, and where that is another one nothing is seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fp8watch.session.gradient_sample import sample
from fp8watch.session.gradient_sketch import sketches
from fp8watch_agent.guard import Guard


class Shards:
    """How FSDP2 lays one parameter over processes: along its rows, once, or once in each of several groups that are copies (HSDP).

    Args:
        of_fsdp: its own entry of the parameter.
        parameter: as optimizers hold it, a DTensor.
    """

    def __init__(self, of_fsdp: Any, parameter: Any) -> None:
        mesh, placements = parameter.device_mesh, parameter.placements
        axis = next(i for i, p in enumerate(placements) if p.is_shard())
        self._of_fsdp, self.parameter = of_fsdp, parameter
        self.processes: int = mesh.size()
        self._mine: int = mesh.get_local_rank(axis)
        self._rows = -(-parameter.shape[0] // mesh.size(axis))  # the last may have fewer, or none
        self.num = -(-parameter.shape[0] // self._rows)  # that have rows

    @property
    def whole(self) -> Any:
        """The plain parameter that autograd gives gradients; None where there is none yet."""
        return getattr(self._of_fsdp, "_unsharded_param", None)

    @property
    def is_cleared(self) -> bool:
        """Whether no earlier backward has left a gradient to add to."""
        kept = (self.parameter, "grad"), (self.whole, "grad"), (self._of_fsdp, "unsharded_accumulated_grad")
        return all(getattr(where, name, None) is None for where, name in kept)

    def rows_of(self, gradient: Tensor, shard: int) -> Tensor:
        """[M, ...] -> [rows, ...], those of one shard."""
        first = shard * self._rows
        return gradient.narrow(0, first, min(self._rows, gradient.shape[0] - first))

    def is_mine(self, shard: int) -> bool:
        """Whether this process steps with its rows."""
        return shard == self._mine


def all_shards(model: nn.Module, held: Iterable[Any]) -> dict[int, Shards]:
    """id -> how it is laid out, of the parameters that an optimizer holds and FSDP2 shards in a way that is known here."""
    asked = {id(p) for p in held if hasattr(p, "placements")}
    found: dict[int, Shards] = {}
    for module in model.modules() if asked else ():
        get = getattr(module, "_get_fsdp_state", None)
        state = get() if callable(get) else None
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for of_fsdp in (one for group in groups for one in getattr(group, "fsdp_params", ())):
            parameter = getattr(of_fsdp, "sharded_param", None)
            if id(parameter) in asked and _is_known(parameter):
                found[id(parameter)] = Shards(of_fsdp, parameter)
    return found


def _is_known(parameter: Any) -> bool:
    """Along its rows over all processes, and whole but for that. Tensor parallelism, and pipelines beside it, are not."""
    shards = [p for p in parameter.placements if p.is_shard()]
    others = [p for p in parameter.placements if not (p.is_shard() or p.is_replicate())]
    return (
        len(shards) == 1
        and not others
        and type(shards[0]).__name__ == "Shard"  # there is a strided one
        and shards[0].dim == 0
        and parameter.shape[0] > 0
        and parameter.device_mesh.size() == torch.distributed.get_world_size()
        and parameter.device_mesh.size() > 1  # alone, nobody holds it against anything
    )


class ShardLook:
    """At the rows of one shard of one parameter, from the first backward of a step to its optimizer.

    Args:
        name: of the parameter.
        shards: how it is laid out.
        turn: which look of the run this is, in all processes alike.
        guard: counts what goes wrong.
    """

    def __init__(self, name: str, shards: Shards, turn: int, guard: Guard) -> None:
        self._name, self._shards, self._turn, self._guard = name, shards, turn, guard
        self._shard = turn % shards.num
        self._handle: RemovableHandle | None = None
        self._given: Tensor | None = None  # float32 sample of what backwards added up
        self._readable = True

    def begin(self) -> None:
        """A backward of the model has begun."""
        whole = self._shards.whole
        if self._handle is None and type(whole) is nn.Parameter and whole.requires_grad:
            self._handle = whole.register_hook(self._see)  # type: ignore[no-untyped-call]

    def let_go(self) -> None:
        """Look no more, and leave nothing on the parameter."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def before(self) -> dict[str, Any]:
        """The optimizer is about to step: numbers of the step. Called without gradients."""
        self.let_go()
        gradient = self._shards.parameter.grad
        if self._given is None or not self._readable or gradient is None:
            return {}
        got = None
        if self._shards.is_mine(self._shard):
            got = sample(getattr(gradient, "_local_tensor", gradient), self._turn)
            if got is None or got.shape != self._given.shape:
                return {}
        return sketches(self._name, self._given, got, self._shards.processes)

    @torch.no_grad()
    def _see(self, given: Tensor) -> None:
        """Autograd is about to add a gradient, of another micro-batch where it is not the first."""
        try:
            now = sample(self._shards.rows_of(given, self._shard), self._turn) if type(given) is Tensor else None
            if now is None:
                self._readable = False
            elif self._given is None or self._shards.is_cleared:  # where an update was left out, it begins anew
                self._given = now.clone()
            else:
                self._given += now
        except Exception as error:  # noqa: BLE001 - training goes on, and the guard counts
            self._guard.swallow("gradients", error)
