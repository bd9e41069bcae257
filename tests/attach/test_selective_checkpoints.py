"""Selective activation checkpointing keeps operators of the model by their number: none of ours is among them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.own_models import Conv1D
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fp8watch.observer.unseen import num_dispatch_modes, unseen

WIDTH, TOKENS = 32, 48
aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default}


def products(_ctx, op, *_args, **_kwargs):
    return CheckpointPolicy.MUST_SAVE if op in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def everything(_ctx, _op, *_args, **_kwargs):
    return CheckpointPolicy.MUST_SAVE


def every_other():
    """torchtitan's: each second product is computed again."""
    seen = {False: 0, True: 0}

    def policy(ctx, op, *_args, **_kwargs):
        if op in PRODUCTS:
            seen[ctx.is_recompute] += 1
        saved = op in PRODUCTS and seen[ctx.is_recompute] % 2
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


CONTEXTS = {
    "products": partial(create_selective_checkpoint_contexts, products),
    "everything": partial(create_selective_checkpoint_contexts, everything),
    "every other": every_other,
}


class Block(nn.Module):
    """Attention and an MLP, of Linears or with a weight of its own; square, so that an operator's output fits another's place."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.up = Conv1D(WIDTH, WIDTH) if own else nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = (make(self.norm(x)).view(2, -1, 2, WIDTH // 2).transpose(1, 2) for make in self.qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        return x + self.down(F.silu(self.up(x + y)))


class Model(nn.Module):
    def __init__(self, context: str | None, own: bool) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block(own) for _ in range(2)), nn.Linear(WIDTH, WIDTH)
        self.context = None if context is None else CONTEXTS[context]

    def forward(self, x, y):
        for block in self.blocks:
            if self.context is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=False, context_fn=self.context)
        return F.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


def trained(attach, context: str | None, recipe: str | None, *, own: bool = False):
    torch.manual_seed(0)
    model = Model(context, own)
    watch = attach(model, **({} if recipe is None else {"recipe": recipe})) if attach is not None else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(6):
        loss = model(torch.randn(2, TOKENS // 2, WIDTH), torch.randint(0, WIDTH, (2, TOKENS // 2)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, list(model.parameters()), watch


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("own", [False, True], ids=["Linears", "own weights"])
@pytest.mark.parametrize("recipe", [None, "delayed", "observe"])
def test_what_is_recomputed_is_what_was_computed(attach, recipe, own, context) -> None:
    losses, weights, watch = trained(attach, context, recipe, own=own)
    as_ever, alike, _ = trained(attach, None, recipe, own=own)
    assert losses == as_ever
    assert all(map(torch.equal, weights, alike))
    assert watch.summary()["internal_errors"] == {}
    assert watch.summary()["num_steps"] == 6
    if recipe == "observe":
        unwatched, _, _ = trained(None, context, None, own=own)
        assert losses == unwatched


def test_what_observing_computes_is_seen_by_no_mode() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.randn(4, 4)
    with Mode():
        assert num_dispatch_modes() == 1
        y = unseen(torch.mm)(x, x)
        assert seen == []
        assert num_dispatch_modes() == 1
        torch.mm(x, x)
    assert seen == [aten.mm.default]
    assert torch.equal(y, x @ x)
