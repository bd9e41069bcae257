"""Megatron-core's own model, data parallelism and mixed-precision optimizer, on the CPU where it asks for CUDA."""

from __future__ import annotations

import os

import pytest
import torch
from no_cuda import on_the_cpu, one_rank

os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}

with on_the_cpu():
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.transformer_config import TransformerConfig

from fp8watch.integrations.megatron import attach_megatron
from fp8watch_agent.record import StepPresent, StepStatus


@pytest.fixture(scope="module", autouse=True)
def group():
    with one_rank():
        yield


def made(dtype=torch.bfloat16):
    torch.manual_seed(0)
    half = {"bf16": dtype is torch.bfloat16, "fp16": dtype is torch.float16}
    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=2, use_cpu_initialization=True, hidden_dropout=0.0,
        attention_dropout=0.0, gradient_accumulation_fusion=False, params_dtype=dtype, **half,
    )  # fmt: skip
    gpt = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=16).to(dtype)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), gpt)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=0.5, **half), [model])
    return model, optimizer


def train(model, optimizer, watch=None, *, steps=4, break_at=None):
    """(loss, what the optimizer's step returned) of each step."""
    generator = torch.Generator().manual_seed(1)
    seen = []
    for i in range(steps):
        ids = torch.randint(0, 64, (2, 16), generator=generator)
        mask = torch.triu(torch.ones(1, 1, 16, 16, dtype=torch.bool), 1)
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = model(ids, torch.arange(16)[None].expand(2, -1), mask, labels=ids).float().mean()
        if watch is not None:
            watch.log(loss=loss)
        (optimizer.scale_loss(loss) * (float("inf") if i == break_at else 1.0)).backward()
        model.finish_grad_sync()
        seen.append((float(loss.detach()), *optimizer.step()[:2]))
    return seen


def test_losses_norms_and_steps_are_megatrons_and_nothing_changes(kept):
    plain = train(*made())
    model, optimizer = made()
    own = set(vars(optimizer))
    watch = attach_megatron([model], optimizer, iteration=10, recipe="observe")
    seen = train(model, optimizer, watch)
    watch.detach()
    assert seen == plain
    assert kept.steps() == [11, 12, 13, 14]
    assert list(kept.losses().values()) == pytest.approx([loss for loss, *_ in seen], abs=1e-4)
    assert list(kept.norms().values()) == pytest.approx([norm for *_, norm in seen], rel=1e-5)
    assert set(vars(optimizer)) == own
    assert "decoder.final_layernorm" in {site.module for site in kept[0].sites}
    assert watch.guard.errors == {}


def test_an_overflow_is_a_skipped_step(kept):
    model, optimizer = made(torch.float16)
    watch = attach_megatron([model], optimizer, recipe="observe")
    seen = train(model, optimizer, watch, break_at=1)
    watch.detach()
    wanted = [StepStatus.OK if updated else StepStatus.SKIPPED for _, updated, _ in seen]
    assert StepStatus.SKIPPED in wanted
    assert [int(header["status"]) for header, *_ in kept[0].steps] == wanted
    assert all(int(header["present"]) & StepPresent.LOSS_SCALE for header, *_ in kept[0].steps)
    assert kept.steps() == [1, 2, 3, 4]
