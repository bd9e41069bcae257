"""Moments in fewer bits: shares, ratios and drift are those of a training that keeps them so."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import torch
from diagnose.small_models import batch_of, trained
from torch import nn

from fp8watch.diagnose import moments_what_if

LOW = torch.bfloat16


def by_hand(steps: int) -> tuple[nn.Module, nn.Module]:
    """The same steps, with moments as they are and in BF16."""
    made = []
    for low in (False, True):
        model, optimizer = trained(5, dim=32, layers=1)
        if low:
            _round(optimizer)
        for step in range(steps):
            optimizer.zero_grad()
            model(*batch_of(50 + step, dim=32)).backward()
            optimizer.step()
            if low:
                _round(optimizer)
        made.append(model)
    return made[0], made[1]


def _round(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name].copy_(state[name].to(LOW))


def length(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return sum(float((p - q).detach().double().square().sum()) for p, q in pairs) ** 0.5


def test_drift_is_that_of_a_training_with_moments_in_bf16_and_nothing_of_the_callers_changes() -> None:
    model, optimizer = trained(5, dim=32, layers=1)
    start, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    random = torch.get_rng_state()
    batches = [batch_of(50 + i, dim=32) for i in range(4)]
    found = moments_what_if(
        model, batches, optimizer=optimizer, steps=9, formats={"low": LOW, "as it is": torch.float32}
    )
    plain, low = by_hand(4)
    rounded, same = found.formats
    assert found.steps == 4
    assert rounded.drift == pytest.approx(length(low, plain) / length(plain, start), rel=1e-9)
    assert rounded.drift > 0
    assert (same.drift, same.update_rms_ratio, same.loss) == (0.0, 1.0, found.loss)
    assert {m.moment: (m.flushed, m.stuck) for m in same.moments} == {"exp_avg": (0, 0), "exp_avg_sq": (0, 0)}
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), start.parameters(), strict=True))
    assert repr(optimizer.state_dict()) == repr(state)
    assert torch.equal(torch.get_rng_state(), random)


class Weight(nn.Module):
    """Its gradient is the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, grad: torch.Tensor) -> torch.Tensor:
        return (self.w * grad).sum()


def costs(grads: list[Any], **formats: torch.dtype) -> dict[str, tuple[float, float]]:
    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=1e-3, betas=(0.0, 0.999))

    found = moments_what_if(Weight(), grads, optimizer=adam, steps=len(grads), formats=formats)
    return {m.moment: (m.flushed, m.stuck) for m in found.formats[0].moments}


def test_what_is_flushed_and_what_does_not_move_is_counted() -> None:
    # v = 1e-3·g²: 4e-10 and 1e-11 are 0 in FP16, whose smallest number is 6e-8
    grad = torch.tensor([1.0, 0.5, 6e-4, 1e-4])
    assert costs([grad], x=torch.float16)["exp_avg_sq"][0] == 0.5
    # behind the first step v grows by half, a third, ... and from step 258 on by less than half of BF16's spacing
    few = costs([grad] * 8, x=LOW)["exp_avg_sq"]
    many = costs([grad] * 1500, x=LOW)["exp_avg_sq"]
    assert few == (0.0, 0.0)
    assert many[1] > 0.5


def test_what_cannot_work_is_refused() -> None:
    model, optimizer = trained(1, dim=32, layers=1)
    batch = [batch_of(0, dim=32)]
    with pytest.raises(ValueError, match="'fp4' is unknown; known are bf16, fp16"):
        moments_what_if(model, batch, optimizer=optimizer, formats=["fp4"])
    with pytest.raises(ValueError, match="batches is empty"):
        moments_what_if(model, [], optimizer=optimizer)
    with pytest.raises(ValueError, match="SGD keeps no moments"):
        moments_what_if(model, batch, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_training_that_breaks_by_itself_is_held_against_nothing() -> None:
    batches = [torch.tensor([x, 1.0, 1.0, 1.0]) for x in (1.0, 2.0, math.nan, 1.0)]
    made: Any = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "steps": 4}
    words = "loss of step 2 is nan with moments as they are: .* give steps=2 or batches before the failure"
    with pytest.raises(ValueError, match=words):
        moments_what_if(Weight(), batches, **made)
    with pytest.raises(ValueError, match="loss of step 0 is nan .* give batches before the failure"):
        moments_what_if(Weight(), batches[2:], **made)


def test_a_training_that_breaks_in_a_format_is_json_all_the_same() -> None:
    huge = moments_what_if(
        Weight(), [torch.tensor([1e6, 1.0, 1.0, 1.0])] * 2, formats=["fp16"], steps=2,
        optimizer=lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9),
    )  # fmt: skip
    assert not math.isfinite(huge.formats[0].drift)
    plain = json.loads(json.dumps(huge.as_json(), allow_nan=False))
    assert plain["formats"][0]["drift"] in ("nan", "inf")
