"""Lightning: a callback that attaches, numbers steps as its Trainer does, and keeps its state in Lightning's checkpoints.

    trainer = Trainer(..., callbacks=[Fp8Watch(recipe="observe")])

Thread:     training

Recorded are the loss that `training_step` returns (under manual optimization what `manual_backward` is given), the norm
of the gradients before they are clipped, and the learning rate. A step has the number that `trainer.global_step` has
behind it, which counts the steps of all optimizers. Lightning's loggers write it under another: batches that stepped,
from 0 on; `steps="logger"` takes that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:  # as the training imports it
    from pytorch_lightning import Callback
else:
    from lightning.pytorch import Callback

from fp8watch.integrations.trainer_watch import TrainerWatch, gradient_norm

COUNTS = ("global_step", "logger")


class Fp8Watch(Callback):  # type: ignore[misc]  # of a library that is not installed everywhere
    """Attaches when training starts and detaches when it ends, or when it raises.

    Args:
        steps: what steps are numbered by: "global_step", or "logger" for what Lightning's loggers call trainer/global_step.
        grad_norm: look at the norm of the gradients where Lightning does not clip by it; one pass over them a step.
        mirror: where scalars go as well, such as `fp8watch.integrations.mirrors.to_tensorboard(writer)`.
        arguments: for `fp8watch.attach`. `start_step` is Lightning's, and after a resume so is `run_id`, unless it is
            given or FP8WATCH_RUN is set.

    Raises:
        TypeError: an argument that attach does not have.
        ValueError: another `steps`.
    """

    def __init__(
        self,
        *,
        steps: str = "global_step",
        grad_norm: bool = True,
        mirror: Callable[..., Any] | None = None,
        **arguments: Any,
    ) -> None:
        if steps not in COUNTS:
            raise ValueError(f"steps={steps!r}: must be one of {', '.join(COUNTS)}")
        self._held = TrainerWatch("lightning", arguments, mirror)
        self._by_logger, self._grad_norm = steps == "logger", grad_norm
        self._loaded: dict[str, Any] | None = None

    @property
    def watch(self) -> Any:
        """The `fp8watch.Watch` while training runs, else None."""
        return self._held.watch

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach to the LightningModule, behind what was restored."""
        state, self._loaded = self._loaded, None
        own = _torch_optimizers(trainer)
        self._held.begin(pl_module, step=self._number(trainer), state=state, **({"optimizer": own} if own else {}))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """The step that ends next: its number, and its gradients before they are clipped."""
        self._held.number(self._number(trainer))
        if self._grad_norm and not (pl_module.automatic_optimization and trainer.gradient_clip_val):
            self._held.do("lightning", lambda watch: _show_norm(watch, optimizer))

    def _number(self, trainer: Any) -> int:
        if self._by_logger:
            return int(trainer.fit_loop.epoch_loop._batches_that_stepped)
        return int(trainer.global_step) + 1

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Send what is recorded, and detach."""
        self._held.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """What is known of the step that broke leaves now."""
        self._held.died()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """A checkpoint is about to be written."""
        self._held.do("lightning", lambda watch: watch.checkpoint_saved())

    def state_dict(self) -> dict[str, Any]:
        """For Lightning's checkpoint: what a resumed training needs to go on with its run and its delayed scales."""
        return self._held.state()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Kept until training starts."""
        self._loaded = dict(state_dict) or None


def _torch_optimizers(trainer: Any) -> list[Any]:
    """Those of the Trainer, so that the first step waits for all of them; none where a strategy wraps them otherwise."""
    found = list(trainer.optimizers)
    return found if all(isinstance(o, torch.optim.Optimizer) for o in found) else []


def _show_norm(watch: Any, optimizer: Any) -> None:
    """Norm of one optimizer's gradients; those of several are put together where the step closes."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = gradient_norm(parameters)
    if norm is not None:
        watch._on_clip(parameters, norm)
