"""Training that compiles its optimizer's step, as torch's recipe does: it is one graph as before, and each step ends."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

STEPS = 8


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def losses(clip: bool, watch_with=None) -> tuple[list[Tensor], int, dict]:
    """Of some steps, with how many graphs were compiled, and what the watch says."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    watch = watch_with(model, recipe="observe") if watch_with else None
    optimizer, counter, x, seen = (
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        CompileCounter(),
        torch.randn(64, 64),
        [],
    )

    @torch.compile(backend=counter)
    def update() -> None:
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    for _ in range(STEPS):
        loss = (model(x) - x).square().mean()
        loss.backward()
        update()
        optimizer.zero_grad()
        seen.append(loss.detach())
    return seen, counter.frame_count, watch.summary() if watch else {}


@pytest.mark.filterwarnings("ignore")  # of the compiler, about torch's own optimizer
@pytest.mark.parametrize("clip", [False, True])
def test_a_compiled_step_is_compiled_once_and_ends_the_step(attach, clip):
    plain, num_graphs, _ = losses(clip)
    watched, num_watched, summary = losses(clip, attach)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert summary["num_steps"] == STEPS
    assert summary["internal_errors"] == {}
    assert num_watched <= num_graphs + 1, (
        "what looks at a step is not traced, and nothing is compiled anew in each step"
    )
