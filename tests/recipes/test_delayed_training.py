"""Delayed scaling in training: when a scale rolls, what freezes it, and that clipping is seen."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from recipes.oracles import Delayed
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8watch import recipe as recipes
from fp8watch.quantize import quantize_per_tensor
from fp8watch.quantize.site_quantizer import DelayedQuantizer


def states(watch):
    """(module, operand) -> DelayedScale, passes that are over rolled in."""
    watch._plan.close_passes()
    pairs = zip(watch._table, watch._plan.sites.quantizers, strict=False)  # probes have none
    return {(s.fqn, s.operand): q.state for s, q in pairs if isinstance(q, DelayedQuantizer)}


def rolls(watch):
    """How many passes each operand's history remembers, without the one that runs."""
    return {key: int((state.amax_history[1:] != 0).sum()) for key, state in states(watch).items()}


def by_operand(watch):
    return {operand: n for (_, operand), n in rolls(watch).items()}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64))


def test_scales_follow_the_oracle_over_micro_batches(attach, model):
    watch = attach(model, recipe=recipes.delayed(amax_history_len=3, margin=1))
    judges = {o: Delayed(f, 3, "max", 1) for o, f in (("input", "E4M3"), ("weight", "E4M3"), ("grad_output", "E5M2"))}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    g = torch.Generator().manual_seed(1)
    for step in range(7):
        for _ in range(2):  # two micro-batches an optimizer step: a pass each
            x = torch.randn(32, 64, generator=g) * 2.0 ** (step % 3)
            grad = torch.randn(32, 64, generator=g) * 10.0**-step
            judges["input"].call(x.numpy())
            judges["weight"].call(model[0].weight.detach().numpy())
            judges["grad_output"].call(grad.numpy())
            model(x).backward(grad)
            for judge in judges.values():
                judge.end_of_pass()
        optimizer.step()
        optimizer.zero_grad()
        for (_, operand), state in states(watch).items():
            assert float(state.scale) == float(judges[operand].scale), (step, operand)
    assert watch._recorder.step(6)[1]["0", "input", "rowwise"]["num_calls"] == 2


