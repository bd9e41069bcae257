"""The observer changes no number and never raises."""

from __future__ import annotations

import copy
import gc
import time

import pytest
import torch

from fp8watch.layers import custom_ops
from fp8watch.sketch import host_copy, slab, tile_cache


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def test_observe_leaves_every_number_bitwise_as_it_was(attach, mlp, train):
    twin = copy.deepcopy(mlp)
    plain = train(twin, steps=5)
    watch = attach(mlp, recipe="observe")
    assert train(mlp, steps=5) == plain
    assert all(torch.equal(a, b) for a, b in zip(weights(mlp), weights(twin), strict=True))
    assert len(watch._recorder.steps) == 5
    # the first input has no gradient: its dgrad does not exist; the head is probed, and what it is given
    assert len(watch._recorder.step(0)[1]) == 9 + 2


def test_statistics_change_no_number(attach, mlp, train, monkeypatch):
    twin = copy.deepcopy(mlp)
    attach(mlp, tile_maps="all")
    watched = train(mlp, steps=5)
    monkeypatch.setenv("FP8WATCH_DISABLED", "stats")
    silent = attach(twin)
    assert train(twin, steps=5) == watched
    assert all(torch.equal(a, b) for a, b in zip(weights(mlp), weights(twin), strict=True))
    assert silent._recorder is None


def test_the_kill_switch_leaves_the_model_untouched(attach, mlp, monkeypatch):
    monkeypatch.setenv("FP8WATCH_DISABLED", "1")
    watch = attach(mlp)
    assert type(mlp.up) is torch.nn.Linear
    watch.log(loss=1.0)
    watch.step()
    watch.detach()
    assert watch.summary()["num_steps"] == 0


@pytest.mark.parametrize(
    ("place", "backend"),
    [
        ("Slab.accumulate", "reference"),
        ("Slab.into", None),
        ("HeldTiles.add", None),
        ("Slab.clear", None),
        ("HostCopies.begin", None),
    ],
)
def test_what_breaks_inside_is_counted_and_never_reaches_training(attach, mlp, train, monkeypatch, place, backend):
    twin = copy.deepcopy(mlp)
    attach(twin, backend=backend)
    want = train(twin, steps=4)

    def broken(*_args, **_kwargs):
        raise OSError("planted")

    watch = attach(mlp, backend=backend)
    cls, name = place.split(".")
    rooms = {"Slab": slab.Slab, "HostCopies": host_copy.HostCopies, "HeldTiles": tile_cache.HeldTiles}
    monkeypatch.setattr(rooms[cls], name, broken)
    assert train(mlp, steps=4) == want
    assert sum(watch.guard.errors.values()) >= 4


@pytest.mark.parametrize("method", ["record_step", "register_sites", "record_tile_maps", "close", "wanted_captures"])
def test_an_agent_that_raises_does_not_reach_training(attach, mlp, train, method):
    watch = attach(mlp, tile_maps="all")

    def broken(*_args, **_kwargs):
        raise RuntimeError("planted")

    setattr(watch._recorder, method, broken)
    train(mlp, steps=3)
    watch.detach()
    assert sum(watch.guard.errors.values()) >= 1


def test_the_users_own_exceptions_pass(attach, mlp):
    attach(mlp)
    with pytest.raises(RuntimeError, match="mat1 and mat2|shape"):
        mlp(torch.randn(3, 63))


def test_a_step_that_could_not_be_sent_is_not_merged_into_the_next(attach, mlp, train, monkeypatch):
    watch = attach(mlp)
    with monkeypatch.context() as m:
        m.setattr(host_copy.HostCopies, "begin", lambda self, *_: 1 / 0)
        train(mlp, steps=2)
    train(mlp, steps=1)
    header, rows = watch._recorder.step(0)
    assert int(header["step"]) == 2
    assert {int(r["num_calls"]) for r in rows.values()} == {1}


def test_detach_between_forward_and_backward_is_not_felt(attach, mlp):
    watch = attach(mlp, recipe="observe")
    loss = mlp(torch.randn(32, 64))
    watch.detach()
    loss.backward()
    assert mlp.up.weight.grad is not None


def test_a_model_that_is_dropped_takes_its_watch_along(attach):
    gc.collect()
    before = len(custom_ops._plans)
    recorder = attach(torch.nn.Sequential(torch.nn.Linear(32, 32)), keep=False)
    kept = torch.nn.Linear(32, 32)
    attach(torch.nn.Sequential(kept), keep=False)
    gc.collect()
    until = time.monotonic() + 10
    while not recorder.closed and time.monotonic() < until:
        time.sleep(0.01)
    assert recorder.closed == 1
    assert len(custom_ops._plans) == before + 1
    kept(torch.randn(8, 32))


def test_detach_releases_a_module_that_has_left_the_model(attach, mlp):
    watch = attach(mlp)
    up, mlp.up = mlp.up, torch.nn.Identity()
    watch.detach()
    assert type(up) is torch.nn.Linear
    up(torch.randn(8, 64))


@pytest.mark.parametrize("recipe", ["blockwise", "observe"])
def test_a_first_forward_in_inference_mode_spoils_nothing(attach, mlp, train, recipe):
    watch = attach(mlp, recipe=recipe)
    with torch.inference_mode():
        mlp(torch.randn(8, 64))
    train(mlp, steps=2)
    assert not watch.guard.errors
    assert len(watch._recorder.step(1)[1]) == 11


def test_observing_lets_per_sample_gradients_and_nested_tensors_pass(attach):
    model = torch.nn.Sequential(torch.nn.Linear(32, 32))
    twin = copy.deepcopy(model)
    attach(model, recipe="observe")

    def gradients(module):
        def loss(parameters, x):
            return torch.func.functional_call(module, parameters, (x,)).pow(2).mean()

        x = torch.arange(5 * 4 * 32.0).reshape(5, 4, 32).sin()
        return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(dict(module.named_parameters()), x)

    assert all(torch.equal(a, b) for a, b in zip(gradients(model).values(), gradients(twin).values(), strict=True))
    ragged = torch.nested.nested_tensor([torch.ones(3, 32), torch.ones(5, 32)], layout=torch.jagged)
    assert torch.equal(model(ragged).values(), twin(ragged).values())
