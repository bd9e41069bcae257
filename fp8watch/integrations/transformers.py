"""Hugging Face Trainer: a callback that attaches, numbers steps as the Trainer does, and goes on after a resume.

    trainer = Trainer(..., callbacks=[Fp8WatchCallback(recipe="observe")])

Thread:     training

Recorded are the Trainer's own loss (the sum of a step's shares where it divides by the tokens of the whole step, times the
number of ranks where it multiplies by that), the norm that it clips by, and the learning rate of the step. Step n is its
`global_step` n, as in its logs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from fp8watch.integrations.trainer_watch import TrainerWatch, load_state, save_state

KEY = "fp8watch"
"""Where `trainer_state.json` keeps what a resumed training needs to go on with its run."""


class Fp8WatchCallback(TrainerCallback):  # type: ignore[misc]  # of a library that is not installed everywhere
    """Attaches when training begins and detaches when it ends.

    Args:
        mirror: where scalars go as well, such as `fp8watch.integrations.mirrors.to_wandb()`.
        arguments: for `fp8watch.attach`; `run` is the Trainer's `run_name` unless it is given. `start_step` is the
            Trainer's, and after a resume so is `run_id`, unless it is given or FP8WATCH_RUN is set.

    Raises:
        TypeError: an argument that attach does not have.
    """

    def __init__(self, *, mirror: Callable[..., Any] | None = None, **arguments: Any) -> None:
        self._held = TrainerWatch("transformers", arguments, mirror)

    @property
    def watch(self) -> Any:
        """The `fp8watch.Watch` while training runs, else None."""
        return self._held.watch

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach to the Trainer's model."""
        saved = _saved(args, state) if state.global_step else None
        name = {"run": args.run_name} if getattr(args, "run_name", None) else {}
        self._held.begin(kwargs["model"], step=state.global_step + 1, state=saved, **name)
        self._held.do("transformers", lambda watch: _remember(state, watch))
        if getattr(args, "average_tokens_across_devices", False) and torch.distributed.is_initialized():
            # each rank's loss is of its own tokens over those of all ranks; the Trainer multiplies behind the model
            world = torch.distributed.get_world_size()
            self._held.do("transformers", lambda watch: watch._share_of(world))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The step that begins has the number that the Trainer will log it under."""
        self._held.number(state.global_step + 1)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Delayed scales go into the checkpoint's folder; the rest is in `trainer_state.json` already."""
        folder = _folder(args, state)
        if folder.is_dir():
            self._held.do("transformers", lambda watch: save_state(folder, watch))
            self._held.do("transformers", lambda watch: watch.checkpoint_saved(state.global_step))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Send what is recorded, and detach."""
        self._held.end()


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _remember(state: Any, watch: Any) -> None:
    """Run and recipe, as plain JSON, in the state that the Trainer saves with each checkpoint."""
    kept = {
        k: v for k, v in watch.state_dict(contents=False).items() if k in ("run_id", "session", "fingerprint", "facts")
    }
    state.stateful_callbacks[KEY] = kept


def _saved(args: Any, state: Any) -> Mapping[str, Any] | None:
    """The watch's state of the checkpoint that the Trainer has just loaded."""
    given = getattr(args, "resume_from_checkpoint", None)
    folders = [Path(given)] if isinstance(given, str) else []
    for folder in (*folders, _folder(args, state)):
        if folder.is_dir() and (found := load_state(folder)) is not None:
            return found
    kept = state.stateful_callbacks.get(KEY)
    return kept if isinstance(kept, Mapping) else None
