"""Gradients that arrive at the optimizer otherwise than backward gave them, and all that trainings do to gradients on the way."""

from __future__ import annotations

import copy
import gc
import io
from itertools import pairwise

import pytest
import torch
from attach.stepped import OPTIMIZERS, Deep, adam, steps
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from fp8watch.session import gradient_arrival
from fp8watch.session.gradient_arrival import GradientArrival
from fp8watch_agent.guard import Guard
from fp8watch_agent.update_names import (
    GRADIENT_APART,
    GRADIENT_GIVEN,
    GRADIENT_GOT,
    GRADIENT_OF,
    GRADIENTS_FEW,
    GRADIENTS_FLUSHED,
    GRADIENTS_NORMAL,
    GRADIENTS_OTHER,
)

NEWS = (GRADIENT_APART, GRADIENTS_FLUSHED, GRADIENTS_OTHER, GRADIENTS_NORMAL, GRADIENTS_FEW)
ROUND = 9
"""Steps in which each parameter of `Deep` has its turn."""


@pytest.fixture(autouse=True)
def each_step(monkeypatch, request):
    """A look takes a larger share of a step than is allowed, in models of this size."""
    if "rest" not in request.node.name:
        monkeypatch.setattr(gradient_arrival, "COST_SHARE", 1e9)


def news(watch):
    return [{k: v for k, v in logs.items() if k.startswith(NEWS)} for *_, logs, _ in watch._recorder.steps]


def looked(watch):
    """Parameters that were seen to arrive as they were given."""
    return watch._scalars.standing.arrival._right


def clipped(model, step):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3 * (1 + step % 3))


def cut(model, step):
    torch.nn.utils.clip_grad_value_(model.parameters(), 2e-4 if step > ROUND else 1.0)


def looks_at(model, step):
    """What autograd gives goes elsewhere."""
    torch.autograd.grad(model(torch.arange(32).view(2, 16)), list(model.parameters()))


WAYS = {"as it is": None, "norm": clipped, "values": cut, "for a look": looks_at}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("micro", [1, 3])
def test_what_trainings_do_to_gradients_says_nothing(attach, way, micro):
    model = Deep(again=True)
    watch = attach(model)
    touch = WAYS[way]
    steps(model, adam(model), 3 * ROUND, micro=micro, before=None if touch is None else lambda step: touch(model, step))
    assert news(watch) == [{}] * 3 * ROUND
    assert len(looked(watch)) == ROUND or way == "norm"
    assert not watch.guard.errors


@pytest.mark.parametrize("whole", ["", "layers.1.weight"], ids=["parts", "a whole one"])
@pytest.mark.parametrize("of_weights", [True, False])
def test_a_mask_of_pruned_weights_is_no_other_gradient_and_another_mask_is(attach, of_weights, whole):
    """Pruning in the middle of training: gradients of what is pruned are 0 from then on, and so are its weights."""
    model = Deep()
    watch = attach(model)
    masks = {
        name: torch.rand(p.shape, generator=torch.Generator().manual_seed(1)) > 0.4
        for name, p in model.named_parameters()
    }
    if whole:
        masks[whole].zero_()

    @torch.no_grad()
    def prune(step):
        for name, p in model.named_parameters():
            if step > ROUND and p.dim() == 2 and whole in name:
                p.grad.mul_(masks[name] * 0.5)
                if of_weights:
                    p.mul_(masks[name])

    steps(model, adam(model), 3 * ROUND, before=prune)
    said = {name for logs in news(watch) for name in logs}
    assert any(name.startswith(GRADIENT_APART) for name in said) != of_weights
    assert not watch.guard.errors


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_optimizer_is_told_something_else(attach, name):
    model = Deep()
    watch = attach(model)
    steps(model, OPTIMIZERS[name](model), 2 * ROUND)
    assert news(watch) == [{}] * 2 * ROUND
    assert len(looked(watch)) == ROUND


def test_a_penalty_on_weights_is_part_of_what_backward_gives(attach):
    model = Deep()
    watch, optimizer = attach(model), adam(model)
    for step in range(3 * ROUND):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss = model(torch.randint(64, (4, 16)))
        if step > ROUND:
            loss = loss + 0.1 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        optimizer.step()
    assert news(watch) == [{}] * 3 * ROUND
    assert len(looked(watch)) == ROUND


def test_gradients_that_are_taken_uphill_count_from_where_they_are_cleared(attach):
    model = Deep()
    watch, optimizer = attach(model), adam(model)
    for step in range(2 * ROUND):
        for part in range(2):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            model(torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(step))).backward()
            if part == 0:
                with torch.no_grad():
                    for p in model.parameters():
                        p.add_(p.grad, alpha=1e-3)
        optimizer.step()
    assert news(watch) == [{}] * 2 * ROUND
    assert len(looked(watch)) == ROUND


