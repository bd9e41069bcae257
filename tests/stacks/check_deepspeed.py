"""A DeepSpeed engine on a CPU under each stage of ZeRO, against the same engine without a watch."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}

import deepspeed
import torch
from torch import nn

from fp8watch.integrations.deepspeed import attach_deepspeed
from fp8watch_agent.record import StepStatus


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return (self.down(torch.relu(self.up(x))) - x).float().square().mean()


def engine_of(stage: int, **bf16):
    torch.manual_seed(0)
    model = Net()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    config = {
        "train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True, "steps_per_print": 10**9,
        "zero_force_ds_cpu_optimizer": False, "bf16": {"enabled": True, **bf16},
    }  # fmt: skip
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def batches(num: int):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 32, generator=generator).bfloat16() for _ in range(2 * num)]


def train(engine, data):
    """(mean loss, norm) of each step."""
    made, parts = [], []
    for x in data:
        loss = engine(x)
        parts.append(float(loss.detach()))
        boundary = engine.is_gradient_accumulation_boundary()
        engine.backward(loss)
        engine.step()
        if boundary:
            made.append((sum(parts) / len(parts), float(engine.get_global_grad_norm() or 0.0)))
            parts.clear()
    return made


@pytest.fixture(scope="module", autouse=True)
def group():
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # shared memory between ranks, compiled for minutes
    deepspeed.init_distributed(dist_backend="gloo")
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_losses_norms_and_steps_are_the_engines_and_nothing_changes(kept, stage):
    plain = train(engine_of(stage), batches(6))
    engine = engine_of(stage)
    watch = attach_deepspeed(engine, recipe="observe")
    seen = train(engine, batches(6))
    watch.detach()
    assert seen == plain
    assert engine.global_steps == 6
    assert kept.steps() == list(range(1, 7))
    assert list(kept.losses().values()) == pytest.approx([loss for loss, _ in seen], abs=1e-4)
    assert list(kept.norms().values()) == pytest.approx([norm for _, norm in seen], rel=1e-3)
    assert {site.module for site in kept[0].sites if site.recipe != "probe"} == {"up", "down"}
    assert "step" not in engine.__dict__
    assert watch.guard.errors == {}


def test_a_resumed_engine_goes_on_with_its_run_and_its_steps(kept, tmp_path):
    engine = engine_of(1)
    watch = attach_deepspeed(engine, recipe="observe")
    train(engine, batches(3))
    engine.save_checkpoint(tmp_path, client_state={"fp8watch": watch.state_dict()})
    watch.detach()
    engine = engine_of(1)
    _, client = engine.load_checkpoint(tmp_path)
    watch = attach_deepspeed(engine, recipe="observe", state=client["fp8watch"])
    train(engine, batches(2))
    watch.detach()
    assert kept.steps() == [1, 2, 3, 4, 5]
    assert len(kept.run_ids()) == 1


def test_an_overflow_is_a_skipped_step(kept):
    engine = engine_of(1, check_grad_overflow=True)
    watch = attach_deepspeed(engine, recipe="observe")
    data = batches(3)
    data[2][0, 0] = float("inf")
    train(engine, data)
    watch.detach()
    assert engine.skipped_steps == 1
    assert kept.steps() == [1, 2, 3]
    statuses = [int(header["status"]) for header, *_ in kept[0].steps]
    assert statuses == [StepStatus.OK, StepStatus.SKIPPED, StepStatus.OK]
