"""The scalars of a watch arrive in wandb, TensorBoard and MLflow, without a network."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fp8watch
from fp8watch.integrations.mirrors import to_mlflow, to_tensorboard, to_wandb


def train(to, *, steps=4):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fp8watch.attach(model, recipe="observe") as watch:
        fp8watch.mirror(watch, to=to, every=2)
        for _ in range(steps):
            model(torch.randn(16, 32)).square().mean().backward()
            optimizer.step()
    assert watch.guard.errors == {}


def test_tensorboard(kept, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        train(to_tensorboard(writer))
    read = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in read.Scalars("fp8watch/amax_max")] == [1, 3]
    assert "fp8watch/worst_tile_sqnr_db" in read.Tags()["scalars"]


def test_wandb_has_an_axis_of_its_own(kept, tmp_path, monkeypatch):
    import wandb

    with pytest.raises(RuntimeError, match=r"call wandb.init\(\) first"):
        to_wandb()
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(mode="offline", dir=str(tmp_path), settings=wandb.Settings(x_disable_stats=True))
    run.log({"loss": 1.0}, step=500)  # ours must not be refused because the trainer's step has gone on
    train(to_wandb())
    summary = dict(run.summary)
    run.finish()
    assert summary["fp8watch/step"] == 3
    assert summary["fp8watch/amax_max"] > 0
    assert "loss" in summary


def test_mlflow_gets_metrics_of_the_run_that_was_active(kept, tmp_path, monkeypatch):
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file://{tmp_path}/runs")
    with pytest.raises(RuntimeError, match=r"call mlflow.start_run\(\) first"):
        to_mlflow()
    with mlflow.start_run() as run:
        to = to_mlflow()
        train(to)
        to({"fp8watch/incident": "http://c/incidents/1"}, 3)
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "fp8watch/amax_max")
    assert [m.step for m in history] == [1, 3]
    assert mlflow.MlflowClient().get_run(run.info.run_id).data.tags["fp8watch.incident"] == "http://c/incidents/1"
