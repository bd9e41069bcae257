"""The loop trains as it says: seams in order, legs that go on exactly, and mistakes of the proving ground told apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from proving import planted
from proving.case import Case
from proving.families import build
from proving.loop import Seams, train, train_step
from proving.training import Change
from torch import Tensor

STEPS = 6


class Recorded(Change):
    """Writes down which seams were called."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if hasattr(Change, name) and not name.startswith("_") and name not in ("step", "resumes"):
            self.called.append(name)
        return super().__getattribute__(name)


def test_a_step_calls_the_seams_in_the_order_that_training_says() -> None:
    t, change = build("accumulate", 1), Recorded()
    t.accumulate = 2
    train_step(t, t.model, 0, Seams(change), None)
    micro = ["on_batch", "on_loss"]
    assert change.called == ["before_step", *micro, *micro, "after_backward", "before_update", "after_update"]


def test_equal_cases_train_equally(tmp_path: Path) -> None:
    case = Case("gpt", "healthy", "twin", "", 2)
    first, second = (train(case, 0, 0, None, tmp_path, 3) for _ in range(2))
    other = train(Case("gpt", "healthy", "twin", "", 3), 0, 0, None, tmp_path, 3)
    assert first["loss"] == second["loss"]
    assert first["loss"] != other["loss"]


def test_a_second_leg_goes_on_exactly_where_the_first_one_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Case, "draw", lambda self, training: Resumed())
    case = Case("llama", "planted", "fault", "medium", 1)
    legs = [train(case, leg, 0, None, tmp_path, STEPS) for leg in (0, 1)]
    monkeypatch.setattr(Case, "draw", lambda self, training: Change())
    straight = train(case.twin, 0, 0, None, tmp_path, STEPS)
    assert [out["first_step"] for out in legs] == [0, 3]
    assert legs[0]["loss"] + legs[1]["loss"] == straight["loss"]


class Resumed(Change):
    """Nothing but a new process."""

    resumes, step = True, 3


def test_a_planted_resume_loses_the_moments_and_nothing_else() -> None:
    fault = planted.LostMoments.draw(np.random.default_rng(0), build("llama", 1), "medium")
    assert fault.resumes
    state = {"optimizer": {"state": {0: 1}, "param_groups": []}}
    assert fault.before_resume(build("llama", 1), state) == {"optimizer": {"state": {}, "param_groups": []}}


def test_what_a_change_raises_is_a_mistake_of_the_proving_ground(tmp_path: Path) -> None:
    out = train(Case("llama", "planted-mistake", "trap", "", 1), 0, 0, None, tmp_path, STEPS)
    assert "ZeroDivisionError" in out["broken"]
    assert len(out["loss"]) == 3
    assert "died" not in out


def test_what_the_training_raises_is_its_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(self: Change, t: Any, step: int, batch: Any) -> Any:
        return {"wrong": batch} if step == 2 else batch

    monkeypatch.setattr(Change, "on_batch", dies)
    out = train(Case("llama", "healthy", "twin", "", 1), 0, 0, None, tmp_path, STEPS)
    assert "KeyError" in out["died"]
    assert len(out["loss"]) == 2
    assert "broken" not in out


def test_a_loss_that_is_not_finite_is_kept_as_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nan(self: Change, t: Any, step: int, loss: Tensor) -> Tensor:
        return loss * torch.nan if step == 1 else loss

    monkeypatch.setattr(Change, "on_loss", nan)
    out = train(Case("llama", "healthy", "twin", "", 1), 0, 0, None, tmp_path, 2)
    assert out["loss"][0] is not None
    assert out["loss"][1] is None
