"""A site has one name, whatever wraps the model and wherever in a script attach is called."""

from __future__ import annotations

import peft
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import fp8watch


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, use_cache=False,
        )
    )  # fmt: skip


def adapted(model: nn.Module) -> nn.Module:
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "up_proj"], r=16))


def sites(kept, attached: nn.Module, run: nn.Module | None = None) -> set[str]:
    """Names of the Linears of the model itself that were seen in a step."""
    with fp8watch.attach(attached, recipe="observe") as watch:
        ids = torch.randint(0, 64, (2, 16))
        (run or attached)(input_ids=ids, labels=ids).loss.backward()
        watch.step()
    assert watch.guard.errors == {}
    return {s.module for s in kept[-1].sites if s.recipe != "probe" and "lora_" not in s.module}


def test_lora_around_a_model_leaves_its_names(kept):
    plain = sites(kept, llama())
    assert "model.layers.0.self_attn.q_proj" in plain
    assert sites(kept, adapted(llama())) == plain
    names = {s.module for s in kept[-1].sites}
    assert "model.layers.0.mlp.up_proj.lora_A.default" in names
    assert not [name for name in names if "base_layer" in name or name.startswith("base_model")]


def test_attach_before_the_adapter_and_behind_it_are_the_same(kept):
    model = llama()
    with fp8watch.attach(model, recipe="observe") as watch:
        wrapped = adapted(model)
        ids = torch.randint(0, 64, (2, 16))
        wrapped(input_ids=ids, labels=ids).loss.backward()
        watch.step()
    before = {s.module for s in kept[-1].sites if s.recipe != "probe"}
    assert before <= sites(kept, adapted(llama()))


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel], ids=["compile", "DataParallel"])
def test_wrappers_of_torch_leave_names_as_well(kept, wrap):
    model = llama()
    wrapped = wrap(model, backend="eager") if wrap is torch.compile else wrap(model)
    assert sites(kept, wrapped, model) == sites(kept, llama())
