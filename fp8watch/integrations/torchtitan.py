"""torchtitan: an override that watches what its Trainer trains, with its step numbers, its loss and its gradient norm.

    torchrun ... -m torchtitan.train --module llama3 --config llama3_8b \\
        --override.imports 'fp8watch.integrations.torchtitan.watch={"recipe": "observe"}'

Thread:     training

Nothing of the configuration changes. What torchtitan builds is attached to before its first step, behind the checkpoint that it
loads. The loss of a step is the sum of what its micro-batches return, times the number of ranks that share it: the mean over
those is what torchtitan logs. In pipelines only ranks with the last stage have one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config.override import override
from torchtitan.distributed import utils as dist_utils
from torchtitan.trainer import Trainer

from fp8watch.integrations.trainer_watch import TrainerWatch, load_state, save_state

GRAPHS = (
    "torchtitan replays its steps as a CUDA graph, and what a watch sees of that was not tried: "
    "--training.disable_cuda_graphs"
)

_asked: list[tuple[Any, TrainerWatch]] = []
"""Configurations of metrics that the override was applied to, whose Trainers have not begun."""


@override(target=MetricsProcessor.Config, description="watched by fp8watch")  # type: ignore[untyped-decorator]
def watch(config: Any, **arguments: Any) -> Any:
    """The override, as `--override.imports` names it; the configuration is given back as it is.

    Args:
        config: of the Trainer's metrics.
        arguments: for `fp8watch.attach`; `run` is the model's name and flavor unless it is given.

    Raises:
        TypeError: an argument that attach does not have.
    """
    _asked.append((config, TrainerWatch("torchtitan", arguments)))
    _wrap_train()
    return config


def attach_torchtitan(trainer: Any, *, mirror: Callable[..., Any] | None = None, **arguments: Any) -> Training:
    """Attach where `trainer.train()` makes its first step; for scripts that build a Trainer themselves.

    Args:
        trainer: a torchtitan Trainer that has not begun to train.
        mirror: where scalars go as well, see `fp8watch.mirror`.
        arguments: for `fp8watch.attach`; `run` is the model's name and flavor unless it is given.

    Returns:
        its `watch` is the `fp8watch.Watch` while training runs. It detaches where `train` ends or raises.

    Raises:
        TypeError: not a Trainer, or an argument that attach does not have.
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(f"trainer={type(trainer).__name__}: must be a torchtitan Trainer")
    return Training(trainer, TrainerWatch("torchtitan", arguments, mirror))


class Training:
    """One Trainer whose methods are looked at, until its `train` ends."""

    def __init__(self, trainer: Any, held: TrainerWatch) -> None:
        self._trainer, self._held = trainer, held
        self._loss: Tensor | None = None
        self._undo: list[Callable[[], None]] = []
        self._put(trainer, "train", self._train)
        self._put(trainer, "train_step", self._train_step)
        self._put(trainer, "forward_backward_step", self._forward_backward_step)

    @property
    def watch(self) -> Any:
        """The `fp8watch.Watch` from the first step to the end of training, else None."""
        return self._held.watch

    def _put(self, owner: Any, name: str, ours: Callable[..., Any]) -> None:
        """`ours` is given the method that it stands before."""
        own, method = owner.__dict__.get(name), getattr(owner, name)
        setattr(owner, name, functools.wraps(method)(functools.partial(ours, method)))
        self._undo.append(lambda: delattr(owner, name) if own is None else setattr(owner, name, own))

    def _train(self, train: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._put(dist_utils, "clip_grad_norm_", self._clip)
        self._put(self._trainer.checkpointer, "save", self._save)
        try:
            result = train(*args, **kwargs)
        except BaseException:
            self._held.died()
            raise
        else:
            self._held.end()
            return result
        finally:
            while self._undo:
                self._undo.pop()()

    def _begin(self) -> None:
        """Attach: the checkpoint is loaded, and the first step has its number."""
        trainer = self._trainer
        spec, parts = trainer.config.model_spec, trainer.model_parts
        step = int(trainer.step)
        folder = self._folder(step - 1) if step > 1 else None
        self._held.begin(
            parts[0] if len(parts) == 1 else nn.ModuleList(parts),
            step=step,
            state=None if folder is None else load_state(folder),
            run=f"{spec.name} {spec.flavor}",
            optimizer=list(trainer.optimizers),
        )
        self._held.do("torchtitan", self._say_of_graphs)

    def _say_of_graphs(self, watch: Any) -> None:
        if self._trainer.fwd_bwd_fn != self._trainer._forward_backward_body:
            watch._say(GRAPHS)

    def _train_step(self, train_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._held.watch is None:
            self._begin()
        self._held.number(int(self._trainer.step))
        self._loss = None
        return train_step(*args, **kwargs)

    def _forward_backward_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loss = step(*args, **kwargs)
        self._held.do("torchtitan", lambda watch: self._add(watch, loss))
        return loss

    def _add(self, watch: Any, loss: Any) -> None:
        trainer, dims = self._trainer, self._trainer.parallel_dims
        if type(loss) is not Tensor or (dims.pp_enabled and not trainer.pp_has_last_stage):
            return
        ranks = dims.get_optional_mesh("loss") if dims.dp_cp_enabled else None
        share = loss.detach() * (1 if ranks is None else ranks.size())  # a graph writes its loss anew in each replay
        self._loss = share if self._loss is None else self._loss + share
        watch.log(loss=self._loss)

    def _clip(self, clip: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        norm = clip(*args, **kwargs)
        if type(norm) is Tensor:
            self._held.do("torchtitan", lambda watch: watch.log(grad_norm=norm))
        return norm

    def _save(self, save: Callable[..., Any], step: int, *args: Any, **kwargs: Any) -> Any:
        saved = save(step, *args, **kwargs)
        if saved:
            self._held.do("torchtitan", lambda watch: self._keep_state(watch, int(step)))
        return saved

    def _keep_state(self, watch: Any, step: int) -> None:
        folder = self._folder(step)
        if folder is not None:
            save_state(folder, watch)
        watch.checkpoint_saved(step)

    def _folder(self, step: int) -> Path | None:
        """Of the checkpoint behind a step; None where it is not on a disk."""
        config = self._trainer.config
        where = f"{config.dump_folder}/{config.checkpoint.folder}"
        return None if "://" in where else Path(where) / f"step-{step}"


def _wrap_train() -> None:
    """Let the Trainer that has one of these configurations be looked at when it begins."""
    original = Trainer.train
    if getattr(original, "_by_fp8watch", False):
        return

    @functools.wraps(original)
    def train(self: Any) -> Any:
        for i, (config, held) in enumerate(_asked):
            if config is self.config.metrics:
                del _asked[i]
                Training(self, held)
                return self.train()  # its own now, which calls this one
        return original(self)

    train._by_fp8watch = True  # type: ignore[attr-defined]
    Trainer.train = train
