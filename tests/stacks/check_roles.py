"""What real mixtures of experts of transformers and of Megatron-core keep in high precision, told by role, with attach as it is
by default: routers, heads and embeddings; and that the gate of a SwiGLU is none of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from no_cuda import on_the_cpu, one_rank
from stacks.families import made, train
from stacks.family_models import FAMILIES, LLAMA, MOE, Family, _causal, _next_token
from torch import nn

os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}

with on_the_cpu():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.transformer_config import TransformerConfig

import fp8watch
from fp8watch_agent.record import is_probe
from fp8watch_agent.roles import EMBEDDING, NORM, OUTPUT_HEAD, ROUTER, role_of

sys.path.insert(0, str(Path(__file__).parents[2] / "server"))

from fp8watch_server.detect.finding import facts_of
from fp8watch_server.detect.modes.sensitive_layer_quantized.detector import sensitive

DENSE_FIRST = _causal("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**LLAMA, **MOE, "head_dim": 24, "mlp_only_layers": [0]})
MIXTURES = {
    **{family.name: family for family in FAMILIES if family.name in ("Mixtral", "DeepSeek-V3", "gpt-oss", "Llama 4")},
    "Qwen3-MoE": Family("Qwen3-MoE", DENSE_FIRST, "", (), _next_token),
}


def told_apart(kept) -> tuple[set[str], set[str]]:
    """Modules whose operands were observed, and those that were only looked at, of the last watch."""
    sites = kept[-1].sites
    operands = {s.module for s in sites if not is_probe(s.operand, s.recipe)}
    return operands, {s.module for s in sites if is_probe(s.operand, s.recipe)} - operands


def warned_of(kept):
    recorder = kept[-1]
    return sensitive(facts_of(recorder.sites).values(), 0, 0, recorder.session.facts | recorder.facts)


def by_role(names) -> dict[str | None, set[str]]:
    found: dict[str | None, set[str]] = {}
    for name in names:
        found.setdefault(role_of(name), set()).add(name)
    return found


@pytest.mark.parametrize("name", MIXTURES)
def test_routers_heads_and_embeddings_of_transformers_stay_out_of_fp8_and_are_told_by_role(kept, name):
    family = MIXTURES[name]
    model = made(family)
    with fp8watch.attach(model) as watch:
        train(family, model, steps=2)
    assert watch.guard.errors == {}
    operands, looked_at = told_apart(kept)
    assert by_role(operands).keys() == {None}
    assert warned_of(kept) is None
    roles = by_role(looked_at)
    routers = {n for n, m in model.named_modules() if "router" in type(m).__name__.lower()}
    assert routers
    assert roles[ROUTER] == routers
    assert roles[OUTPUT_HEAD] == {"lm_head"}
    assert roles[EMBEDDING] == {n for n, m in model.named_modules() if isinstance(m, nn.Embedding)}
    assert roles[NORM]
    assert {n.rpartition(".")[2] for n in operands} >= {"q_proj" if "DeepSeek" not in name else "q_b_proj", "down_proj"}


@pytest.mark.parametrize("name", ["Qwen3-MoE", "DeepSeek-V3", "Llama 4"])
def test_the_gate_of_a_dense_or_shared_mlp_computes_in_fp8(kept, name):
    family = MIXTURES[name]
    model = made(family)
    with fp8watch.attach(model):
        train(family, model, steps=1)
    operands, _ = told_apart(kept)
    gates = {n for n, m in model.named_modules() if n.endswith("gate_proj") and isinstance(m, nn.Linear)}
    assert gates
    assert gates <= operands
    assert not any(gate in kept[-1].session.facts["left_out"] for gate in gates)


def test_the_same_routers_as_plain_linears_are_told_by_role_too(kept):
    """As models are written by hand, and as transformers had them before its experts were one parameter."""

    class Mlp(nn.Module):
        def __init__(self, width: int, wide: int) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = nn.Linear(width, wide, bias=False), nn.Linear(width, wide, bias=False)
            self.down_proj = nn.Linear(wide, width, bias=False)

        def forward(self, x):
            return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))

    class Sparse(nn.Module):
        def __init__(self, width: int, wide: int) -> None:
            super().__init__()
            self.gate = nn.Linear(width, 16, bias=False)
            self.experts = nn.ModuleList(Mlp(width, wide) for _ in range(16))
            self.shared_expert, self.shared_expert_gate = Mlp(width, wide), nn.Linear(width, 16, bias=False)

        def forward(self, x):
            flat = x.flatten(0, -2)
            share = self.gate(flat).softmax(-1)
            out = sum(expert(flat) * share[:, i : i + 1] for i, expert in enumerate(self.experts))
            return (out + self.shared_expert_gate(flat).sigmoid()[:, :1] * self.shared_expert(flat)).view_as(x)

    family = MIXTURES["Qwen3-MoE"]
    model = made(family)
    model.model.layers[1].mlp = Sparse(96, 80)
    with fp8watch.attach(model):
        train(family, model, steps=1)
    operands, looked_at = told_apart(kept)
    assert by_role(looked_at)[ROUTER] == {"model.layers.1.mlp.gate", "model.layers.1.mlp.shared_expert_gate"}
    assert {f"model.layers.1.mlp.experts.{i}.gate_proj" for i in range(16)} <= operands
    assert warned_of(kept) is None


@pytest.fixture(scope="module")
def group():
    with one_rank():
        yield


def megatron(*, tied: bool = False) -> nn.Module:
    """A GPT of ColumnParallelLinear and RowParallelLinear, with SwiGLU experts behind a TopKRouter."""
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2, hidden_size=64, ffn_hidden_size=96, num_attention_heads=4, num_moe_experts=4, moe_router_topk=2,
        moe_token_dispatcher_type="allgather", gated_linear_unit=True, activation_func=nn.functional.silu,
        bias_activation_fusion=False, add_bias_linear=False, use_cpu_initialization=True, hidden_dropout=0.0,
        attention_dropout=0.0, gradient_accumulation_fusion=False,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False)
    return GPTModel(config, spec, vocab_size=128, max_sequence_length=32, share_embeddings_and_output_weights=tied)


def megatron_steps(model: nn.Module, watch, num: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    mask = torch.triu(torch.ones(1, 1, 16, 16, dtype=torch.bool), 1)
    for step in range(num):
        ids = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(ids, torch.arange(16)[None].expand(2, -1), mask, labels=ids).float().mean().backward()
        optimizer.step()
    watch.detach()
    assert watch.guard.errors == {}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_routers_heads_and_embeddings_of_megatron_are_looked_at_by_role_and_its_linears_are_observed(
    kept, group, monkeypatch, tied
):
    monkeypatch.setattr(
        moe_utils, "te_general_gemm", None, raising=False
    )  # as it is set where its import fails elsewhere
    model = megatron(tied=tied).train()
    megatron_steps(model, fp8watch.attach(model))
    operands, looked_at = told_apart(kept)
    classes = {n: type(m).__name__ for n, m in model.named_modules()}
    head = set() if tied else {"output_layer"}
    assert operands == {n for n, c in classes.items() if c.endswith("ParallelLinear")} - {"output_layer"}
    roles = by_role(looked_at)
    assert roles[ROUTER] == {n for n, c in classes.items() if c == "TopKRouter"} != set()
    assert roles[EMBEDDING] == {"embedding.word_embeddings", "embedding.position_embeddings"}
    assert roles.get(OUTPUT_HEAD, set()) == head
    assert warned_of(kept) is None
    given = {s.module for s in kept[-1].sites if is_probe(s.operand, s.recipe) and s.operand == "input"}
    assert given == roles[ROUTER] | head, "what multiplies is looked at on both sides, lookups behind"


def test_a_lookup_of_megatron_is_no_gemm_that_is_missed(kept, group):
    with fp8watch.attach(megatron()):
        pass
    facts = kept[-1].session.facts
    assert "word_embeddings" not in facts["not_taken"]
    assert "output_layer" in facts["not_taken"]
    with fp8watch.attach(megatron(tied=True)):
        pass
    assert "word_embeddings" in kept[-1].session.facts["not_taken"], "multiplied with, as the head"
