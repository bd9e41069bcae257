"""When a step ends, and what it carries."""

from __future__ import annotations

import copy
import gc
import math
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from support.ranks import run_ranks
from torch import nn

from fp8watch_agent.batch_names import BATCH
from fp8watch_agent.record import StepStatus


def steps(watch):
    return [(int(h["step"]), StepStatus(int(h["status"])).name) for h, *_ in watch._recorder.steps]


def test_steps_are_noticed_without_being_told(attach, mlp, train):
    watch = attach(mlp, start_step=100)
    losses = train(mlp, steps=4, lr=0.5)
    assert steps(watch) == [(100, "OK"), (101, "OK"), (102, "OK"), (103, "OK")]
    assert watch._recorder.losses() == pytest.approx(losses, rel=1e-6)
    assert {float(h["lr"]) for h, *_ in watch._recorder.steps} == {0.5}


def test_micro_batches_are_one_step(attach, mlp):
    watch = attach(mlp)
    optimizer = torch.optim.SGD(mlp.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = mlp(torch.randn(32, 64))
        (loss / 3).backward()
        losses.append(float(loss.detach()))
    optimizer.step()
    assert steps(watch) == [(0, "OK")]
    _, rows = watch._recorder.step(0)
    assert {int(r["num_calls"]) for r in rows.values()} == {3}
    assert watch._recorder.losses() == pytest.approx([np.mean(losses)], rel=1e-6)


class Shares(nn.Module):
    """Divides its loss by the items that it is told of, as the models of transformers do; else by its own."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x, num_items_in_batch=None):
        total = self.linear(x).pow(2).sum()
        return total / (x.shape[0] if num_items_in_batch is None else num_items_in_batch)


@pytest.mark.parametrize("windows", [(4, 4, 4), (5, 5, 1)])  # of an epoch that does not divide, the last is short
def test_losses_that_are_shares_of_the_step_are_added_and_others_averaged(attach, windows):
    model = Shares()
    watch = attach(model, recipe="observe")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    expected = []
    for told in (True, False):
        for num in windows:
            batches = [torch.randn(16, 64) for _ in range(num)]
            items = sum(len(b) for b in batches) if told else None
            losses = [model(b, num_items_in_batch=items) for b in batches]
            for loss in losses:
                loss.backward()
            optimizer.step()
            losses = [float(loss.detach()) for loss in losses]
            expected.append(sum(losses) if told else sum(losses) / num)
    assert watch._recorder.losses() == pytest.approx(expected, rel=1e-6)
    assert max(expected) < 2 * min(expected)


def test_an_optimizer_of_something_else_ends_nothing(attach, mlp):
    watch = attach(mlp)
    other = nn.Linear(16, 16)
    stranger = torch.optim.SGD(other.parameters(), lr=0.1)
    mlp(torch.randn(32, 64)).backward()
    other(torch.randn(4, 16)).sum().backward()
    stranger.step()
    assert steps(watch) == []


def test_an_optimizer_step_without_a_backward_ends_nothing(attach, mlp, train):
    watch = attach(mlp)
    optimizer = torch.optim.SGD(mlp.parameters(), lr=0.1)
    optimizer.step()
    train(mlp, steps=1, optimizer=optimizer)
    optimizer.step()
    assert steps(watch) == [(0, "OK")]


def test_two_optimizers_end_one_step_together(attach, mlp):
    watch = attach(mlp)
    a = torch.optim.SGD(mlp.up.parameters(), lr=0.1)
    b = torch.optim.SGD(mlp.down.parameters(), lr=0.1)
    for _ in range(4):
        mlp(torch.randn(32, 64)).backward()
        a.step()
        b.step()
    assert [s for _, s in steps(watch)] == ["OK"] * 4


def test_a_step_that_gradscaler_skips_is_skipped(attach, mlp):
    watch = attach(mlp)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(mlp.parameters(), lr=0.1, foreach=False)
    for bad in (False, True, False):
        optimizer.zero_grad()
        loss = mlp(torch.randn(32, 64)) * (math.inf if bad else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert [s for _, s in steps(watch)] == ["OK", "SKIPPED", "OK"]
    assert float(watch._recorder.steps[-1][0]["loss_scale"]) == 4.0  # halved by the skip


def test_a_disabled_gradscaler_does_nothing(attach, mlp):
    watch = attach(mlp)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    optimizer = torch.optim.SGD(mlp.parameters(), lr=0.1)
    for _ in range(2):
        scaler.scale(mlp(torch.randn(32, 64))).backward()
        scaler.step(optimizer)
        scaler.update()
    assert steps(watch) == [(0, "OK"), (1, "OK")]


def test_the_gradscaler_of_another_model_skips_nothing_here(attach, mlp):
    models = [mlp, copy.deepcopy(mlp)]
    watches = [attach(m) for m in models]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in models]
    for bad in (True, False):
        for model, scaler, factor in zip(models, scalers, (math.inf if bad else 1.0, 1.0), strict=True):
            scaler.scale(model(torch.randn(32, 64)) * factor).backward()
        for scaler, optimizer in zip(scalers, optimizers, strict=True):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert steps(watches[0]) == [(0, "SKIPPED"), (1, "OK")]
    assert steps(watches[1]) == [(0, "OK"), (1, "OK")]


def test_a_loop_without_a_torch_optimizer_says_step(attach, mlp):
    watch = attach(mlp)
    for n in (5, 6):
        mlp(torch.randn(32, 64)).backward()
        watch.log(loss=torch.tensor(2.0), grad_norm=3, max_attention_logit=7.0, batch_id="b1")
        watch.step(n)
    assert [n for n, _ in steps(watch)] == [5, 6]
    header, _, _, logs, batch_id = watch._recorder.steps[0]
    assert (float(header["loss"]), float(header["grad_norm"])) == (2.0, 3.0)
    assert {name: value for name, value in logs.items() if not name.startswith(BATCH)} == {"max_attention_logit": 7.0}
    assert batch_id == "b1"


def test_an_exception_inside_the_context_sends_the_dying_step(attach, mlp):
    watch = attach(mlp)
    with pytest.raises(ZeroDivisionError), watch:
        mlp(torch.randn(32, 64)).backward()
        raise ZeroDivisionError
    assert steps(watch) == [(0, "ABORTED")]


def test_non_finite_losses_are_kept_as_they_are(attach, mlp):
    watch = attach(mlp)
    for value in (math.nan, math.inf, -math.inf):
        mlp(torch.randn(32, 64)).backward()
        watch.log(loss=value)
        watch.step()
    assert str(watch._recorder.losses()) == "[nan, inf, -inf]"


def test_what_is_no_number_costs_itself_alone_and_is_said_once(attach, mlp, capsys):
    watch = attach(mlp)
    odd = {"complex": torch.tensor(1j), "empty": torch.tensor([]), "none": None, "vector": np.ones(2), "huge": 10**400}
    for _ in range(2):
        mlp(torch.randn(32, 64)).backward()
        watch.log(loss=2.0, **odd, one=np.ones(1), word="3", last=5)
        watch.step()
    said = capsys.readouterr().err
    assert {name: said.count(f"watch.log({name}=…)") for name in odd} == dict.fromkeys(odd, 1)
    assert (
        "watch.log(complex=…) was given a tensor of torch.complex64 []: it is not recorded; give a real number" in said
    )
    for header, _, rows, logs, _ in watch._recorder.steps:
        assert len(rows) > 3
        assert float(header["loss"]) == 2.0
        assert {n: v for n, v in logs.items() if not n.startswith(BATCH)} == {"one": 1.0, "word": 3.0, "last": 5.0}
    assert watch.summary()["internal_errors"] == {}


def test_a_number_that_cannot_be_read_costs_itself_alone(attach, mlp):
    watch = attach(mlp)
    watch._scalars.of_optimizer["loss_scale"] = torch.tensor(1j)
    mlp(torch.randn(32, 64)).backward()
    watch.log(loss=2.0)
    watch.step()
    assert watch.summary()["internal_errors"] == {"values": 1}
    assert watch._recorder.losses() == [2.0]
    assert len(watch._recorder.steps[0][1]) > 3


def test_a_missing_loss_is_absent_and_said_once(attach, capsys):
    model = nn.Sequential(nn.Linear(64, 64))
    watch = attach(model)
    for _ in range(25):
        model(torch.randn(32, 64)).sum().backward()
        watch.step()
    assert watch._recorder.losses() == [None] * 25
    assert capsys.readouterr().err.count("loss not seen") == 1


def test_an_inf_shows_where_it_is(attach, mlp):
    watch = attach(mlp)
    x = torch.randn(200, 64)
    x[130, 7] = math.inf
    mlp(x).backward()
    watch.step()
    _, rows = watch._recorder.step(0)
    row = rows["up", "input", "rowwise"]
    assert (int(row["num_inf"]), int(row["num_sentinel_tiles"])) == (1, 1)
    assert list(row["first_nonfinite"][:2]) == [130, 7]
    captured = {m.site for m in watch._recorder.maps}
    by_id = {s.id: s for s in watch._recorder.sites}
    assert ("up", "input") in {(by_id[i].module, by_id[i].operand) for i in captured}


def test_the_dying_step_leaves_on_an_uncaught_exception_and_on_sigterm(tmp_path):
    script = textwrap.dedent(
        """
        import os, signal, sys, torch, fp8watch
        import fp8watch.session.start as module
        class Kept:
            def __init__(self, *a, **k): pass
            def register_sites(self, sites): pass
            def record_step(self, step, ids, rows, logs, batch): print("status", int(step["status"]), flush=True)
            def record_tile_maps(self, maps): pass
            def wanted_captures(self): return frozenset()
            def close(self, timeout_s=2.0): print("closed", flush=True)
        module.Recorder = Kept
        model = torch.nn.Sequential(torch.nn.Linear(32, 32))
        watch = fp8watch.attach(model)
        model(torch.randn(8, 32)).sum().backward()
        if sys.argv[1] == "raise":
            raise ValueError("mine")
        os.kill(os.getpid(), signal.SIGTERM)
        """
    )
    for how, code in (("raise", 1), ("term", -15)):
        (out,) = run_ranks(tmp_path, script, how, world=1, codes=code)
        assert out.split("\n")[:2] == ["status 2", "closed"]
        assert ("ValueError: mine" in (tmp_path / "ranks" / "0.err").read_text()) == (how == "raise")


@pytest.mark.heavy(7, "fp8watch/session", first=True)
def test_a_typing_error_at_the_prompt_does_not_end_the_recording(tmp_path):
    lines = """
    import torch, fp8watch
    model = torch.nn.Sequential(torch.nn.Linear(32, 32))
    watch = fp8watch.attach(model)
    tpyo
    model(torch.randn(8, 32)).sum().backward()
    watch.step()
    print("state", watch.summary()["num_steps"], watch._recorder._closed)
    """
    got = subprocess.run(
        [sys.executable, "-i", "-q"],
        input=textwrap.dedent(lines),
        capture_output=True,
        text=True,
        env={**os.environ, "FP8WATCH_SPOOL_DIR": str(tmp_path)},
    )
    assert "NameError" in got.stderr
    assert "state 1 False" in got.stdout


def test_a_site_that_is_first_called_later_is_registered_then(attach):
    model = nn.ModuleDict({"dense": nn.Linear(64, 64), "expert": nn.Linear(64, 64)})
    watch = attach(model)
    for used in (["dense"], ["dense", "expert"], ["dense"]):
        x = torch.randn(32, 64)
        for name in used:
            x = model[name](x)
        x.sum().backward()
        watch.step()
    assert {module for module, *_ in watch._recorder.step(1)[1]} == {"dense", "expert"}
    assert len(watch._recorder.sites) == len({s.id for s in watch._recorder.sites})
    assert all(s.order >= 0 for s in watch._recorder.sites)


def test_a_watch_that_nobody_keeps_goes_on(attach, mlp, train):
    recorder = attach(mlp, keep=False)
    gc.collect()
    train(mlp, steps=2)
    assert len(recorder.steps) == 2


@pytest.mark.parametrize("trained", ["adapter", "lm_head"])
def test_steps_end_where_every_watched_weight_is_frozen(attach, mlp, train, trained):
    mlp.adapter = nn.Linear(64, 8)  # 8 is no multiple of 16: not watched
    mlp.up.register_forward_pre_hook(lambda m, args: (args[0] + mlp.adapter(args[0]).sum(-1, keepdim=True),))
    mlp.requires_grad_(False)
    getattr(mlp, trained).requires_grad_(True)
    watch = attach(mlp)
    train(mlp, steps=3, optimizer=torch.optim.SGD(getattr(mlp, trained).parameters(), lr=0.1))
    assert steps(watch) == [(0, "OK"), (1, "OK"), (2, "OK")]
    assert {int(r["num_calls"]) for r in watch._recorder.step(2)[1].values()} == {1}


def test_optimizers_in_backward_end_the_step_at_the_next_forward(attach, mlp):
    watch = attach(mlp)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in mlp.parameters()}

    def step(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in mlp.parameters():
        p.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        mlp(torch.randn(32, 64)).backward()
    assert steps(watch) == [(0, "OK"), (1, "OK")]
    watch.detach()
    assert steps(watch) == [(0, "OK"), (1, "OK"), (2, "OK")]
    for i in range(3):
        _, rows = watch._recorder.step(i)
        assert len(rows) == 11
        assert {int(r["num_calls"]) for r in rows.values()} == {1}
    assert len(watch._recorder.losses()) == 3


class Dropped(nn.Module):
    """A layer that is dropped in some steps, behind one that runs all the same, and a table that is always read."""

    def __init__(self):
        super().__init__()
        self.first, self.layer, self.table = nn.Linear(64, 64), nn.Linear(64, 64), nn.Embedding(4, 64)
        self.drops = False

    def forward(self, x):
        h, at = self.layer(self.first(x)), self.table(torch.arange(32) % 4)
        return (at if self.drops else h + at).pow(2).mean()


def train_dropped(model, dropped, num, *, set_to_none=True, backward=True):
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for i in range(num):
        optimizer.zero_grad(set_to_none=set_to_none)
        model.drops = i in dropped
        loss = model(torch.randn(32, 64))
        if backward or i not in dropped:
            loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_a_step_in_which_the_watched_layers_were_dropped_is_one(attach):
    watch = attach(model := Dropped())
    losses = train_dropped(model, (10, 14, 15), 20)
    assert steps(watch) == [(i, "OK") for i in range(20)]
    assert watch._recorder.losses() == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize("odd", [{"backward": False}, {"set_to_none": False}, {"dropped": (4, 8, 12)}])
def test_where_it_is_not_sure_that_a_step_without_watched_gradients_is_one_it_is_none(attach, odd):
    """No gradient at all, gradients that may be those of before, and what comes again and again."""
    watch = attach(model := Dropped())
    train_dropped(model, **({"dropped": (10, 14), "num": 16} | odd))
    assert len(steps(watch)) == 16 - len(odd.get("dropped", (10, 14)))


def test_another_part_that_is_trained_beside_by_the_same_model_ends_nothing(attach):
    """A head of its own, with an optimizer of its own, behind a model that runs without its layers."""
    watch = attach(model := Dropped())
    own = torch.optim.SGD([*model.first.parameters(), *model.layer.parameters()], lr=0.1)
    other = torch.optim.SGD(model.table.parameters(), lr=0.1)
    for _ in range(12):
        for optimizer in (own, other):
            model.zero_grad()
            model.drops = optimizer is other
            model(torch.randn(32, 64)).backward()
            optimizer.step()
    assert len(steps(watch)) == 12
