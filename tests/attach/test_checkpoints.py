"""Checkpoints: when they are written, what they say of the numerics, and which of them hold a bad update."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
from torch import nn

from fp8watch.session.checkpoint_steps import MAX_KEPT, CheckpointSteps
from fp8watch_agent.record import StepStatus


def saved_bytes(what):
    held = io.BytesIO()
    torch.save(what, held)
    held.seek(0)
    return held


def test_a_checkpoint_that_training_writes_is_noticed_and_told(attach, mlp, train, tmp_path):
    watch = attach(mlp)
    train(mlp, steps=3)
    saved_bytes({"lr": 0.1, "model": {"other.weight": torch.ones(2)}})  # no weights of ours
    assert "checkpoints" not in watch._recorder.facts
    torch.save({"step": 3, "model": mlp.state_dict(), "fp8watch": watch.state_dict()}, tmp_path / "a.pt")
    assert watch._recorder.facts["checkpoints"] == "2"
    train(mlp, steps=2)
    assert watch._recorder.steps[3][3]["checkpoint_saved"] == 1  # in the step behind it, for the detectors
    assert "checkpoint_saved" not in watch._recorder.steps[4][3]
    import torch.distributed.checkpoint as dcp

    watch.detach()
    watch = attach(mlp, start_step=5)  # it is imported now
    train(mlp, steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": mlp.state_dict()}, checkpoint_id=tmp_path / "b", no_dist=True)
    watch.checkpoint_saved(9)
    assert watch._recorder.facts["checkpoints"] == "5 9"
    torch_save, dcp_save = torch.save, dcp.save
    watch.detach()
    assert (torch.save, dcp.save) != (torch_save, dcp_save)
    assert torch.save.__module__ == "torch.serialization"
    assert not hasattr(torch.save, "__wrapped__")


def test_a_save_that_fails_is_no_checkpoint_and_raises_as_it_would(attach, mlp, train, tmp_path):
    watch = attach(mlp)
    train(mlp, steps=1)
    with pytest.raises(RuntimeError, match="does not exist"):
        torch.save(mlp.state_dict(), tmp_path / "nowhere" / "a.pt")
    assert "checkpoints" not in watch._recorder.facts


def test_the_last_good_step_is_the_one_before_the_update_that_broke(attach, mlp, train):
    watch = attach(mlp)
    assert watch.last_good_step is None
    train(mlp, steps=3)
    assert (watch.last_good_step, watch.last_good_checkpoint) == (2, None)
    saved_bytes(mlp.state_dict())
    optimizer = torch.optim.SGD(mlp.parameters(), lr=0.1)
    x = torch.randn(8, next(mlp.parameters()).shape[1])
    x[0, 0] = float("nan")
    mlp(x).sum().backward()
    optimizer.step()
    train(mlp, steps=2)
    saved_bytes(mlp.state_dict())
    assert (watch.last_good_step, watch.last_good_checkpoint) == (2, 2)
    assert watch._checkpoints.poisoned == [watch.last_step]


def test_what_broke_in_a_step_without_an_update_poisons_nothing():
    steps = CheckpointSteps()
    for step in range(10):
        status = StepStatus.SKIPPED if step == 4 else StepStatus.OK
        steps.arrived(step, status, broken=step == 4, broken_weights=False)
        steps.note(step)
    assert (steps.last_good_step, steps.last_good_checkpoint, steps.poisoned) == (9, 9, [])
    steps.arrived(10, StepStatus.ABORTED, broken=True, broken_weights=True)  # they were written in step 9
    assert (steps.last_good_step, steps.last_good_checkpoint, steps.poisoned) == (8, 8, [9])


def test_a_checkpoint_that_was_poisoned_stays_so_where_training_goes_back_until_it_is_written_anew():
    steps = CheckpointSteps()
    for step in (1, 3, 5):
        steps.note(step)
    steps.arrived(4, StepStatus.OK, broken=True, broken_weights=False)
    steps.loaded(2)
    assert steps.poisoned == [5]
    assert steps.last_good_checkpoint == 3
    steps.note(5)
    assert (steps.poisoned, steps.last_good_checkpoint) == ([], 5)
    for step in range(1000):
        steps.note(step)
    assert len(steps.fact()["checkpoints"].split()) == MAX_KEPT


@pytest.mark.parametrize("recipe", ["blockwise", "delayed", "observe"])
def test_what_is_loaded_as_it_was_saved_says_nothing(attach, mlp, train, recipe):
    before = attach(mlp, recipe=recipe)
    train(mlp, steps=2)
    held = saved_bytes({"model": mlp.state_dict(), "fp8watch": before.state_dict()})
    contents = before.fingerprint()
    assert len(contents["weights"]) == len(list(mlp.parameters()))
    assert bool(contents["codes"]) is (recipe != "observe")
    assert bool(contents["delayed"]) is (recipe == "delayed")
    train(mlp, steps=2)
    before.detach()
    saved = torch.load(held, weights_only=True)
    after = attach(mlp, recipe=recipe)
    after.load_state_dict(saved["fp8watch"])  # before the weights: they are compared where the optimizer steps
    mlp.load_state_dict(saved["model"])
    train(mlp, steps=1)
    assert not [name for name in after._recorder.facts if "loaded" in name]


@pytest.mark.parametrize("what", ["weight", "bias", "history"])
def test_what_is_loaded_otherwise_is_named(attach, mlp, train, capsys, what):
    watch = attach(mlp, recipe="delayed" if what == "history" else "blockwise")
    train(mlp, steps=2)
    saved = copy.deepcopy(watch.state_dict())
    linear_name, linear = next((n, m) for n, m in mlp.named_modules() if isinstance(m, nn.Linear))
    with torch.no_grad():
        if what == "history":
            name = f"{linear_name}.input"
            saved["amax_histories"][name]["amax_history"][-1] *= 2
        elif what == "weight":
            linear.weight[1, 2] += 1.0
        else:
            linear.bias[1] += 1.0
    watch.load_state_dict(saved)
    train(mlp, steps=1)
    facts = watch._recorder.facts
    group = "loaded_delayed" if what == "history" else "loaded_weights"
    wanted = f"{linear_name}.input" if what == "history" else f"{linear_name}.{what}"
    assert facts[group].startswith(f"{wanted} of ")
    assert ("loaded_delayed" in facts) is (what == "history")
    assert facts[f"checkpoint.{group}"] == "as saved"
    assert ("loaded_codes" in facts) is (what == "weight")
    assert (
        f"what was loaded is not what was saved: {group.removeprefix('loaded_')}: {wanted}" in capsys.readouterr().err
    )


def test_a_fingerprint_changes_no_number(attach, mlp, train):
    twin = copy.deepcopy(mlp)
    for model, reads in ((mlp, True), (twin, False)):
        torch.manual_seed(3)
        watch = attach(model, recipe="delayed")
        for _ in range(3):
            train(model, steps=1)
            if reads:
                watch.state_dict()
                saved_bytes(model.state_dict())
        watch.detach()
    assert all(torch.equal(a, b) for a, b in zip(mlp.parameters(), twin.parameters(), strict=True))
