"""accelerate: a tracker that attaches, keeps its state beside accelerate's checkpoints, and detaches at `end_training`.

    tracker = Fp8WatchTracker(recipe="observe")
    accelerator = Accelerator(log_with=[tracker, "tensorboard"])
    model, optimizer = accelerator.prepare(model, optimizer)
    tracker.attach(accelerator, model)

Thread:     training

Loss, gradient norm, learning rate and the ends of steps are seen as `fp8watch.attach` sees them. accelerate counts no
steps, so they are counted from `start_step` on, or from the checkpoint's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from accelerate.tracking import GeneralTracker

from fp8watch.integrations.trainer_watch import TrainerWatch, load_state, save_state

SEEN = frozenset({"loss", "grad_norm", "lr"})
"""Scalars of a step that the watch sees by itself."""


class Fp8WatchTracker(GeneralTracker):  # type: ignore[misc]  # of a library that is not installed everywhere
    """Forwards what `accelerator.log` is given, and holds the watch of the training.

    Args:
        mirror: where scalars go as well, such as `fp8watch.integrations.mirrors.to_wandb()`.
        arguments: for `fp8watch.attach`.

    Raises:
        TypeError: an argument that attach does not have.
    """

    name = "fp8watch"
    requires_logging_directory = False
    main_process_only = False  # every rank records

    def __init__(self, *, mirror: Callable[..., Any] | None = None, **arguments: Any) -> None:
        super().__init__()
        self._first = arguments.pop("start_step", 0)
        self._held = TrainerWatch("accelerate", arguments, mirror)
        self._hooks: list[Any] = []

    @property
    def tracker(self) -> Any:
        """The `fp8watch.Watch`; None before `attach` and after `finish`."""
        return self._held.watch

    def attach(self, accelerator: Any, model: Any, *, resume_from: str | os.PathLike[str] | None = None) -> Any:
        """Attach to a model, prepared or not.

        Args:
            accelerator: its `save_state` writes the watch's state beside its own, a file for each rank.
            model: any nn.Module.
            resume_from: folder of such a checkpoint: run, step number and delayed scales go on. `accelerator.load_state`
                alone comes too late for the run, which is chosen here; it brings back step number and scales.

        Returns:
            the `fp8watch.Watch`.

        Raises:
            TypeError, ValueError: as `fp8watch.attach` does.
        """
        state = None if resume_from is None else load_state(resume_from)
        first = self._first if state is None else int(state.get("step", self._first))
        self._held.begin(model, step=first, state=state)
        self._forget_hooks()
        self._hooks = [
            accelerator.register_save_state_pre_hook(self._save),
            accelerator.register_load_state_pre_hook(self._load),
        ]
        return self._held.watch

    def _save(self, models: Any, weights: Any, folder: str) -> None:
        self._held.do("accelerate", lambda watch: save_state(folder, watch))

    def _load(self, models: Any, folder: str) -> None:
        watch = self._held.watch
        state = None if watch is None else load_state(folder, watch.identity.rank)
        if state is not None:
            self._held.load(state)

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Nothing of a configuration is recorded."""

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers of the step that ends next, by name; those of `SEEN` are the watch's own, text is passed over."""
        kept = {
            name: value
            for name, value in values.items()
            if name not in SEEN and not name.startswith("fp8watch/") and _is_number(value)
        }
        self._held.do("accelerate", lambda watch: watch.log(**kept))

    def finish(self) -> None:
        """Send what is recorded, and detach."""
        self._forget_hooks()
        self._held.end()

    def _forget_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _is_number(value: Any) -> bool:
    return (isinstance(value, int | float) and not isinstance(value, bool)) or (
        getattr(value, "numel", lambda: 0)() == 1 and value.is_floating_point()
    )
