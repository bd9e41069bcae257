"""The watch of one training that a trainer runs: attached, numbered and detached by its adapter.

Thread:     training

An adapter uses the public face of fp8watch, as a training script does. What goes wrong after attach is counted by the
watch's guard and never reaches the trainer; arguments that cannot work raise where the adapter is made, or at attach.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import fp8watch
from fp8watch.integrations.tested_versions import untested
from fp8watch_agent.standard_error import tell

if TYPE_CHECKING:
    from fp8watch import Watch

OWNED = ("model", "start_step")
"""Arguments of attach that an adapter gives by itself."""


class TrainerWatch:
    """Holds the watch of an adapter from one training to the next.

    Args:
        stack: module of the trainer's library, for the version that was tested.
        arguments: for `fp8watch.attach`.
        mirror: where scalars go as well, see `fp8watch.mirror`.

    Raises:
        TypeError: an argument that attach does not have, or that the adapter gives by itself.
    """

    def __init__(self, stack: str, arguments: Mapping[str, Any], mirror: Callable[..., Any] | None = None) -> None:
        known = [name for name in inspect.signature(fp8watch.attach).parameters if name not in OWNED]
        for name in arguments:
            if name in OWNED:
                raise TypeError(f"{name}=: the trainer's own is taken; leave it out")
            if name not in known:
                raise TypeError(f"{name}=: attach has no such argument; it has {', '.join(known)}")
        if mirror is not None and not callable(mirror):
            raise TypeError(f"mirror={mirror!r}: must be a function (dict, step), see fp8watch.mirror")
        self._stack, self._arguments, self._mirror = stack, dict(arguments), mirror
        self.watch: Watch | None = None
        self._ended: dict[str, Any] = {}

    def begin(self, model: nn.Module, *, step: int, state: Mapping[str, Any] | None = None, **defaults: Any) -> None:
        """Attach for a training whose next step has this number; one that was cut short before is ended.

        Args:
            model: the trainer's, unwrapped.
            step: number of the first step.
            state: `watch.state_dict()` of the checkpoint that the training goes on from.
            defaults: arguments of attach that hold where none were given.

        Raises:
            TypeError, ValueError: as `fp8watch.attach` does.
        """
        self.end()
        self._ended = {}
        arguments = {**defaults, **self._arguments}
        run_id = (state or {}).get("run_id")
        if isinstance(run_id, str) and not os.environ.get("FP8WATCH_RUN"):
            arguments.setdefault("run_id", run_id)
        watch = self.watch = fp8watch.attach(model, start_step=step, **arguments)
        for line in watch.guard.run("versions", untested, [self._stack]) or []:
            self._say(line)
        if state:
            self.load({**state, "step": step})
        if self._mirror is not None:
            fp8watch.mirror(watch, to=self._mirror)

    def load(self, state: Mapping[str, Any]) -> None:
        """Step number and delayed scales of a checkpoint, or the reason why the latter begin anew."""
        watch = self.watch
        if watch is None:
            return
        try:
            watch.load_state_dict(state)
        except ValueError as error:
            self._say(f"delayed scales of the checkpoint are not loaded and begin anew: {error}")
            watch.load_state_dict({k: v for k, v in state.items() if k != "amax_histories"})

    def _say(self, text: str) -> None:
        if self.watch is not None and self.watch.identity.rank == 0:
            tell(text)

    def do(self, place: str, action: Callable[[Watch], Any]) -> Any:
        """What the action returns; None without a watch, or where it fails."""
        return None if self.watch is None else self.watch.guard.run(place, action, self.watch)

    def number(self, step: int) -> None:
        """Give the step that runs the trainer's number."""
        if self.watch is not None:
            self.watch.number(step)

    def loss_scale(self, scale_of: Callable[[], Any]) -> None:
        """Note what the loss of the step that runs was multiplied by; a tensor on a device is not read.

        Args:
            scale_of: gives it, or None where there is no loss scale.
        """

        def note(watch: Watch) -> None:
            scale = scale_of()
            if scale is not None:
                here = scale.reshape(()) if isinstance(scale, Tensor) else torch.tensor(float(scale), device="cpu")
                watch._scalars.see_loss_scale(here)

        self.do("loss scale", note)

    def state(self) -> dict[str, Any]:
        """`watch.state_dict()`; after the end that of the end, because a checkpoint may be written behind it."""
        return self._ended if self.watch is None else self.do("state", lambda watch: watch.state_dict()) or {}

    def died(self) -> None:
        """Training raised: what is known of the step that runs leaves now, as an aborted step."""
        self._ended = self.state()
        self.do("death", lambda watch: watch.__exit__(RuntimeError, RuntimeError("training ended"), None))
        self.watch = None

    def end(self) -> None:
        """Detach; without a watch nothing."""
        if self.watch is not None:
            self._ended = self.state()
            self.watch.detach()
            self.watch = None


def gradient_norm(parameters: Any) -> Tensor | None:
    """Norm of all gradients where they lie; None where there are none, or where ranks hold parts of them (DTensor)."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads or any(type(g) is not Tensor or g.is_sparse for g in grads):
        return None
    return torch.nn.utils.get_total_norm(grads)


def save_state(folder: str | os.PathLike[str], watch: Watch) -> None:
    """Write `watch.state_dict()` of this rank into a checkpoint's folder."""
    where = Path(folder)
    where.mkdir(parents=True, exist_ok=True)
    torch.save(watch.state_dict(), where / f"fp8watch-rank{watch.identity.rank}.pt")


def load_state(folder: str | os.PathLike[str], rank: int | None = None) -> dict[str, Any] | None:
    """What `save_state` wrote; None where it wrote nothing, or what is there cannot be read.

    Args:
        folder: of the checkpoint.
        rank: of this process; None: as the launcher says. Where a rank has no file of its own, rank 0's holds.
    """
    if rank is None:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else int(os.environ.get("RANK", "0"))
    for name in (f"fp8watch-rank{rank}.pt", "fp8watch-rank0.pt"):
        path = Path(folder) / name
        if path.is_file():
            try:
                found: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
            except Exception as error:  # noqa: BLE001  a damaged file costs the continuation, never the training
                tell(f"{path} cannot be read ({type(error).__name__}); the run begins anew")
                return None
            return found
    return None