def test_the_first_pass_has_scale_1_and_the_next_the_amax_before(attach, model):
    watch = attach(model, recipe="delayed")
    x = torch.randn(32, 64)
    for factor in (1.0, 100.0):
        model(x * factor).sum().backward()
        watch.step()
    first, second = (watch._recorder.step(i)[1]["0", "input", "rowwise"] for i in (0, 1))
    assert float(first["scale_inv_max"]) == 1.0
    amax = np.float32(x.abs().max())
    assert float(second["scale_inv_max"]) == np.float32(1) / (np.float32(448) / amax)
    assert float(second["scale_ratio_max"]) == pytest.approx(100, rel=1e-5)
    assert int(second["num_saturated"]) > 1000
    assert int(second["num_off_scale_tiles"]) == 0


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_recomputation_rolls_nothing_and_reads_the_scale_of_its_forward(attach, reentrant, whole):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            return self.down(torch.relu(self.up(x)))

    class Model(nn.Module):
        def __init__(self, checkpointed):
            super().__init__()
            self.block, self.checkpointed = Block(), checkpointed

        def forward(self, x):
            if self.checkpointed:
                return checkpoint(self.block, x, use_reentrant=reentrant)
            return self.block(x)

    torch.manual_seed(0)
    plain = Model(False)
    other = copy.deepcopy(plain)
    other.checkpointed = not whole
    watches = [attach(m, recipe=recipes.delayed(amax_history_len=8)) for m in (plain, other)]
    g = torch.Generator().manual_seed(1)
    for _ in range(3):
        x = torch.randn(32, 64, generator=g)
        for m in (plain, other):
            leaf = x.clone().requires_grad_()
            y = checkpoint(m, leaf, use_reentrant=reentrant) if m is other and whole else m(leaf)
            y.pow(2).mean().backward()
    for (key, ours), theirs in zip(states(watches[1]).items(), states(watches[0]).values(), strict=True):
        assert torch.equal(ours.amax_history, theirs.amax_history), key
        assert torch.equal(ours.scale, theirs.scale), key
    for a, b in zip(plain.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert set(rolls(watches[1]).values()) == {3}


def test_passes_without_gradients_and_evaluation_roll_nothing(attach, model):
    watch = attach(model, recipe=recipes.delayed(amax_history_len=8))
    x = torch.randn(32, 64)
    model(x).sum().backward()
    with torch.no_grad():
        model(x)
        model(x)
    model.eval()
    model(x)
    model(x * 1000).sum().backward()
    model.train()
    assert by_operand(watch) == {"input": 1, "weight": 1, "grad_output": 1}
    model(x).sum().backward()
    assert by_operand(watch) == {"input": 2, "weight": 2, "grad_output": 2}
    assert float(states(watch)["0", "input"].amax_history.max()) == float(x.abs().max())


def test_evaluation_reads_the_scale_that_training_left(attach, model):
    watch = attach(model, recipe="delayed")
    x = torch.randn(32, 64)
    model(x).sum().backward()
    model.eval()
    with torch.no_grad():
        y = model(x)
    left = {o: states(watch)["0", o].scale for o in ("input", "weight")}
    weight = model[0].weight.detach()
    assert float(left["input"]) == float(448 / x.abs().max())
    xq, wq = (quantize_per_tensor(t, scale=left[o]).dequantize() for o, t in (("input", x), ("weight", weight)))
    assert torch.equal(y, xq @ wq.t() + model[0].bias.detach())


def test_two_forwards_before_a_backward_are_two_passes(attach, model):
    watch = attach(model, recipe=recipes.delayed(amax_history_len=8))
    a, b = model(torch.randn(32, 64)), model(torch.randn(32, 64))
    (a.sum() + b.sum()).backward()
    assert by_operand(watch) == {"input": 2, "weight": 2, "grad_output": 1}


def test_a_module_called_twice_in_one_forward_is_one_pass(attach):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(64, 64)

        def forward(self, x):
            return self.mix(torch.relu(self.mix(x)))

    model = Twice()
    watch = attach(model, recipe=recipes.delayed(amax_history_len=8))
    for _ in range(2):
        model(torch.randn(32, 64)).sum().backward()
    assert by_operand(watch) == {"input": 2, "weight": 2, "grad_output": 2}


def test_parts_called_without_the_root_roll_where_a_forward_follows_a_backward(attach):
    model = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 64)})
    watch = attach(model, recipe=recipes.delayed(amax_history_len=8))
    for _ in range(3):
        model["b"](model["a"](torch.randn(32, 64))).sum().backward()
    assert set(rolls(watch).values()) == {3}


