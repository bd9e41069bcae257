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
from fp8watch_agent.update_names import GROUP


class Shards:
    """How FSDP2 lays one parameter over processes: along its rows, once, or once in each of several groups that are copies (HSDP).
    Beside tensor parallelism it does so with this rank's part of it, among the processes that hold the same part.

    Args:
        of_fsdp: its own entry of the parameter.
        parameter: as optimizers hold it, a DTensor.
    """

    def __init__(self, of_fsdp: Any, parameter: Any) -> None:
        info, rows = of_fsdp.mesh_info, of_fsdp._orig_size[0]
        self._of_fsdp, self.parameter = of_fsdp, parameter
        self._placed = _placed(of_fsdp)
        self.processes: int = info.mesh.size()
        self.group = int(info.mesh.mesh.min()) if self.processes < torch.distributed.get_world_size() else None
        """The first of these processes; None where they are all of the run."""
        self._mine: int = info.shard_mesh_rank
        self._rows = -(-rows // info.shard_mesh_size)  # the last may have fewer, or none
        self.num = -(-rows // self._rows)  # that have rows

    @property
    def whole(self) -> Any:
        """The parameter that autograd gives gradients, plain or in the parts of tensor parallelism; None where there is none yet."""
        return getattr(self._of_fsdp, "_unsharded_param", None)

    @property
    def is_cleared(self) -> bool:
        """Whether no earlier backward has left a gradient to add to."""
        kept = (self.parameter, "grad"), (self.whole, "grad"), (self._of_fsdp, "unsharded_accumulated_grad")
        return all(getattr(where, name, None) is None for where, name in kept)

    def here(self, gradient: Tensor) -> Tensor | None:
        """What this rank gave of its part; None where ranks of tensor parallelism have yet to add theirs."""
        placements = getattr(gradient, "placements", None)
        local = getattr(gradient, "_local_tensor", gradient) if placements == self._placed else None
        return local if type(local) is Tensor else None

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
            if id(parameter) in asked and _is_known(of_fsdp):
                found[id(parameter)] = Shards(of_fsdp, parameter)
    return found


def _placed(of_fsdp: Any) -> Any:
    """Where tensor parallelism has the parts of a parameter: placements; None where it does not concern it."""
    if not getattr(of_fsdp, "is_dtensor", False):
        return None
    spec = getattr(of_fsdp, "_unsharded_dtensor_spec", None) or getattr(of_fsdp, "_tp_spec", None)
    return getattr(spec, "placements", ())


def _is_known(of_fsdp: Any) -> bool:
    """Along its rows over several processes. Layouts over one mesh of all kinds of parallelism are not known."""
    info: Any = getattr(of_fsdp, "mesh_info", None)
    size: Any = getattr(of_fsdp, "_orig_size", ())
    return (
        hasattr(info, "shard_mesh_rank")
        and not getattr(info, "is_spmd_mesh", False)
        and getattr(getattr(of_fsdp, "fsdp_placement", None), "dim", None) == 0
        and len(size) > 0
        and size[0] > 0
        and getattr(info, "mesh", None) is not None
        and info.mesh.size() > 1  # alone, nobody holds it against anything
        and _placed(of_fsdp) != ()
        and not any(place.is_partial() for place in _placed(of_fsdp) or ())
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
        if self._handle is None and isinstance(whole, nn.Parameter) and whole.requires_grad:
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
        group = "" if self._shards.group is None else f"{GROUP}{self._shards.group}"
        return sketches(f"{self._name}{group}", self._given, got, self._shards.processes)

    @torch.no_grad()
    def _see(self, given: Tensor) -> None:
        """Autograd is about to add a gradient, of another micro-batch where it is not the first."""
        try:
            mine = self._shards.here(given)
            now = None if mine is None else sample(self._shards.rows_of(mine, self._shard), self._turn)
            if now is None:
                self._readable = False
            elif self._given is None or self._shards.is_cleared:  # where an update was left out, it begins anew
                self._given = now.clone()
            else:
                self._given += now
        except Exception as error:  # noqa: BLE001 - training goes on, and the guard counts
            self._guard.swallow("gradients", error)
