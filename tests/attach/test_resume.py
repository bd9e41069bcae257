"""A run that goes on: from a checkpoint, after a restart of the launcher, in a child of fork, with the observer off."""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap

import pytest
import torch
from support.ranks import run_ranks

from fp8watch.observer.pass_counter import first_tensor
from fp8watch.quantize.per_tensor import DelayedScale
from fp8watch.recipe import AmaxHistory


def test_a_resumed_session_says_what_its_checkpoint_was_made_with(attach, mlp, train):
    before = attach(mlp, recipe="delayed")
    train(mlp, steps=3)
    state = before.state_dict()
    before.detach()
    after = attach(mlp, recipe="delayed", start_step=0)
    after.load_state_dict(state)
    facts, session = after._recorder.facts, after._recorder.session
    assert facts["checkpoint_fingerprint"] == session.fingerprint
    assert all(
        facts[f"checkpoint.{name}"] == value for name, value in session.facts.items() if name.startswith("input.")
    )
    assert facts["checkpoint.step"] == 3
    train(mlp, steps=1)
    assert int(after._recorder.steps[0][0]["step"]) == 3
    after.detach()
    other = attach(mlp)
    other.load_state_dict({k: v for k, v in state.items() if k != "amax_histories"})
    assert other._recorder.facts["checkpoint_fingerprint"] != other._recorder.session.fingerprint
    assert other._recorder.facts["checkpoint.input.scaling"] == "delayed"


def test_a_state_of_an_older_version_says_nothing(attach, mlp):
    watch = attach(mlp)
    watch.load_state_dict({"step": 7})
    assert watch._recorder.facts == {"checkpoint.step": 7}


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_no_operand_can_have_is_not_loaded(attach, mlp, train, scale):
    watch = attach(mlp, recipe="delayed")
    train(mlp, steps=2)
    state = watch.state_dict()
    name = next(iter(state["amax_histories"]))
    want = watch.state_dict()
    state["amax_histories"][name]["scale"].fill_(scale)
    with pytest.raises(ValueError, match="must be finite and above 0"):
        watch.load_state_dict(state)
    kept = watch.state_dict()
    assert all(
        torch.equal(kept["amax_histories"][n][k], want["amax_histories"][n][k])
        for n in want["amax_histories"]
        for k in ("scale", "amax_history")
    )
    alone = DelayedScale(watch._plan.sites.quantizers[0].state.format, AmaxHistory(4))
    with pytest.raises(ValueError, match=str(scale)):
        alone.load_state_dict({"scale": torch.full((1, 1), scale), "amax_history": torch.ones(4)})
    assert not alone.amax_history.any()


def test_an_output_that_holds_itself_ends_no_training(attach):
    cyclic = []
    cyclic += [cyclic, {"again": cyclic}, 3]
    assert first_tensor(cyclic) is None
    cyclic.append(torch.ones(1))
    deep = torch.ones(2)
    for _ in range(3000):
        deep = [deep]
    assert torch.equal(first_tensor(deep), torch.ones(2))

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = torch.nn.Linear(32, 32)

        def forward(self, x):
            out = {"hidden": self.up(x)}
            out["self"] = out
            return out

    model = Model()
    watch = attach(model, recipe="delayed")
    model(torch.randn(8, 32))["hidden"].sum().backward()
    watch.step()
    assert not watch.guard.errors
    assert len(watch._recorder.steps) == 1


LIFE = textwrap.dedent(
    """
    import os, sys, torch, fp8watch
    from fp8watch_agent.recorder import Recorder
    model = torch.nn.Sequential(torch.nn.Linear(32, 32))
    watch = fp8watch.attach(model, overhead_budget=None)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    def train(steps):
        for _ in range(steps):
            opt.zero_grad(); model(torch.randn(8, 32)).square().mean().backward(); opt.step()
    train(2)
    child = os.fork()
    if not child:
        train(2)  # as a worker that inherits the model by accident
        watch.log(loss=1.0)
        watch.flush(0.1)
        if sys.argv[1] == "detach":
            watch.detach()
            assert type(model[0]) is torch.nn.Linear
        os._exit(7 if sum(watch.guard.errors.values()) else 0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    train(1)
    health = watch.summary()["health"]
    print(code, watch.summary()["num_steps"], int(health["steps"]), sum(watch.guard.errors.values()))
    watch.detach()
    """
)


