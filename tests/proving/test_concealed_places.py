"""Each concealed fault bites in a training at the step where it says and not before, and those outside of the kernels do what they say."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from proving import families, split, tiny
from proving.data import IGNORED
from proving.families import build
from proving.faults import FAULTS
from proving.faults._sites import quantizers
from proving.faults.pairings import AxesReshaped
from proving.faults.returns import _KEPT, AbsentWorkerAveraged, ShardsOfOlderSave
from proving.loop import load, saved
from proving.placed import steps_of, with_fault
from proving.training import SEVERITIES, Change, Training
from torch import Tensor

import fp8watch

CONCEALED = sorted(name for name, cls in FAULTS.items() if cls.generator in split.CONCEALED_GENERATORS)
IN_KERNELS = ("edges", "ledgers", "stashes", "swizzles")
DISTIL = pytest.mark.skipif(bool(families.missing("distil")), reason="needs transformers")


@pytest.fixture(autouse=True)
def compute_path_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Faults act on what is computed; the observer would only take time."""
    monkeypatch.setenv("FP8WATCH_DISABLED", "stats")
    monkeypatch.setenv("FP8WATCH_SPOOL_DIR", str(tmp_path))


KINDS = {"amax-in-few-bits": "current", "teacher-off-by-one": "taught"}
"""Of `tiny.KINDS`, where not every severity has a place in "tied"."""


class TestEachFault:
    @pytest.mark.parametrize("name", [n for n in CONCEALED if FAULTS[n].generator in IN_KERNELS])
    def test_the_gradient_changes_at_its_step_and_not_before(self, name: str) -> None:
        severity = "mild" if name == "ragged-tile-overread" else "severe"

        def trained(faulty: bool) -> list[dict[str, Tensor]]:
            t, fault = with_fault(name, KINDS.get(name, "tied"), severity)
            fault.step, fault.until = 3, None
            if hasattr(fault, "chance"):
                fault.chance, fault.start = 1.0, 0.0  # rows that are not padded
            change = fault if faulty else Change()
            fault.before_attach(t)
            watch = fp8watch.attach(t.model, recipe=t.recipe)
            gradients = []
            try:
                change.attached(t, watch)
                change.after_backward = lambda t, step: gradients.append(  # type: ignore[method-assign]
                    {n: p.grad.clone() for n, p in t.model.named_parameters() if p.grad is not None}
                )
                steps_of(t, 0, 5, change)
            finally:
                change.undo()
                watch.detach()
            return gradients

        got, right = trained(True), trained(False)
        for step in range(5):
            equal = all(torch.equal(got[step][n], right[step][n]) for n in right[step])
            assert equal == (step < 3), step

    @pytest.mark.parametrize("name", CONCEALED)
    def test_what_is_expected_was_said_before_it_ran(self, name: str) -> None:
        for severity in SEVERITIES:
            t, fault = with_fault(name, KINDS.get(name, "tied"), severity)
            assert fault.expected.modes
            assert set(fault.expected.modules or ()) <= {n for n, _ in t.model.named_modules()}
            assert fault.drawn

    def test_nothing_is_changed_before_the_step_of_an_average(self) -> None:
        t, fault = with_fault("absent-worker-averaged", "images")
        usual, _ = with_fault("absent-worker-averaged", "images")
        fault.step, fault.until = 2, None
        got, right = steps_of(t, 0, 5, fault), steps_of(usual, 0, 5, Change())
        assert got[:3] == right[:3]
        assert got[3:] != right[3:]


class TestHistories:
    def test_the_scale_is_of_what_was_made_up_every_few_steps_and_right_in_between(self) -> None:
        for severity in SEVERITIES:
            t, fault = with_fault("history-of-dummy-passes", "delayed", severity)
            fault.step, fault.until, fault.every = 2, 7, 2
            module = t.model.get_submodule(fault.modules[0])
            watch = fp8watch.attach(t.model, recipe="delayed")
            depths: list[float] = []
            try:
                (quantizer,) = quantizers(module, "input")
                state: Any = quantizer.state
                seen = module.register_forward_hook(  # the pass has begun, and its scale stands
                    lambda m, args, out, state=state, depths=depths: depths.append(
                        float(args[0].detach().abs().max() * state.scale) / 448.0
                    )
                )
                steps_of(t, 0, 9, fault)
                seen.remove()
            finally:
                fault.undo()
                watch.detach()
            hit = [step for step in range(1, 9) if depths[step] > 1.5]
            assert hit == [2, 4, 6], severity
            assert depths[2] == pytest.approx(fault.depth, rel=0.4)


