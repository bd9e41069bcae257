"""What enters the model is recorded as a hash and a few shares, where it can be seen, and nothing changes by it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp8watch.kernels import cpu_library
from fp8watch.observer import batch_arithmetic, batch_facts
from fp8watch_agent.batch_names import BATCH, CONCENTRATION, COPIES, HASH, MASK, SCORED, SHIFTS, TARGETS

NEXT, SECOND = SHIFTS[1], SHIFTS[2]


@pytest.fixture(autouse=True, params=["library", "numpy"])
def read_by(request, monkeypatch):
    """What is true of a batch is true whether the C library is there or not."""
    assert cpu_library.load() is not None
    if request.param == "numpy":
        monkeypatch.setattr(cpu_library, "library", None)


class Lm(nn.Module):
    """tokens [B, T] -> logits; given targets, the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.head = nn.Embedding(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, tokens, targets=None, attention_mask=None):
        logits = self.head(F.relu(self.up(self.embed(tokens))))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def rows(seed, tokens=33):
    return torch.randint(0, 64, (4, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def lm():
    torch.manual_seed(0)
    return Lm()


def steps(lm, *losses):
    """One step for each loss, a callable, or a list of them for micro-batches."""
    optimizer = torch.optim.SGD(lm.parameters(), lr=0.01)
    for loss in losses:
        for micro in loss if isinstance(loss, list) else [loss]:
            micro().backward()
        optimizer.step()
        optimizer.zero_grad()


def outside(lm, seed, by=1, **kwargs):
    def loss():
        x = rows(seed, 32 + by)
        return nn.CrossEntropyLoss()(lm(x[:, :32], **kwargs).flatten(0, 1), x[:, by:].flatten())

    return loss


def inside(lm, seed, by=1):
    def loss():
        x = rows(seed, 32 + by)
        return lm(x[:, :32], targets=x[:, by:])

    return loss


def logged(watch):
    return [{k: v for k, v in logs.items() if k.startswith(BATCH)} for _, _, _, logs, _ in watch._recorder.steps]


@pytest.mark.parametrize("where", [outside, inside])
def test_labels_are_held_against_tokens_wherever_the_loss_is_computed(attach, lm, where):
    watch = attach(lm)
    steps(lm, where(lm, 1), where(lm, 2, by=2))
    right, shifted = logged(watch)
    assert right[NEXT] == right[SCORED] == 1.0
    assert right[SECOND] < 0.1
    assert shifted[SECOND] == 1.0
    assert shifted[NEXT] < 0.1
    assert 1 / 64 < right[CONCENTRATION] < 0.05


@pytest.mark.parametrize("where", [outside, inside])
def test_targets_of_a_model_that_trains_beside_are_held_against_none_of_these_tokens(attach, lm, where):
    """As a copy that is trained some steps in between, and a second model that is watched as well."""
    other = copy.deepcopy(lm)
    watches = attach(lm), attach(other)
    for seed in (1, 2, 3):
        steps(lm, where(lm, seed))
        steps(other, where(other, seed + 10))
    for watch in watches:
        assert [facts[NEXT] for facts in logged(watch)] == [1.0] * 3
        assert [facts[SCORED] for facts in logged(watch)] == [1.0] * 3


def test_a_model_whose_loss_is_not_seen_has_no_targets_of_another(attach, lm):
    other = copy.deepcopy(lm)
    watch = attach(lm)
    for seed in (1, 2):
        steps(other, inside(other, seed))
        steps(lm, lambda: lm(rows(9)[:, :32]).square().mean())
    assert all(CONCENTRATION in facts for facts in logged(watch))
    assert not any({NEXT, SCORED, TARGETS} & facts.keys() for facts in logged(watch))


def test_the_same_inputs_have_the_same_hash_in_any_order_of_micro_batches(attach, lm):
    watch = attach(lm)
    steps(lm, *([outside(lm, a), outside(lm, b)] for a, b in ((1, 2), (2, 1), (1, 3))))
    first, turned, other = (f[HASH] for f in logged(watch))
    assert first == turned != other
    assert 0 < first == int(first) < 2**52


def test_one_token_more_or_in_another_place_is_another_hash(attach, lm):
    watch = attach(lm)
    x = rows(1, 32)
    y, z = x.clone(), x.clone()
    y[3, 31] ^= 1
    z[0, 0], z[0, 1] = x[0, 1], x[0, 0]
    steps(lm, *(lambda x=x: lm(x).sum() for x in (x, y, z, x)))
    hashes = [f[HASH] for f in logged(watch)]
    assert len(set(hashes)) == 3
    assert hashes[0] == hashes[3]
    assert all(NEXT not in f for f in logged(watch)), "no labels were seen: absent, not 0"


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_a_device_computes_what_the_host_computes(monkeypatch, dtype):
    x = rows(1).to(dtype)
    mask = x.bool()

    def facts():
        pair = batch_arithmetic.shares_of_shifts(x[:, :-1], x[:, 1:], 3)
        others = [
            batch_arithmetic.hash_integers(x.flatten()),
            batch_arithmetic.concentration(x),
            batch_arithmetic.scored(x, -100),
            batch_arithmetic.scored(x, 3),
            *(batch_arithmetic.mean(mask.to(t)) for t in (torch.bool, dtype, torch.float16, torch.bfloat16)),
            *batch_arithmetic.shares_of_shifts(x[:, :-1], x[:, 1:] * 0 + 3, 3).values(),
            batch_arithmetic.concentration(x, 3),
            batch_arithmetic.concentration(x * 0 + 3, 3),
        ]
        return [*map(float, others), *map(float, pair.values())]

    host = facts()
    monkeypatch.setattr(batch_arithmetic, "_on_host", lambda x: False)
    assert facts() == pytest.approx(host, rel=1e-12, nan_ok=True)
    assert host[2] == 1
    assert 0 < host[3] < 1


class Classes(nn.Module):
    """[B, 64] -> the loss over 8 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x, targets):
        return nn.functional.cross_entropy(self.head(self.up(x)), targets, ignore_index=-100)


def test_class_targets_are_as_varied_as_those_that_are_scored(attach):
    torch.manual_seed(0)
    model = Classes()
    watch, ends = attach(model), torch.arange(32) % 8
    given = [ends, ends.clamp(max=1), torch.zeros_like(ends), torch.where(ends == 3, 3, -100), ends[:8]]
    steps(model, *((lambda t=t: model(torch.randn(len(t), 64), t)) for t in given))
    assert [f.get(TARGETS) for f in logged(watch)] == pytest.approx([1 / 8, (1 + 49) / 64, 1.0, 1.0, None])


def test_an_evaluation_before_the_optimizer_steps_is_no_batch(attach):
    torch.manual_seed(0)
    model = Classes()
    watch, x = attach(model), torch.randn(32, 64)

    def evaluated():
        loss = model(x, torch.arange(32) % 8)
        with torch.no_grad():
            model(x, torch.zeros(32, dtype=torch.long))
        return loss

    steps(model, evaluated)
    assert logged(watch)[0][TARGETS] == 1 / 8


def test_labels_are_those_of_the_loss_that_goes_with_the_tokens(attach, lm):
    """A loss of a part of the model comes first."""
    watch = attach(lm)
    by_class = lm.up.register_forward_hook(
        lambda *a: F.cross_entropy(a[-1][:, 0], torch.zeros(4, dtype=torch.long)) and None
    )
    steps(lm, inside(lm, 1))
    by_class.remove()
    assert logged(watch)[0][NEXT] == 1.0


def test_targets_beside_tokens_are_none_of_classes(attach, lm):
    watch = attach(lm)
    steps(lm, outside(lm, 1), inside(lm, 2))
    assert not any(TARGETS in f for f in logged(watch))


def test_hashes_of_two_devices_add_up_as_those_of_one():
    a, b = (batch_arithmetic.hash_integers(rows(seed).flatten()) for seed in (1, 2))
    one = batch_facts._sum(a, b) & batch_facts._HASH_BITS
    for mixed in ((torch.tensor(a), b), (a, torch.tensor(b)), (torch.tensor(a), torch.tensor(b))):
        assert int(batch_facts._sum(*mixed)) & batch_facts._HASH_BITS == one


def test_the_mask_and_what_is_scored_are_shares(attach, lm):
    watch = attach(lm)
    mask = torch.ones(4, 32, dtype=torch.long)
    mask[:, 24:] = 0

    def padded():
        x = rows(1)
        labels = x[:, 1:].masked_fill(mask == 0, -100)
        return F.cross_entropy(lm(x[:, :32], attention_mask=mask).flatten(0, 1), labels.flatten())

    steps(lm, padded)
    [facts] = logged(watch)
    assert facts[MASK] == facts[SCORED] == 0.75
    assert facts[NEXT] == 1.0, "of those that are scored"


def test_evaluation_pauses_and_others_leave_nothing(attach, lm):
    watch = attach(lm)
    other = nn.Linear(8, 8)

    def evaluated():
        F.cross_entropy(other(torch.randn(4, 8)), torch.zeros(4, dtype=torch.long))
        with torch.no_grad():  # the last before training: its targets would be held against training's tokens
            F.cross_entropy(lm(rows(9)[:, :32]).flatten(0, 1), rows(9)[:, 1:].flatten())
        return outside(lm, 1)()

    steps(lm, outside(lm, 1), evaluated)
    plain, after = logged(watch)
    assert plain == after
    watch.pause()
    steps(lm, outside(lm, 2))
    watch.resume()
    steps(lm, outside(lm, 1))
    assert logged(watch)[-1] == plain


def test_floats_are_hashed_where_there_are_no_integers(attach, mlp):
    watch = attach(mlp)
    x = torch.randn(32, 64)
    steps(mlp, lambda: mlp(x), lambda: mlp(x), lambda: mlp(x * 1.001))
    one, again, other = logged(watch)
    assert one == again
    assert set(one) == {HASH, COPIES}
    assert one[HASH] != other[HASH]


def test_cross_entropy_is_torchs_own_again_behind_detach(attach, lm):
    plain = F.cross_entropy
    watch = attach(lm)
    assert F.cross_entropy is not plain
    logits, targets = torch.randn(8, 64), torch.randint(0, 64, (8,))
    assert torch.equal(
        F.cross_entropy(logits, targets, label_smoothing=0.1), plain(logits, targets, label_smoothing=0.1)
    )
    with pytest.raises(ValueError, match="batch_size"):
        F.cross_entropy(logits, targets[:4])
    watch.detach()
    assert F.cross_entropy is plain


@pytest.mark.parametrize("kind", ["tokens", "floats"])
def test_rows_that_are_copies_of_another_are_counted(attach, lm, mlp, kind):
    model = lm if kind == "tokens" else mlp
    watch = attach(model)

    def loss(again):
        x = rows(1, 32) if kind == "tokens" else torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
        x = x[torch.tensor([0, 1, 0, 0])] if again else x
        return lambda: lm(x, targets=x) if kind == "tokens" else mlp(x)

    steps(model, loss(False), loss(True))
    assert [logs[COPIES] for logs in logged(watch)] == [0.0, 0.5]


def test_rows_with_the_same_mask_and_other_tokens_are_no_copies(attach, lm):
    watch = attach(lm)
    steps(lm, outside(lm, 1, attention_mask=torch.ones(4, 32, dtype=torch.long)))
    assert logged(watch)[0][COPIES] == 0