def test_a_scaler_unscales_and_skips(attach):
    model = Deep()
    watch, optimizer = attach(model), adam(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    for step in range(2 * ROUND):
        optimizer.zero_grad()
        loss = model(torch.randint(64, (4, 16))) * (float("inf") if step == 4 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clipped(model, step)
        scaler.step(optimizer)
        scaler.update()
    assert not any(news(watch))
    assert not watch.guard.errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_micro_batches_in_two_bytes_are_rounded(attach, dtype):
    model = Deep().to(dtype)
    watch = attach(model)
    steps(model, adam(model, eps=1e-4), 2 * ROUND, micro=8, before=lambda step: clipped(model, step))
    assert news(watch) == [{}] * 2 * ROUND


def lost(model, kept):
    """Only the last micro-batch is left."""
    for p, was in zip(model.parameters(), kept, strict=True):
        p.grad.sub_(was)


def overwritten(model, _):
    a, b = model.layers[0].weight.grad, model.layers[3].weight.grad
    a.view(-1)[1000:2000] = b.view(-1)[1000:2000]


def flushed(model, _):
    for p in model.parameters():
        p.grad.masked_fill_(p.grad.abs() < p.grad.abs().mean(), 0.0)


def noisy(model, _):
    for p in model.parameters():
        p.grad.add_(torch.randn_like(p.grad), alpha=float(p.grad.std()))


def turned(model, _):
    """As by an update that is subtracted where it is added: no clipping and no scale makes a gradient negative."""
    model.layers[0].weight.grad.neg_()


@pytest.mark.parametrize("fault", [lost, overwritten, flushed, noisy, turned])
def test_another_gradient_than_backward_gave_is_told_with_its_parameter(attach, fault):
    model = Deep()
    watch, optimizer = attach(model), adam(model)
    begins = 2 * ROUND
    for step in range(4 * ROUND):
        optimizer.zero_grad()
        model(torch.randint(64, (4, 16))).backward()
        kept = [p.grad.clone() for p in model.parameters()]
        model(torch.randint(64, (4, 16))).backward()
        if step >= begins:
            fault(model, kept)
        clipped(model, step)
        optimizer.step()
    said = news(watch)
    assert said[:begins] == [{}] * begins
    names = {k.removeprefix(GRADIENT_APART) for s in said for k in s if k.startswith(GRADIENT_APART)}
    assert names == (
        {"layers.0.weight"} if fault in (overwritten, turned) else {n for n, _ in model.named_parameters()}
    )
    off = [v for s in said for k, v in s.items() if k.startswith(GRADIENT_APART)]
    assert min(off) > 0.05
    assert (max(s.get(GRADIENTS_FLUSHED, 0.0) for s in said) > 0.3) == (fault is flushed)
    large = {f"{GRADIENT_APART}{n}" for n, p in model.named_parameters() if p.numel() >= 1024}
    normal = [s.get(GRADIENTS_NORMAL) for s in said if large & set(s)]
    assert normal == [1.0 if fault is noisy else None] * len(normal)
    assert all(s.get(GRADIENTS_FEW) == (None if large & set(s) else 1.0) for s in said if GRADIENT_APART in str(s))
    if fault not in (overwritten, turned):
        assert GRADIENT_APART in str(said[begins])  # in the first such step
    assert not any(GRADIENTS_OTHER in s for s in said)


def test_what_was_another_one_from_the_first_look_on_is_counted_and_not_named(attach):
    model = Deep()
    watch = attach(model)
    steps(model, adam(model), 2 * ROUND, before=lambda _: noisy(model, None))
    said = [s.get(GRADIENTS_OTHER) for s in news(watch)]
    assert [n for n in said if n is not None][:3] == [3.0, 4.0, 5.0]
    assert not any(GRADIENT_APART in str(s) for s in news(watch))


def test_what_was_not_looked_at_before_is_not_said_to_be_so_from_the_start(attach):
    model = Deep()
    watch = attach(model)
    optimizer = adam(model)
    steps(model, optimizer, 6)
    steps(model, optimizer, 4, first=6, before=lambda _: noisy(model, None))
    assert (len(looked(watch)), len(watch._scalars.standing.arrival._other)) == (5, 4)
    assert not any(GRADIENTS_OTHER in s for s in news(watch))


def test_a_gradient_that_is_lost_whole_is_told(attach):
    model = Deep()
    watch = attach(model)
    steps(model, adam(model), ROUND)
    steps(model, adam(model), ROUND, first=ROUND, before=lambda _: [p.grad.zero_() for p in model.parameters()])
    assert any(v == 1 for s in news(watch)[ROUND:] for k, v in s.items() if k.startswith(GRADIENT_APART))


def test_gradients_of_several_processes_are_said_as_sketches_in_turns_that_no_clock_paces(attach, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(gradient_arrival, "perf_counter", iter(range(0, 10**6, 1000)).__next__)
    model = Deep()
    arrival, optimizer, told = GradientArrival(model, Guard()), adam(model), []
    for _ in range(12):
        arrival.backward_begins()
        model(torch.arange(32).view(2, 16)).sum().backward()
        told.append(arrival.before(optimizer))
        optimizer.step()
        optimizer.zero_grad()
        arrival.after(optimizer, looks=True)
    assert [bool(of) for of in told] == [k % 4 == 1 for k in range(12)]
    assert all(of.pop(next(n for n in of if n.startswith(GRADIENT_OF))) == 2 for of in told if of)
    assert all(n.startswith((GRADIENT_GIVEN, GRADIENT_GOT)) for of in told for n in of)
    assert arrival.unseen == ""


def with_copies(model, watch):
    """An optimizer of copies, which nothing in torch connects with the model."""
    own = list(model.parameters())
    optimizer = adam(nn.ParameterList([p.detach().clone() for p in own]))
    for _ in range(24):
        model(torch.arange(32).view(2, 16)).sum().backward()
        for p, mine in zip(own, optimizer.param_groups[0]["params"], strict=True):
            mine.grad, p.grad = p.grad, None
        optimizer.step()
        watch.step()


def with_gradients_moved(model, watch):
    """As an engine does that keeps them elsewhere."""
    steps(model, adam(model), 24, before=lambda _: [setattr(p, "grad", None) for p in model.parameters()])


@pytest.mark.parametrize(
    ("train", "said"),
    [
        (lambda model, _: steps(model, adam(model), 24), None),
        (with_copies, "no step of a torch optimizer over the model's own parameters was looked at"),
        (with_gradients_moved, "what backward fills, `.grad` of the parameters, is not what an optimizer steps with"),
    ],
    ids=["looked-at", "copies", "moved"],
)
def test_that_no_gradient_could_be_held_against_another_is_said(attach, train, said):
    model = Deep()
    watch = attach(model)
    train(model, watch)
    assert watch._cycle.num_closed >= 20
    told = watch._recorder.facts.get("gradients_unseen")
    assert told is None if said is None else (told.startswith(said) and told.endswith("(in the first 20 steps)"))


HOOKS = {
    None: "",
    powerSGD_hook.powerSGD_hook: "powerSGD_hook",
    powerSGD_hook.batched_powerSGD_hook: "batched_powerSGD_hook",
    default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook): "PowerSGD",
    default_hooks.fp16_compress_hook: "",
    default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook): "",
}
"""And what is said of them."""


@pytest.mark.parametrize(("hook", "said"), HOOKS.items())
def test_what_a_communication_hook_compresses_is_held_against_nothing_and_that_is_said(
    tmp_path, monkeypatch, hook, said
):
    """It begins to compress in the middle of a run, and then nothing adds up. What is summed in two bytes does."""
    monkeypatch.setattr(gradient_arrival, "_shared_by", lambda: 2)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(Deep())
        if hook is not None:
            model.register_comm_hook(powerSGD_hook.PowerSGDState(None) if said else None, hook)
        arrival, optimizer = GradientArrival(model, Guard()), adam(model)
        arrival.after(optimizer, looks=True)
        assert arrival.has_turn is not bool(said)
        assert arrival.unseen.startswith(f"{said} compresses them") if said else "compresses" not in arrival.unseen
    finally:
        distributed.destroy_process_group()


def test_between_two_steps_no_parameter_has_a_hook_and_numbers_stay(attach):
    ends = []
    for watched in (True, False):
        model = Deep()
        watch, optimizer = attach(model) if watched else attach(model, overhead_budget=None), adam(model)
        if not watched:
            watch._scalars.standing.arrival.stop()
            watch._scalars.standing.arrival = None
        for step in range(ROUND):
            steps(model, optimizer, 1, first=step, micro=2)
            assert not any(p._backward_hooks for p in model.parameters())
            copy.deepcopy(model)
            torch.save(model.state_dict(), io.BytesIO())
        watch.detach()
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_a_watch_that_is_let_go_in_a_backward_leaves_no_hook(attach):
    model = Deep()
    watch, optimizer = attach(model), adam(model)
    steps(model, optimizer, 3)
    model(torch.randint(64, (4, 16))).backward()
    assert any(p._backward_hooks for p in model.parameters())
    watch.detach()
    assert not any(p._backward_hooks for p in model.parameters())


def test_an_optimizer_that_is_replaced_before_it_steps_leaves_no_hook(attach):
    model = Deep()
    watch, optimizer = attach(model), adam(model)
    steps(model, optimizer, 3, after=lambda _: model.zero_grad())
    model(torch.randint(64, (4, 16))).backward()
    assert any(p._backward_hooks for p in model.parameters())
    optimizer = adam(model)
    gc.collect()
    assert not any(p._backward_hooks for p in model.parameters())
    steps(model, optimizer, 3)
    assert not watch.guard.errors


def test_a_large_model_has_several_turns_a_step(monkeypatch):
    monkeypatch.setattr(gradient_arrival, "STEPS_A_ROUND", 4)
    model = Deep()
    arrival, optimizer = GradientArrival(model, Guard()), adam(model)
    seen = []
    for _ in range(4):
        arrival.after(optimizer, looks=True)
        arrival.backward_begins()
        seen.append({n for n, p in model.named_parameters() if p._backward_hooks})
        arrival.before(optimizer)
    assert [len(s) for s in seen] == [3] * 4
    assert len(set.union(*seen)) == ROUND
    arrival.after(optimizer, looks=False)
    arrival.backward_begins()
    assert not any(p._backward_hooks for p in model.parameters())


@pytest.mark.parametrize(("step_s", "apart"), [(1.0, 1), (0.15, 2), (0.07, 3), (0.001, 4)])
def test_turns_rest_where_a_look_is_much_beside_a_step(monkeypatch, step_s, apart):
    clock = iter(range(1000))
    monkeypatch.setattr(gradient_arrival, "perf_counter", lambda: next(clock) * step_s)
    model = Deep()
    arrival, optimizer, turns = GradientArrival(model, Guard()), adam(model), []
    for step in range(36):
        arrival.after(optimizer, looks=True)
        arrival.backward_begins()
        if any(p._backward_hooks for p in model.parameters()):
            turns.append(step)
    assert turns[: ROUND + 1] == list(range(ROUND + 1)), "each has its first turn whatever it costs"
    assert [b - a for a, b in pairwise(turns[ROUND:])] == [apart] * len(turns[ROUND + 1 :])


@pytest.mark.parametrize("num", [0, 1, 2, 3, 9, 36, 105])
def test_turns_reach_each_and_neighbours_far_apart(num):
    order = [int(name) for name, _ in gradient_arrival._scattered([(str(i), torch.zeros(1)) for i in range(num)])]
    assert sorted(order) == list(range(num))
    if num >= 36:
        for first in range(num - num // 4):  # a quarter of the parameters side by side
            assert min(order.index(i) for i in range(first, first + num // 4)) <= 8


def test_a_turn_of_several_rests_longer(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(gradient_arrival, "perf_counter", lambda: next(clock) * 0.25)
    monkeypatch.setattr(gradient_arrival, "STEPS_A_ROUND", 4)
    arrival, optimizer, turns = GradientArrival(Deep(), Guard()), None, []
    optimizer = adam(arrival._model)
    for step in range(18):
        arrival.after(optimizer, looks=True)
        if arrival.has_turn:
            turns.append(step)
    assert turns == [0, 1, 2, 3, 6, 9, 12, 15]


def test_nothing_waits_for_a_device():
    model = Deep().to("meta")  # what asks one of its tensors for its value raises
    arrival, optimizer = GradientArrival(model, Guard()), adam(model)
    found = {}
    for _ in range(ROUND):
        arrival.after(optimizer, looks=True)
        for p in model.parameters():
            p.grad = None
        arrival.backward_begins()
        model(torch.zeros((4, 16), dtype=torch.int64, device="meta")).backward()
        found |= arrival.before(optimizer)
    assert len([k for k in found if k.startswith(GRADIENT_APART)]) == ROUND
    assert all(v.is_meta for v in found.values() if isinstance(v, torch.Tensor))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch traces its own
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_compiled_code_is_not_compiled_again_for_it(attach):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    watch, optimizer = attach(model), adam(model)
    compiled = torch.compile(model, backend="aot_eager")
    for step in range(8):
        if step == 3:
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"]  # is counted
            torch._dynamo.utils.counters.clear()
        optimizer.zero_grad()
        compiled(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    assert not torch._dynamo.utils.counters["stats"].get("unique_graphs")
    assert not any(news(watch))
    assert len(looked(watch)) == 4