def test_an_outlier_channel_clips_is_seen_and_recovers(attach):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    watch = attach(model, recipe=recipes.delayed(amax_history_len=4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    g = torch.Generator().manual_seed(1)
    for step in range(20):
        x = torch.randn(32, 64, generator=g)
        if step == 10:
            x[:, 5] *= 30
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    rows = [watch._recorder.step(i)[1]["0", "input", "rowwise"] for i in range(20)]
    saturated = [int(r["num_saturated"]) for r in rows]
    depth = [float(r["scale_ratio_max"]) for r in rows]
    assert saturated[10] >= 20
    assert depth[10] > 10
    assert max(saturated[11:15]) == 0  # the next scale knows the outlier, and while it is remembered nothing clips
    assert depth[11] < 0.2
    assert depth[15] > 0.5  # four passes later it is forgotten
    others = [watch._recorder.step(10)[1][k] for k in watch._recorder.step(10)[1] if k[1] == "weight"]
    assert all(int(r["num_saturated"]) == 0 for r in others)


def test_a_nan_in_one_micro_batch_freezes_the_scale_while_it_is_remembered(attach, model):
    watch = attach(model, recipe=recipes.delayed(amax_history_len=3))
    g = torch.Generator().manual_seed(1)
    scales = []
    for i in range(8):
        x = torch.randn(32, 64, generator=g) * 2.0**i
        if i == 3:
            x[7, 9] = float("nan")
        model(x).nansum().backward()
        scales.append(float(states(watch)["0", "input"].scale))
    assert scales[0] > scales[1] > scales[2]
    assert scales[3] == scales[4] == scales[5] == scales[2]  # three passes remember it
    assert scales[6] < scales[2]
    watch.step()
    row = watch._recorder.step(0)[1]["0", "input", "rowwise"]
    assert int(row["num_nan"]) == 1
    assert float(row["scale_ratio_max"]) > 4  # amax outgrew the frozen scale


def test_a_later_attach_goes_on_with_the_history(attach, model):
    recipe = recipes.delayed(amax_history_len=8)
    watch = attach(model, recipe=recipe)
    x = torch.randn(32, 64)
    model(x).sum().backward()
    watch.detach()
    assert type(model[0]) is nn.Linear
    watch = attach(model, recipe=recipe)
    assert by_operand(watch) == {"input": 1, "weight": 1, "grad_output": 1}
    model(x).sum().backward()
    assert by_operand(watch) == {"input": 2, "weight": 2, "grad_output": 2}
    watch.detach()
    other = attach(model, recipe=recipes.delayed(amax_history_len=4))  # another recipe begins anew
    assert by_operand(other) == {"input": 0, "weight": 0, "grad_output": 0}
    assert float(states(other)["0", "input"].scale) == 1.0


def test_a_resumed_job_computes_on_as_if_nothing_had_happened(attach, mlp, train):
    watch = attach(mlp, recipe="delayed")
    train(mlp, steps=3)
    weights, state = copy.deepcopy(mlp.state_dict()), watch.state_dict()
    assert set(state["amax_histories"]) == {
        f"{m}.{o}" for m in ("up", "down") for o in ("input", "weight", "grad_output")
    }
    want = train(mlp, steps=3, seed=2)
    resumed = type(mlp)()
    resumed.load_state_dict(weights)
    again = attach(resumed, recipe="delayed", start_step=state["step"])
    again.load_state_dict(state)
    assert again.state_dict()["step"] == 3
    assert train(resumed, steps=3, seed=2) == want


def test_a_state_that_does_not_fit_is_refused_and_nothing_is_loaded(attach, mlp, train):
    watch = attach(mlp, recipe=recipes.delayed(amax_history_len=8))
    train(mlp, steps=2)
    before = watch.state_dict()["amax_histories"]
    bad = copy.deepcopy(before)
    bad["up.input"]["scale"].fill_(7)
    bad["up.weight"]["amax_history"] = torch.zeros(4)
    with pytest.raises(
        ValueError, match="amax history of 'up.weight': amax_history is \\(4,\\): must have shape \\(8,\\)"
    ):
        watch.load_state_dict({"amax_histories": bad})
    with pytest.raises(ValueError, match="'gone.input': no such site"):
        watch.load_state_dict({"amax_histories": {"gone.input": {}}})
    after = watch.state_dict()["amax_histories"]
    assert all(torch.equal(after[n][k], before[n][k]) for n in before for k in before[n])
    plain = attach(type(mlp)())
    assert "amax_histories" not in plain.state_dict()
    with pytest.raises(ValueError, match="no site of this recipe has one"):
        plain.load_state_dict({"amax_histories": before})


def test_copies_and_pickles_of_the_model_take_no_hook_along(attach, mlp):
    import pickle

    attach(mlp, recipe="delayed")
    twin = copy.deepcopy(mlp)
    assert type(twin.up) is nn.Linear
    twin(torch.randn(8, 64))
    assert b"fp8watch" not in pickle.dumps(list(mlp._forward_hooks.values()))


def test_a_first_forward_in_inference_mode_spoils_nothing(attach, mlp, train):
    watch = attach(mlp, recipe="delayed")
    with torch.inference_mode():
        mlp(torch.randn(8, 64))
    train(mlp, steps=2)
    assert not watch.guard.errors
    assert set(rolls(watch).values()) == {2}


def test_reading_the_state_between_passes_changes_no_number(attach, mlp, train):
    twin = copy.deepcopy(mlp)
    want = []
    attach(twin, recipe="delayed")
    for seed in range(3):
        want += train(twin, steps=1, seed=seed)
    watch = attach(mlp, recipe="delayed")
    got = []
    for seed in range(3):
        got += train(mlp, steps=1, seed=seed)
        watch.state_dict()
        watch.state_dict()
    assert got == want
