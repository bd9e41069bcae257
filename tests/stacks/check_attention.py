"""The largest logit of attention, through the functions that transformers itself looks up, with attach as it is by default."""

from __future__ import annotations

import pytest
import torch
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import fp8watch

LAYERS = [f"model.layers.{i}.self_attn" for i in range(3)]
STEPS = 4


class Opaque:
    """Attention in which nothing is to be seen from outside, and that knows its largest logits itself."""

    def __init__(self) -> None:
        self.largest: dict[int, list[float]] = {}

    def __call__(self, module, query, key, value, attention_mask, scaling=None, **_):
        groups = query.shape[1] // key.shape[1]
        k, v = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        length = query.shape[-2]
        ahead = torch.ones(length, length, dtype=torch.bool).triu(1)
        logits = (query @ k.mT * scaling).masked_fill(ahead, -torch.inf)
        self.largest.setdefault(module.layer_idx, []).append(float(logits.detach().amax()))
        out = torch._C._nn.scaled_dot_product_attention(query, k, v, is_causal=True, scale=scaling)
        return out.transpose(1, 2).contiguous(), None


@pytest.fixture
def opaque():
    function = Opaque()
    AttentionInterface.register("opaque", function)
    AttentionMaskInterface.register("opaque", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    yield function
    for registry in (AttentionInterface, AttentionMaskInterface):
        del registry._global_mapping["opaque"]


def train(implementation: str, watched: bool = True, **how):
    """Losses and the watch of a tiny Llama with random weights, as transformers makes it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=len(LAYERS), num_attention_heads=4,
        num_key_value_heads=2, use_cache=False, attn_implementation=implementation,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    watch = fp8watch.attach(model, **how) if watched else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        ids = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if watch is not None:
        watch.detach()
        assert watch.guard.errors == {}
    return losses, watch


def logits(kept) -> list[dict[str, float]]:
    """Of each step, the largest logit of each module of which one was recorded."""
    return [
        {name.partition("/")[2]: value for name, value in logs.items() if name.startswith("max_attention_logit/")}
        for *_, logs, _ in kept[-1].steps
    ]


@pytest.mark.parametrize("recipe", [None, "observe"], ids=["no recipe", "observe"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager", "opaque"])
def test_by_default_each_attention_tells_its_largest_logit_in_the_first_steps(kept, opaque, implementation, recipe):
    _, watch = train(implementation, recipe=recipe)
    seen = logits(kept)
    assert seen[0].keys() == set(LAYERS)
    assert watch.summary()["attention_logits"] == "seen"
    train("opaque", recipe=recipe)  # the same training, by a function that knows
    truth = {name: opaque.largest[i][-STEPS:] for i, name in enumerate(LAYERS)}
    for step, found in enumerate(seen):
        assert found == {name: pytest.approx(truth[name][step], rel=1e-4) for name in found}


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "opaque"])
def test_looking_changes_no_loss_and_leaves_the_registry_as_it_was(kept, opaque, implementation):
    before = dict(vars(ALL_ATTENTION_FUNCTIONS))
    plain, _ = train(implementation, watched=False)
    watched, _ = train(implementation, recipe="observe")
    assert watched == plain
    assert logits(kept)[0]
    assert vars(ALL_ATTENTION_FUNCTIONS) == before
