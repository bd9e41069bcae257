"""accelerate's own loop with the tracker: accumulation, resume, what is logged; nothing of training changes."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from torch import nn

import fp8watch
from fp8watch.integrations.accelerate import Fp8WatchTracker


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return (self.down(torch.relu(self.up(x))) - x).square().mean()


def train(tracker, folder, *, num=8, resume=None, until=None, log_with=(), clip=True):
    """Micro-batches of two in a step; returns (losses by step, norms, model)."""
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, log_with=[t for t in (tracker, *log_with) if t is not None] or None
    )
    accelerator.init_trackers("p")
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    first = 0
    if resume is not None:
        accelerator.load_state(resume)
        first = 4
    if tracker is not None:
        tracker.attach(accelerator, model, resume_from=resume)
    generator = torch.Generator().manual_seed(1)
    data = [torch.randn(16, 32, generator=generator) for _ in range(2 * num)]
    losses, norms, parts = [], [], []
    for x in data[2 * first :]:
        with accelerator.accumulate(model):
            loss = model(x)
            parts.append(float(loss.detach()))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                accelerator.log({"learned": 1.0, "loss": -1.0, "text": "a"})
                losses.append(sum(parts) / len(parts))
                parts.clear()
            optimizer.step()
            optimizer.zero_grad()
        if until is not None and len(losses) == until:
            break
    if until is not None:
        accelerator.save_state(folder)
    accelerator.end_training()
    return losses, norms, model


def test_losses_norms_and_steps_are_the_loops_and_nothing_changes(kept, tmp_path):
    plain, _, model = train(None, tmp_path)
    losses, norms, watched = train(Fp8WatchTracker(recipe="observe"), tmp_path)
    assert losses == plain
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), watched.parameters(), strict=True))
    assert kept.steps() == list(range(8))
    assert list(kept.losses().values()) == pytest.approx(losses, abs=1e-4)
    assert list(kept.norms().values()) == pytest.approx(norms, rel=1e-5)
    assert kept[0].steps[3][3]["learned"] == 1.0
    assert kept[0].closed


def test_a_resumed_loop_goes_on_with_its_run_and_its_steps(kept, tmp_path):
    first, *_ = train(Fp8WatchTracker(recipe="delayed"), tmp_path / "c", until=4)
    again, *_ = train(Fp8WatchTracker(recipe="delayed"), tmp_path, resume=str(tmp_path / "c"))
    assert kept.steps() == list(range(8))
    assert len(kept.run_ids()) == 1
    assert list(kept.losses().values()) == pytest.approx(first + again, abs=1e-4)
    state = torch.load(tmp_path / "c" / "fp8watch-rank0.pt", weights_only=True)
    assert state["step"] == 4
    assert kept[1].facts["checkpoint.session"] == kept[0].session.session


def test_a_mirror_may_log_to_the_same_accelerator(kept, tmp_path):
    tracker = Fp8WatchTracker(recipe="observe")
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("p")
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    watch = tracker.attach(accelerator, model)
    seen = []
    fp8watch.mirror(watch, to=lambda values, step: (seen.append(step), accelerator.log(values, step=step)), every=1)
    for _ in range(3):
        accelerator.backward(model(torch.randn(16, 32)))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    assert seen == [0, 1, 2]
    logged = [{name for name in logs if not name.startswith("batch/")} for *_, logs, _ in kept[0].steps]
    assert logged == [set(), set(), set()]
    assert watch.guard.errors == {}