@pytest.mark.parametrize("how", ["detach", pytest.param("go on", marks=pytest.mark.long)])
def test_a_child_of_fork_reports_nothing_and_breaks_nothing(tmp_path, how):
    (out,) = run_ranks(tmp_path, LIFE, how, world=1)
    assert out == "0 3 3 0\n"


def test_switched_off_everything_that_a_script_calls_does_nothing(attach, mlp, train, monkeypatch):
    monkeypatch.setenv("FP8WATCH_DISABLED", "1")
    watch = attach(mlp, probes=["up"], windows=[(1, 2)], sites=["up"], hash_every=1)
    hooks = len(mlp.up._forward_hooks), len(mlp._forward_hooks)
    assert hooks == (0, 0)
    train(mlp, steps=2)
    watch.pause()
    watch.resume()
    watch.log(loss=1.0)
    watch.load_state_dict(watch.state_dict())
    assert watch.flush()
    watch.detach()
    watch.detach()
    assert watch.guard.errors == {}


@pytest.mark.parametrize("ending", ["exception", "skipped", "paused", "unfinished", "twice"])
def test_detach_under_every_ending_gives_the_model_back(attach, mlp, train, ending):
    before = sys.excepthook  # of the interpreter, or of a watch of another test that is not gone yet
    watch = attach(mlp)
    train(mlp, steps=1)
    if ending == "exception":
        with contextlib.suppress(ZeroDivisionError), watch:
            mlp(torch.randn(32, 64)).backward()
            _ = 1 / 0
    elif ending == "skipped":
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer = torch.optim.SGD(mlp.parameters(), lr=0.1, foreach=False)
        scaler.scale(mlp(torch.randn(32, 64)) * float("inf")).backward()
        scaler.step(optimizer)
        scaler.update()
    elif ending == "paused":
        watch.pause()
        mlp(torch.randn(32, 64)).backward()
    elif ending == "unfinished":
        mlp(torch.randn(32, 64))
    watch.detach()
    if ending == "twice":
        watch.detach()
    assert type(mlp.up) is torch.nn.Linear
    assert not mlp._forward_hooks
    assert watch._recorder.closed >= 1
    assert not watch.guard.errors
    assert os.environ.get("FP8WATCH_DISABLED") is None
    assert sys.excepthook is before


@pytest.mark.parametrize(
    ("before", "start", "said"), [(5, None, True), (5, 5, False), (1, None, False), (0, None, False)]
)
def test_an_optimizer_that_goes_on_while_steps_begin_at_0_is_said_once(attach, mlp, train, capsys, before, start, said):
    """A trainer that resumes, and nobody tells the watch."""
    optimizer = torch.optim.AdamW(mlp.parameters(), lr=1e-3)
    train(mlp, steps=before, optimizer=optimizer)
    saved = optimizer.state_dict()
    optimizer = torch.optim.AdamW(mlp.parameters(), lr=1e-3)
    optimizer.load_state_dict(saved)
    watch = attach(mlp) if start is None else attach(mlp, start_step=start)
    train(mlp, steps=3, optimizer=optimizer)
    lines = [line for line in capsys.readouterr().err.splitlines() if "updates before" in line]
    assert len(lines) == said
    assert not said or f"AdamW has made {before} updates before the first of this run" in lines[0]
    assert not said or f"attach(start_step={before})" in lines[0]
    assert watch.last_step == (start or 0) + 2