class TestReturns:
    def test_all_weights_become_smaller_by_one_worker_of_so_many(self) -> None:
        for severity in SEVERITIES:
            t, fault = with_fault("absent-worker-averaged", "language", severity)
            assert isinstance(fault, AbsentWorkerAveraged)
            fault.step, fault.until, fault.every = 2, 9, 3
            low, high = fault.shares[severity]
            assert 0.9 * low < fault.share < 1.1 * high
            was = {n: p.detach().clone() for n, p in t.model.named_parameters()}
            for step in range(12):
                fault.before_step(t, step)
                fault.after_update(t, step)
            times = (1 - fault.share) ** 3  # steps 2, 5 and 8
            for n, p in t.model.named_parameters():
                assert torch.allclose(p, times * was[n], rtol=1e-5), n

    def test_shards_are_those_of_some_steps_ago(self) -> None:
        nums = {}
        for severity in SEVERITIES:
            t, fault = with_fault("shards-of-older-save", "language", severity)
            assert isinstance(fault, ShardsOfOlderSave)
            fault.step, fault.age, fault.moments_too = 6, 4, severity != "mild"
            steps_of(t, 0, 2, fault)
            was = copy.deepcopy((t.model.state_dict(), t.optimizer.state_dict()["state"]))
            steps_of(t, 2, 6, fault)
            state = copy.deepcopy(saved(t, None, 6))
            now = copy.deepcopy(state)
            got = fault.before_resume(t, state)
            concerned = {f"{name}.weight" for name in fault.modules}
            for name, value in got["model"].items():
                assert torch.equal(value, (was[0] if name in concerned else now["model"])[name])
            params = [p for group in t.optimizer.param_groups for p in group["params"]]
            names = {id(p): n for n, p in t.model.named_parameters()}
            for i, of in got["optimizer"]["state"].items():
                older = names[id(params[i])] in concerned and fault.moments_too
                right = (was[1] if older else now["optimizer"]["state"])[i]["exp_avg"]
                assert torch.equal(of["exp_avg"], right)
            assert all(_KEPT not in group for group in got["optimizer"]["param_groups"])
            fresh = tiny.language()
            assert load(fresh, got) == 6
            assert float(fault.drawn["error"]) > 0
            nums[severity] = len(fault.modules)
        assert nums["mild"] == 1 < nums["medium"] < nums["severe"]

    def test_what_is_kept_changes_nothing_in_the_first_leg(self) -> None:
        t, fault = with_fault("shards-of-older-save", "language")
        usual, _ = with_fault("shards-of-older-save", "language")
        fault.step, fault.age = 5, 3
        assert steps_of(t, 0, 5, fault) == steps_of(usual, 0, 5, Change())


class TestPairings:
    def test_rows_are_put_together_from_several_samples(self) -> None:
        x = torch.arange(12).view(3, 4)  # three samples of four places
        in_time = x.t().contiguous()  # as it lies in memory
        assert (
            AxesReshaped.reshaped(x).tolist()
            == in_time.view(3, 4).tolist()
            == [[0, 4, 8, 1], [5, 9, 2, 6], [10, 3, 7, 11]]
        )

    @pytest.mark.parametrize("kind", ["language", "images"])
    def test_what_has_the_same_axes_goes_with_it_and_the_rest_stays(self, kind: str) -> None:
        for severity in SEVERITIES:
            t, fault = with_fault("axes-reshaped", kind, severity)
            fault.share = 1.0
            batch = t.batch(0)
            got = fault.on_batch(t, fault.step, batch)
            assert fault.on_batch(t, fault.step - 1, batch) is batch
            name = "pixels" if kind == "images" else "input_ids"
            assert torch.equal(got[name].flatten().sort().values, batch[name].flatten().sort().values)
            assert not torch.equal(got[name], batch[name])
            if kind == "images":
                assert torch.equal(got["labels"], batch["labels"])
            else:
                pairs, right = (
                    sorted(zip(b["input_ids"].flatten().tolist(), b["labels"].flatten().tolist(), strict=True))
                    for b in (got, batch)
                )
                assert pairs == right
                assert bool((got["labels"] == IGNORED).any())

    def test_some_rows_are_wrong(self) -> None:
        t, fault = with_fault("axes-reshaped", "images", "mild")
        batch = t.batch(0)
        got = fault.on_batch(t, fault.step, batch)
        rows = (got["pixels"] != batch["pixels"]).flatten(1).any(1)
        assert 1 <= int(rows.sum()) < len(rows)

    def test_a_teacher_speaks_of_the_next_position_or_of_the_one_before(self) -> None:
        for severity in SEVERITIES:
            t, fault = with_fault("teacher-off-by-one", "taught", severity)
            distillation, tokens = t.notes["distillation"], t.batch(0)["input_ids"].repeat(25, 1)
            right = distillation.taught(tokens)
            fault.before_step(t, fault.step - 1)
            assert torch.equal(distillation.taught(tokens), right)
            fault.before_step(t, fault.step)
            got = distillation.taught(tokens)
            rows = (got != right).flatten(1).any(1)
            assert torch.equal(got[rows], right.roll(fault.by, 1)[rows])
            assert float(rows.float().mean()) == pytest.approx(fault.share, abs=0.15)
            fault.undo()
            assert torch.equal(distillation.taught(tokens), right)

    def test_it_has_a_place_where_a_teacher_is_and_nowhere_else(self) -> None:
        with pytest.raises(AssertionError, match="no place"):
            with_fault("teacher-off-by-one", "language")

    @DISTIL
    def test_what_the_student_is_told_is_another_thing_from_then_on(self) -> None:
        t: Training = build("distil", 1)
        fault: Any = FAULTS["teacher-off-by-one"].draw(np.random.default_rng(3), t, "severe")
        batch = t.batch(0)
        right = float(t.loss(t.model, batch).detach())
        fault.before_step(t, fault.step)
        assert float(t.loss(t.model, batch).detach()) != right
