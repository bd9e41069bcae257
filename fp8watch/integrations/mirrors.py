"""Where `fp8watch.mirror` sends scalars: a small function each for wandb, TensorBoard, MLflow and trackio.

    fp8watch.mirror(watch, to=to_wandb())

Thread:     the mirror's own

Each takes hold of the run that is active where it is made, because those libraries look for theirs by thread. In wandb
and trackio the scalars have an axis of their own, `fp8watch/step`: the trainer's may have gone on meanwhile.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

Values = dict[str, float | str]
STEP = "fp8watch/step"


def to_wandb(run: Any = None) -> Callable[[Values, int], None]:
    """Log to a wandb run; None: the active one.

    Raises:
        RuntimeError: no run is active.
    """
    wandb = importlib.import_module("wandb")
    run = wandb.run if run is None else run
    if run is None:
        raise RuntimeError("wandb has no active run: call wandb.init() first, or give to_wandb(run)")
    run.define_metric(STEP, hidden=True)
    run.define_metric("fp8watch/*", step_metric=STEP)
    return lambda values, step: run.log({**values, STEP: step})


def to_tensorboard(writer: Any) -> Callable[[Values, int], None]:
    """Add to a `torch.utils.tensorboard.SummaryWriter`.

    Raises:
        TypeError: not a writer.
    """
    if not callable(getattr(writer, "add_scalar", None)):
        raise TypeError(f"writer={type(writer).__name__}: must be a SummaryWriter")

    def log(values: Values, step: int) -> None:
        for name, value in values.items():
            (writer.add_text if isinstance(value, str) else writer.add_scalar)(name, value, step)

    return log


def to_mlflow(run_id: str | None = None) -> Callable[[Values, int], None]:
    """Log to an MLflow run; None: the active one. Text becomes a tag, `fp8watch.incident`.

    Raises:
        RuntimeError: no run is active.
    """
    client = importlib.import_module("mlflow").MlflowClient()
    if run_id is None:
        active = importlib.import_module("mlflow").active_run()
        if active is None:
            raise RuntimeError("MLflow has no active run: call mlflow.start_run() first, or give to_mlflow(run_id)")
        run_id = active.info.run_id

    def log(values: Values, step: int) -> None:
        for name, value in values.items():
            if isinstance(value, str):
                client.set_tag(run_id, name.replace("/", "."), value)
            else:
                client.log_metric(run_id, name, value, step=step)

    return log


def to_trackio() -> Callable[[Values, int], None]:
    """Log to the trackio run that is active.

    Raises:
        RuntimeError: no run is active.
    """
    run = importlib.import_module("trackio.context_vars").current_run.get()
    if run is None:
        raise RuntimeError("trackio has no active run: call trackio.init() first")
    return lambda values, step: run.log({**values, STEP: step})
