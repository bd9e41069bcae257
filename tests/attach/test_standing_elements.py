"""Elements of an optimizer's tensors are the same ones and are held alike by one call of the C library and by torch."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch

from fp8watch.kernels import cpu_library
from fp8watch.session.by_optimizer import ByOptimizer
from fp8watch.session.gradients_left import GradientsLeft
from fp8watch.session.standing_elements import WIDTH, StandingElements
from fp8watch.session.tensor_places import TensorPlace, TensorPlaces
from fp8watch_agent.guard import Guard
from fp8watch_agent.training_names import (
    CHANGED,
    MOMENTS_CHANGED,
    MOMENTS_LOOKED,
    SECOND_LOOKED,
    SECOND_ZERO,
    WEIGHTS_CHANGED,
    WEIGHTS_LOOKED,
)
from fp8watch_agent.update_names import GRADIENTS_LEFT

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
NAMES = (MOMENTS_CHANGED, MOMENTS_LOOKED, WEIGHTS_CHANGED, WEIGHTS_LOOKED)


@pytest.fixture(params=["library", "torch"])
def either(request, monkeypatch):
    """Whether the C library is there."""
    assert cpu_library.load() is not None
    if request.param == "torch":
        monkeypatch.setattr(cpu_library, "library", None)
    return request.param


def tensors(dtype, num=7):
    torch.manual_seed(0)
    found = [torch.randn(64 + 37 * i).to(dtype) for i in range(num)]
    found[2][5], found[3][0] = torch.nan, -torch.inf
    return found


@pytest.mark.parametrize("offset", [0, 64, 1000])
@pytest.mark.parametrize("dtype", [*DTYPES, None], ids=str)
def test_elements_are_the_bits_that_torch_reads(monkeypatch, dtype, offset):
    assert cpu_library.load() is not None
    kept = tensors(dtype or torch.float32)
    if dtype is None:
        kept[1::2] = [x.bfloat16() for x in kept[1::2]]
    elements = StandingElements(kept, offset)
    assert (elements._pieces is None) == (dtype is None), (
        "numbers of several dtypes are those of the one that holds all"
    )
    read, spare = elements.read(), elements.read()
    spare.zero_()
    again = elements.read(spare=spare)
    assert (again is spare) == (dtype is not None)
    monkeypatch.setattr(cpu_library, "library", None)
    assert not elements.are(read)
    by_torch = elements.read()
    assert by_torch.dtype == read.dtype
    assert torch.equal(read, by_torch)
    assert torch.equal(again, by_torch)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_elements_stand_where_a_nan_does_and_a_zero_has_its_sign(dtype):
    assert cpu_library.load() is not None
    kept = tensors(dtype)
    kept[4][10] = 0.0
    elements = StandingElements(kept, 0)
    read = elements.read()
    assert elements.are(read), "a NaN is equal to itself"
    assert elements._pieces.first_other(read.data_ptr()) == len(kept)
    for number, at, value in ((4, 10, -0.0), (0, 0, 3.0), (6, WIDTH - 1, 3.0)):
        was = kept[number][at].clone()
        kept[number][at] = value
        assert not elements.are(read)
        assert elements._pieces.first_other(read.data_ptr()) == number
        kept[number][at] = was
        assert elements.are(read)
    kept[6][WIDTH] = 3.0  # behind what is looked at
    assert elements.are(read)


def test_each_third_of_a_fused_tensor_is_met_within_a_few_turns():
    """Queries, keys and values in one: what is written to one of them is no more rare for lying behind."""
    fused = torch.arange(3 * 4096.0)
    starts = [int(StandingElements([fused], WIDTH * turn).views[0][0]) for turn in range(400)]
    assert {start // 4096 for start in starts[:4]} == {0, 1, 2}
    met = {start + i for start in starts for i in range(WIDTH)}
    assert len(met) > 0.95 * fused.numel()
    assert max(met) < fused.numel()


def logs(watch):
    begins = "optimizer/moments", "optimizer/weights", CHANGED, SECOND_ZERO, SECOND_LOOKED
    return [{k: v for k, v in logs.items() if k.startswith(begins)} for *_, logs, _ in watch._recorder.steps]


def one_element(model, optimizer):
    optimizer.state[model.down.weight]["exp_avg"].view(-1)[63] *= -1


def a_sign_of_zero(model, optimizer):
    model.up.weight.data[0, 3] = -0.0


def other_weights(model, optimizer):
    model.down.weight.data = model.down.weight.data + 1


def the_same_weights_elsewhere(model, optimizer):
    model.down.weight.data = model.down.weight.data.clone()


def another_state(model, optimizer):
    state = optimizer.state[model.down.weight]
    optimizer.state[model.down.weight] = {**state, "exp_avg": state["exp_avg"] + 1}


def the_same_state_in_another_dict(model, optimizer):
    optimizer.state[model.down.weight] = dict(optimizer.state[model.down.weight])


def a_copy_of_all_states(model, optimizer):
    optimizer.state = type(optimizer.state)(dict, {p: copy.deepcopy(s) for p, s in optimizer.state.items()})


def loaded(model, optimizer):
    state = copy.deepcopy(optimizer.state_dict())
    for kept in state["state"].values():
        kept["exp_avg"] += 1
    optimizer.load_state_dict(state)


FOUND = [
    (one_element, (1, 0), "exp_avg of down.weight"),
    (a_sign_of_zero, (0, 1), None),
    (other_weights, (0, 1), None),
    (the_same_weights_elsewhere, None, None),
    (another_state, (1, 0), "exp_avg of down.weight"),
    (the_same_state_in_another_dict, None, None),
    (a_copy_of_all_states, None, None),
    (loaded, (5, 0), "exp_avg of up.weight"),
]


@pytest.mark.parametrize(("happens", "counts", "first"), FOUND, ids=[f[0].__name__ for f in FOUND])
def test_what_happens_between_two_steps_is_said_by_either(attach, mlp, train, either, happens, counts, first):
    watch, optimizer = attach(mlp), torch.optim.AdamW(mlp.parameters(), lr=1e-3)
    optimizer.register_step_post_hook(lambda *_: mlp.up.weight.data[0, 3].zero_())
    train(mlp, 4, optimizer=optimizer)
    happens(mlp, optimizer)
    train(mlp, 4, optimizer=optimizer)
    steps = logs(watch)
    if counts is None:
        assert steps == [{}] * 8
    else:
        assert [bool(s) for s in steps] == [False] * 4 + [True] + [False] * 3
        assert [steps[4][n] for n in NAMES] == [counts[0], 10, counts[1], 5]
        assert [n for n in steps[4] if n.startswith(CHANGED)] == ([CHANGED + first] if first else [])
    assert not watch.guard.errors


def test_states_of_two_optimizers_in_bfloat16_are_said_by_either(attach, mlp, either):
    mlp.to(torch.bfloat16)
    watch = attach(mlp)
    optimizers = [
        torch.optim.AdamW(mlp.up.parameters(), lr=1e-3),
        torch.optim.AdamW([*mlp.down.parameters(), *mlp.lm_head.parameters()], lr=1e-3),
    ]
    for step in range(6):
        if step == 4:
            optimizers[0].state[mlp.up.bias]["exp_avg"][7] += 1
        mlp(torch.randn(32, 64, dtype=torch.bfloat16)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    said = [[n.removeprefix(CHANGED) for n in s if n.startswith(CHANGED)] for s in logs(watch)]
    assert [s for s in said if s] == [["exp_avg of up.bias"]]
    assert not watch.guard.errors


def test_what_is_loaded_frees_the_memory_by_either(attach, mlp, train, either):
    watch = attach(mlp)
    optimizer = torch.optim.AdamW(mlp.parameters(), lr=1e-3)
    train(mlp, 5, optimizer=optimizer)
    old = weakref.ref(optimizer.state[mlp.up.weight]["exp_avg"])
    (kept,) = watch._scalars.standing._kept.values()
    assert len(kept.elements.views) == 15
    del kept
    loaded(mlp, optimizer)
    gc.collect()
    assert old() is None
    (kept,) = watch._scalars.standing._kept.values()
    assert not kept.elements.views


def test_how_far_an_update_moves_is_that_of_the_last_two_steps_by_either(attach, mlp, train, either):
    watch, optimizer = attach(mlp), torch.optim.AdamW(mlp.parameters(), lr=1e-3, weight_decay=0.0)
    train(mlp, 5, optimizer=optimizer)
    before = mlp.up.weight.detach().clone()
    train(mlp, 1, optimizer=optimizer)
    was, now = (w.detach().view(-1)[:WIDTH] for w in (before, mlp.up.weight))
    moved = (now - was).abs().mean() / now.abs().mean()
    assert float(watch._scalars.standing.update_of("up.weight")) == pytest.approx(float(moved), rel=1e-5)


def test_second_moments_of_0_are_told_where_nothing_changed(attach, mlp, train, either):
    """They were 0 when they were looked at first: nothing differs, and they are counted all the same."""
    watch, optimizer = attach(mlp), torch.optim.AdamW(mlp.parameters(), lr=1e-3)
    optimizer.register_step_post_hook(lambda o, *_: [s["exp_avg_sq"].zero_() for s in o.state.values()])
    train(mlp, 4, optimizer=optimizer)
    assert [bool(s.get(SECOND_ZERO)) for s in logs(watch)] == [False, True, False, False]


def test_places_are_those_of_parameters_whatever_else_an_optimizer_keeps():
    p, other, small = (torch.nn.Parameter(torch.randn(n)) for n in (100, 100, 3))
    optimizer = torch.optim.AdamW([p, other, small])
    for parameter in (p, small):
        optimizer.state[parameter] = {"exp_avg": torch.zeros_like(parameter)}
    moment = optimizer.state[p]["exp_avg"]
    places = TensorPlaces.of(optimizer, [TensorPlace("p", p, "exp_avg", moment, moment)])
    assert [places.is_current(optimizer) for _ in range(2)] == [True, True]
    optimizer.state[small] = {}  # a state that is not looked at
    assert [places.is_current(optimizer) for _ in range(2)] == [True, True]
    state = optimizer.state.pop(p)
    optimizer.state[p] = state  # behind the other one
    assert places.is_current(optimizer)
    optimizer.state = {other if key is p else key: kept for key, kept in optimizer.state.items()}
    assert not places.is_current(optimizer), "the same states, one of another parameter"
    optimizer.state = {p: dict(state)}
    assert not places.is_current(optimizer)
    optimizer.state = {p: state}
    assert places.is_current(optimizer)
    moment.set_(torch.ones(100))
    assert not places.is_current(optimizer)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_left_by_their_values(either, dtype):
    """NaN is none that stays, zeros of either sign were cleared, and a zero that only changed its sign is what it was."""
    model = torch.nn.Linear(16, 16, bias=False).to(dtype)
    optimizer, left, p = torch.optim.SGD(model.parameters()), GradientsLeft(model, Guard()), model.weight

    def stay(given, then=lambda p: None, between=lambda p: None, behind=lambda p: None):
        p.grad = given.clone()
        left.after(optimizer, looks=True)
        then(p)
        left.backward_begins()
        between(p)
        left.backward_begins()
        behind(p)
        return left.before(optimizer).get(GRADIENTS_LEFT, 0)

    def to_none(p):
        p.grad = None

    gradient = torch.randn(16, 16).to(dtype)
    p.grad = gradient
    left.after(optimizer, looks=True)
    assert isinstance(left._left[id(optimizer)][0].copy, bytes if either == "library" else torch.Tensor)
    with_zero, nan = gradient.clone(), gradient.clone()
    with_zero.view(-1)[96:][3], nan.view(-1)[96:][3] = 0.0, torch.nan
    assert stay(gradient) == 1
    assert stay(with_zero, lambda p: p.grad.view(-1)[99].neg_()) == 1
    assert stay(nan) == 0
    assert stay(gradient, to_none) == 0
    assert stay(gradient, lambda p: p.grad.zero_()) == 0
    assert stay(gradient, lambda p: p.grad.mul_(-0.0)) == 0
    for zero in (0.0, -0.0):  # cleared before the backward that is stepped on
        assert (
            stay(gradient, between=lambda p, zero=zero: p.grad.mul_(zero), behind=lambda p: p.grad.add_(gradient)) == 0
        )
    assert stay(gradient, between=lambda p: p.grad.add_(gradient)) == 1
    assert stay(gradient, lambda p: p.grad.view(-1)[130].neg_()) == 0
    for p.grad in (torch.zeros_like(gradient), -torch.zeros_like(gradient)):
        left.after(optimizer, looks=True)
        assert left._left[id(optimizer)] == []


def test_what_is_known_of_an_optimizer_goes_with_it():
    known, optimizers = ByOptimizer(), [torch.optim.SGD([torch.zeros(1)]) for _ in range(2)]
    for number, optimizer in enumerate(optimizers):
        known.put(optimizer, number)
        known.pop(id(optimizer))
        known.put(optimizer, number)
    gone = id(optimizers[0])
    del optimizers[0], optimizer
    gc.collect()
    assert list(known.values()) == [1]
    assert gone not in known._alive
