"""Logits of attention are seen wherever they are made, and looking changes nothing."""

from __future__ import annotations

import contextlib
import math
import sys
import types
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention as imported_attention
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fp8watch.layers import attention_calls
from fp8watch.observer import attention_logits
from fp8watch.observer.attention_logits import MAX_LOGITS, Rule, look_at_logits, look_at_memory

SEAMS = (functional.scaled_dot_product_attention, functional.softmax, torch.softmax)

PROBES = ["norms", "attention", "high_precision", "attention_logits"]


def in_memory(q, k, v):
    g = q.shape[1] // k.shape[1]
    logits = q @ k.repeat_interleave(g, 1).mT / math.sqrt(q.shape[-1])
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    return functional.softmax(logits.masked_fill(mask, -math.inf), dim=-1) @ v.repeat_interleave(g, 1)


def fused(q, k, v):
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def fused_by_its_own_name(q, k, v):
    return imported_attention(q, k, v, is_causal=True, enable_gqa=True)


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    """A stand-in with the signature of flash-attn: [B, L, H, D], and nothing in it to be seen."""
    g = q.shape[2] // k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k.repeat_interleave(g, 2), v.repeat_interleave(g, 2)))
    return torch._C._nn.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale).transpose(1, 2)


def flash(q, k, v):
    return flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), causal=True).transpose(1, 2)


def unknown(q, k, v):
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    logits = (q @ k.mT / math.sqrt(q.shape[-1])).exp().tril()
    return logits / logits.sum(-1, keepdim=True) @ v


class Attention(nn.Module):
    """Four heads of queries, two of keys."""

    def __init__(self, kernel):
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.kernel = kernel

    def forward(self, x):
        q = self.q(x).unflatten(-1, (4, 8)).transpose(1, 2)
        k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.kv(x).chunk(2, -1))
        self.truth = float((q @ k.repeat_interleave(2, 1).mT).detach().tril(0).masked_fill(~ones(x), -math.inf).amax())
        return self.out(self.kernel(q, k, v).transpose(1, 2).flatten(2))


def ones(x):
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()


class Net(nn.Module):
    def __init__(self, kernel, around=None):
        super().__init__()
        self.norm, self.attn, self.up, self.around = nn.LayerNorm(32), Attention(kernel), nn.Linear(32, 32), around

    def forward(self, x):
        x = self.norm(x)
        y = self.attn(x) if self.around is None else self.around(self.attn, x)
        return self.up(x + y).square().mean()


