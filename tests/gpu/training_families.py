"""Models of transformers, peft and timm, and experts of one's own."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from training_compiled import compiled
from training_loops import adamw, autocast, loop, text
from training_models import VOCAB
from training_registry import THREE, scenario
from training_run import Run

LLAMA_MODES = (
    "defaults", "observe", "emulated", "current", "delayed", "mxfp8", "rowwise", "nvfp4", "current-auto", "scaled_mm",
    "scaled_mm-hybrid", "scaled_mm-fp32-scales", "triton", "reference", "warmup", "backward-high", "observe-all",
    "observe-delayed", "observe-reference", "defaults-all",
)  # fmt: skip


def _config(run: Run, **more: Any) -> dict[str, Any]:
    dim = run.size(256, 64)
    return {
        "vocab_size": VOCAB, "hidden_size": dim, "intermediate_size": 2 * dim, "num_hidden_layers": run.size(3, 2),
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "use_cache": False,
    } | more  # fmt: skip


def llama(run: Run, dtype: torch.dtype = torch.bfloat16) -> Any:
    """transformers' Llama from a configuration."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_config(run))).to(run.device, dtype)


def labelled(run: Run, count: int | None = None) -> list[dict[str, Tensor]]:
    """Batches for transformers, which shifts the labels itself."""
    return [{"input_ids": ids, "labels": ids.clone()} for ids, _ in text(run, count)]


def _train(run: Run, model: Any, data: list[dict[str, Tensor]] | None = None, forward: Any = None) -> None:
    data = labelled(run) if data is None else data
    call = model if forward is None else forward
    loop(run, lambda i: call(**data[i]).loss, adamw(model), [(i,) for i in range(len(data))])


@scenario(LLAMA_MODES, weight=6, needs="transformers")
def llama_bf16(run: Run) -> None:
    """Llama in bfloat16, in all modes."""
    model = llama(run)
    run.attach(model)
    model.train()
    _train(run, model)


@scenario(("defaults", "observe"), timeout_s=120, weight=5, needs="transformers", apart=True)
def llama_compiled(run: Run) -> None:
    """The same compiled."""
    model = llama(run)
    run.attach(model)
    model.train()
    _train(run, model, forward=compiled(run, model))


@scenario(needs="transformers")
def llama_recomputed(run: Run) -> None:
    """transformers' own gradient checkpointing."""
    model = llama(run)
    model.gradient_checkpointing_enable()
    model.train()
    run.attach(model)
    _train(run, model)


@scenario(steps=16, needs="transformers")
def gpt2_scaler(run: Run) -> None:
    """transformers' GPT-2 in float16 with a GradScaler whose first scale overflows."""
    from transformers import GPT2Config, GPT2LMHeadModel

    dim = run.size(256, 64)
    config = GPT2Config(vocab_size=VOCAB, n_embd=dim, n_layer=2, n_head=4, n_positions=512, use_cache=False)
    model = GPT2LMHeadModel(config).to(run.device)
    model.train()
    run.attach(model)
    optimizer, scaler = adamw(model), torch.amp.GradScaler(run.device, init_scale=2.0**24, growth_interval=4)
    data = labelled(run)
    for i in run.each():
        with torch.autocast(run.device, torch.float16):
            loss = model(**data[i]).loss
        scaler.scale(loss).backward()
        run.loss(loss)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    run.notes["scale"] = scaler.get_scale()


@scenario(needs="peft")
def lora(run: Run) -> None:
    """peft's LoRA on Llama."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        llama(run), LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0)
    )
    model.train()
    run.attach(model)
    _train(run, model)


def _experts(run: Run, family: str, **more: Any) -> None:
    import transformers

    config = getattr(transformers, f"{family}Config")(**_config(run, **more))
    if run.cuda:
        with contextlib.suppress(AttributeError, ValueError):
            config._experts_implementation = "grouped_mm"
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(run.device, torch.bfloat16)
    model.train()
    run.attach(model)
    _train(run, model)


@scenario(("defaults", "observe", "emulated", "mxfp8", "current"), weight=2, needs="transformers")
def mixtral(run: Run) -> None:
    """Experts by torch._grouped_mm."""
    _experts(run, "Mixtral", num_local_experts=4, num_experts_per_tok=2, head_dim=run.size(64, 16))


@scenario(THREE, weight=2, needs="transformers")
def qwen3_moe(run: Run) -> None:
    """Many small experts."""
    _experts(
        run, "Qwen3Moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128, head_dim=run.size(64, 16)
    )  # fmt: skip


class _Grouped(nn.Module):
    """Experts of one's own, by torch._grouped_mm with offsets."""

    def __init__(self, dim: int, experts: int) -> None:
        super().__init__()
        self.inner = nn.Linear(dim, dim, bias=False)
        self.w1 = nn.Parameter(torch.randn(experts, dim, 2 * dim) * 0.02)
        self.w2 = nn.Parameter(torch.randn(experts, 2 * dim, dim) * 0.02)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        x = self.inner(x)
        h = torch.nn.functional.silu(torch._grouped_mm(x, self.w1, offs=ends))
        return torch._grouped_mm(h, self.w2, offs=ends).float().square().mean()


@scenario(THREE, cuda=True)
def grouped_mm(run: Run) -> None:
    """torch._grouped_mm, an expert without tokens, rows behind the last offset."""
    model = _Grouped(128, 4).to(run.device, torch.bfloat16)
    run.attach(model)
    x = torch.randn(512, 128, device=run.device, dtype=torch.bfloat16)
    ends = torch.tensor([128, 128, 400, 512], device=run.device, dtype=torch.int32)
    loop(run, model, adamw(model), [(x, ends)])


@scenario(needs="timm")
def vit(run: Run) -> None:
    """timm's ViT under autocast."""
    import timm

    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=3, num_classes=16).to(run.device)
    run.attach(model)
    data = [(torch.randn(16, 3, 64, 64).to(run.device), torch.randint(0, 16, (16,)).to(run.device)) for _ in range(4)]
    forward = autocast(run, model)
    loop(run, lambda x, y: torch.nn.functional.cross_entropy(forward(x).float(), y), adamw(model), data)
