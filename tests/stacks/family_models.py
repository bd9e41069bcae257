"""Tiny models of the families that people train, with real classes of transformers, diffusers and torch, and what they are fed.

Sizes are no multiples of 128, so that tiles have rests; experts have uneven numbers of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

VOCAB, WIDTH, TOKENS = 256, 96, 37
SMALL = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB}
LLAMA = {**SMALL, "num_key_value_heads": 2, "intermediate_size": 160}


@dataclass(frozen=True)
class Family:
    """One family.

    Args:
        name: in the table.
        make: the model, seeded by the caller.
        weight: name of a parameter into which an Inf is put, and where in it.
        at: element.
        loss: of a model and the number of a batch.
        counted: the model whose products are counted, where those of `make` do not read its parameters.
    """

    name: str
    make: Callable[[], nn.Module]
    weight: str
    at: tuple[int, ...]
    loss: Callable[[nn.Module, int], Tensor]
    counted: Callable[[], nn.Module] | None = None


def _tokens(step: int) -> Tensor:
    return torch.randint(0, VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(step))


def _next_token(model: nn.Module, step: int) -> Tensor:
    ids = _tokens(step)
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def _of_activations(model: nn.Module, step: int) -> Tensor:
    loss: Tensor = model(torch.randn(32, 64, generator=torch.Generator().manual_seed(step)))
    return loss


def _denoise(model: nn.Module, step: int) -> Tensor:
    g = torch.Generator().manual_seed(step)
    x, labels, times = torch.randn(2, 4, 16, 16, generator=g), torch.tensor([1, 2]), torch.tensor([10, 500])
    loss: Tensor = model(x, timestep=times, class_labels=labels).sample.pow(2).mean()
    return loss


def _causal(config: str, model: str, more: dict[str, Any], experts: str | None = None) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        made: Any = getattr(transformers, model)(getattr(transformers, config)(**more))
        if experts is not None:
            made.set_experts_implementation(experts)
        return made  # type: ignore[no-any-return]

    return make


def _torchao_llama() -> nn.Module:
    """Its Linears multiply in FP8 by torchao, with one scale a tensor; the head stays as it is, as torchtitan does it."""
    from torchao.float8 import convert_to_float8_training

    made = _causal("LlamaConfig", "LlamaForCausalLM", LLAMA)()
    convert_to_float8_training(made, module_filter_fn=lambda _, fqn: fqn != "lm_head")
    return made


def _dit() -> nn.Module:
    from diffusers import DiTTransformer2DModel

    made: nn.Module = DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=24, in_channels=4, out_channels=4, num_layers=2, sample_size=16, patch_size=2,
        num_embeds_ada_norm=10,
    )  # fmt: skip
    return made


def _own(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from support import own_models

        made: nn.Module = getattr(own_models, name)()
        return made

    return make


MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 80}
MIXTRAL = {**LLAMA, "num_local_experts": 4}
DEEPSEEK = {
    **LLAMA, "num_hidden_layers": 3, "moe_intermediate_size": 48, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 48, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32, "v_head_dim": 32, "num_key_value_heads": 4,
}  # fmt: skip
_MLP = "model.layers.1.mlp"
FAMILIES = [
    Family("Llama", _causal("LlamaConfig", "LlamaForCausalLM", LLAMA), f"{_MLP}.down_proj.weight", (5, 7), _next_token),
    Family("Llama converted by torchao", _torchao_llama, f"{_MLP}.down_proj.weight", (5, 7), _next_token,
           counted=_causal("LlamaConfig", "LlamaForCausalLM", LLAMA)),
    Family("Mixtral", _causal("MixtralConfig", "MixtralForCausalLM", MIXTRAL), f"{_MLP}.experts.down_proj", (1, 5, 7), _next_token),
    Family("Mixtral, experts one by one", _causal("MixtralConfig", "MixtralForCausalLM", MIXTRAL, "eager"),
           f"{_MLP}.experts.down_proj", (1, 5, 7), _next_token),
    Family("Mixtral, experts gathered", _causal("MixtralConfig", "MixtralForCausalLM", MIXTRAL, "batched_mm"),
           f"{_MLP}.experts.gate_up_proj", (2, 5, 7), _next_token),
    Family("Qwen3-MoE", _causal("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**LLAMA, **MOE, "head_dim": 24}),
           f"{_MLP}.experts.gate_up_proj", (5, 5, 7), _next_token),
    Family("gpt-oss", _causal("GptOssConfig", "GptOssForCausalLM", {**MIXTRAL, "head_dim": 24, "num_experts_per_tok": 2}),
           f"{_MLP}.experts.down_proj", (3, 5, 7), _next_token),
    Family("DeepSeek-V3", _causal("DeepseekV3Config", "DeepseekV3ForCausalLM", DEEPSEEK),
           "model.layers.2.mlp.experts.down_proj", (7, 5, 7), _next_token),
    Family("Llama 4", _causal("Llama4TextConfig", "Llama4ForCausalLM",
                              {**MIXTRAL, "intermediate_size_mlp": 160, "head_dim": 24, "pad_token_id": 0}),
           "model.layers.1.feed_forward.experts.down_proj", (1, 5, 7), _next_token),
    Family("GPT-2", _causal("GPT2Config", "GPT2LMHeadModel",
                            {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB, "n_positions": 64,
                             "bos_token_id": 0, "eos_token_id": 0}),
           "transformer.h.1.mlp.c_proj.weight", (5, 7), _next_token),
    Family("T5", _causal("T5Config", "T5ForConditionalGeneration",
                         {"d_model": WIDTH, "d_kv": 24, "d_ff": 160, "num_layers": 2, "num_heads": 4, "vocab_size": VOCAB,
                          "decoder_start_token_id": 0}),
           "decoder.block.1.layer.2.DenseReluDense.wo.weight", (5, 7), _next_token),
    Family("DiT", _dit, "transformer_blocks.1.ff.net.2.weight", (5, 7), _denoise),
    Family("fused QKV as a Parameter", _own("Fused"), "wqkv", (5, 7), _of_activations),
    Family("a head without a Linear", _own("EmbeddingHead"), "up.weight", (5, 7), _of_activations),
    Family("Linears 75 and 50 wide", _own("Odd"), "middle.weight", (5, 7), _of_activations),
    Family("nn.MultiheadAttention", _own("Attention"), "attention.in_proj_weight", (5, 7), _of_activations),
]  # fmt: skip