class Encoder(nn.Module):
    """torch's own encoder: nn.MultiheadAttention."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(x).square().mean()


def data(step=0):
    return torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(step))


def train(make, attach=None, num_steps=3, **options):
    """Parameters after a few steps, losses, and the watch."""
    torch.manual_seed(0)
    model = make()
    watch = attach(model, **{"probes": PROBES, **options}) if attach else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = model(data(step).requires_grad_())
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses, [p.detach() for p in model.parameters()], watch


def logits_of(watch, step=0):
    return {k.partition("/")[2]: v for k, v in watch._recorder.steps[step][3].items() if "max_attention_logit/" in k}


@pytest.mark.parametrize("kernel", [in_memory, fused, fused_by_its_own_name, flash])
def test_the_largest_logit_is_seen_by_default_whatever_computes_attention(attach, kernel):
    model = Net(kernel)
    watch = attach(model)
    model(data()).backward()
    watch.step()
    assert logits_of(watch) == {"attn": pytest.approx(model.attn.truth / math.sqrt(8), rel=1e-5)}
    assert watch.summary()["attention_logits"] == "seen"
    assert not watch.guard.errors
    assert (functional.scaled_dot_product_attention, functional.softmax, torch.softmax) == SEAMS


def test_attention_of_torch_and_its_largest_logit(attach):
    model = Encoder()
    watch = attach(model, probes=PROBES)
    model(data()).backward()
    watch.step()
    (seen,) = logits_of(watch).values()
    weight, bias = model.layer.self_attn.in_proj_weight, model.layer.self_attn.in_proj_bias
    q, k, _ = (
        t.unflatten(-1, (4, 8)).transpose(1, 2)
        for t in functional.linear(data(), weight.detach(), bias.detach()).chunk(3, -1)
    )
    assert seen == pytest.approx(float((q @ k.mT).amax()) / math.sqrt(8), rel=1e-5)


def test_a_function_of_transformers_registry_is_looked_at(attach, monkeypatch):
    """As transformers looks it up: a method of one object, asked in each forward."""

    def opaque(module, query, key, value, attention_mask, scaling=None, **_):
        k, v = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
        out = torch._C._nn.scaled_dot_product_attention(query, k, v, is_causal=module.is_causal, scale=scaling)
        return out.transpose(1, 2), None

    class Registry(dict):
        def get_interface(self, name, default):
            return self.get(name, default)

    registry = Registry(opaque=opaque)
    modeling = types.SimpleNamespace(ALL_ATTENTION_FUNCTIONS=registry)
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", modeling)
    model = Net(None)
    model.attn.is_causal = True
    model.attn.kernel = lambda q, k, v: registry.get_interface("opaque", None)(model.attn, q, k, v, None, scaling=0.5)[
        0
    ].transpose(1, 2)
    watch = attach(model, probes=PROBES)
    model(data()).backward()
    watch.step()
    assert logits_of(watch) == {"attn": pytest.approx(model.attn.truth * 0.5, rel=1e-5)}
    assert not vars(registry)


def test_what_no_function_shows_is_said(attach):
    watch = train(partial(Net, unknown), attach, num_steps=20)[2]
    said = watch.summary()["attention_logits"]
    assert "not seen in attn " in said
    assert watch._recorder.facts["logits_unseen"] == said
    assert not logits_of(watch)
    assert attach(nn.Sequential(nn.Linear(32, 32))).summary()["attention_logits"].startswith("not looked at")


@pytest.mark.parametrize("make", [partial(Net, fused), partial(Net, in_memory), Encoder])
@pytest.mark.parametrize("recipe", ["observe", "blockwise"])
def test_looking_changes_no_number(attach, make, recipe):
    losses, parameters, watch = train(make, attach, recipe=recipe)
    blind = train(make, attach, recipe=recipe, probes=["*norm*"])[:2] if recipe != "observe" else train(make)[:2]
    assert logits_of(watch)
    assert losses == blind[0]
    assert all(torch.equal(a, b) for a, b in zip(parameters, blind[1], strict=True))


def policy(_ctx, op, *_, **__):
    """Keeps the results of products, in the order in which it saw them."""
    products = {torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.mul.Tensor}
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = partial(checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, policy))


@pytest.mark.parametrize(
    "around", [partial(checkpoint, use_reentrant=False), partial(checkpoint, use_reentrant=True), SELECTIVE]
)
def test_checkpointing_counts_none_of_it(attach, around):
    make = partial(Net, in_memory, around)
    losses, parameters, watch = train(make, attach, recipe="observe")
    plain = train(make)
    assert logits_of(watch)
    assert losses == plain[0]
    assert all(torch.equal(a, b) for a, b in zip(parameters, plain[1], strict=True))


def test_a_product_that_a_mode_could_see_would_be_found(monkeypatch):
    """What the test of selective checkpointing rests on: no dispatch mode is told of the products."""
    seen = []

    class Seeing(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    q = torch.randn(1, 2, 8, 4)
    with Seeing():
        look_at_logits(q, q, Rule(causal=True))
    assert not seen
    monkeypatch.setattr(attention_logits, "without_modes", contextlib.nullcontext)
    with Seeing():
        look_at_logits(q, q, Rule(causal=True))
    assert seen


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch traces its own
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_a_compiled_part_is_left_alone(attach):
    model = Net(fused)
    watch = attach(model, probes=PROBES)
    model.attn.q.compile(backend="aot_eager", fullgraph=True)
    torch._dynamo.utils.counters.clear()
    for step in range(2):
        model(data(step)).backward()
        watch.step()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert "not seen in attn " in watch.summary()["attention_logits"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_forward_that_breaks_off_leaves_torch_as_it_was(attach, error):
    def broken(q, k, v):
        raise error

    model, other = Net(broken), Net(fused)
    watch = attach(model, probes=PROBES)
    attach(other, probes=PROBES)
    with pytest.raises(error):
        model(data())
    other(data()).backward()  # of an interrupt no hook is told; the next forward puts things right
    assert (functional.scaled_dot_product_attention, functional.softmax, torch.softmax) == SEAMS
    assert not attention_calls._stack.running
    assert not watch.guard.errors


def test_only_what_attention_calls_is_looked_at(attach):
    model = Net(fused)
    watch = attach(model, probes=PROBES)
    functional.softmax(torch.full((2, 3, 4), 900.0), dim=-1)
    model.eval()
    model(data())
    model.train()
    model(data()).backward()
    watch.step()
    assert logits_of(watch)["attn"] < 100


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "added"])
def test_a_small_call_is_looked_at_as_a_whole(kv_heads, mask):
    q, k = torch.randn(3, 4, 20, 8), torch.randn(3, kv_heads, 20, 8)
    keep = torch.rand(3, 1, 20, 20) > 0.5
    logits = q @ k.repeat_interleave(4 // kv_heads, 1).mT * 0.3
    rule, truth = {
        "none": (Rule(0.3), logits),
        "causal": (Rule(0.3, causal=True), logits.masked_fill(torch.ones(20, 20).triu(1).bool(), -math.inf)),
        "bool": (Rule(0.3, keep), logits.masked_fill(~keep, -math.inf)),
        "added": (Rule(0.3, keep * -3.0), logits + keep * -3.0),
    }[mask]
    assert float(look_at_logits(q, k, rule).largest) == pytest.approx(float(truth.amax()), rel=1e-5)
    assert float(look_at_logits(q, k, Rule(0.3, softcap=2.0)).largest) == pytest.approx(
        float(2 * (logits.amax() / 2).tanh())
    )
    assert float(look_at_memory(truth).largest) == float(truth.amax())


def test_each_head_and_row_has_its_turn(monkeypatch):
    monkeypatch.setattr(attention_logits, "MAX_LOGITS", 64 * 256 * 2)  # two heads
    q, k = torch.zeros(2, 8, 256, 4), torch.ones(2, 8, 256, 4)
    q[1, 6, 77] = 9.0  # no two of the three at the same place of their turns
    found = [float(look_at_logits(q, k, Rule(1.0), turn).largest) for turn in range(32)]
    assert max(found) == 36.0
    assert found.count(36.0) == 1
    stored = [float(look_at_memory((q @ k.mT), turn).largest) for turn in range(32)]
    assert max(stored) == 36.0


def test_half_precision_does_not_overflow_where_training_does_not():
    q = torch.full((1, 1, 4, 64), 60.0, dtype=torch.float16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert float(look_at_logits(q, q, Rule()).largest) == 60.0 * 60.0 * 8
    assert MAX_LOGITS * 4 <= 4 << 20


@pytest.mark.parametrize("shapes", [((3, 4), (3, 5)), ((2, 0, 3, 4), (2, 0, 3, 4)), ((1, 3, 2, 4), (1, 2, 2, 4))])
def test_what_is_no_attention_is_refused(shapes):
    with pytest.raises(ValueError, match=r"must be"):
        look_at_logits(*(torch.zeros(s) for s in shapes), Rule())
