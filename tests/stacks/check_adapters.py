"""Heads and embeddings stay in high precision under peft's names too, and no collector warns of one, with attach as it is by
default: adapters around a head, a copy of the head that is trained and saved whole, a head tied to its embedding."""

from __future__ import annotations

import sys
from pathlib import Path

import peft
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fp8watch
from fp8watch_agent.record import is_probe

sys.path.insert(0, str(Path(__file__).parents[2] / "server"))

from fp8watch_server.detect.finding import facts_of
from fp8watch_server.detect.modes.sensitive_layer_quantized.detector import sensitive

VOCAB, RANK = 128, 16
PROJECTIONS = {f"model.layers.0.self_attn.{n}_proj" for n in "qkvo"} | {
    f"model.layers.0.mlp.{n}_proj" for n in ("gate", "up", "down")
}


def llama(tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, use_cache=False, tie_word_embeddings=tied,
        )
    )  # fmt: skip


def in_fp8(kept, *, tied: bool = False, how: dict | None = None, **adapters) -> set[str]:
    """Modules that computed in FP8 in two steps, where the collector's rule about sensitive layers finds nothing."""
    model = llama(tied)
    if adapters:
        model = peft.get_peft_model(model, peft.LoraConfig(**adapters))
    watch = fp8watch.attach(model, recipe="blockwise", **(how or {}))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    for step in range(2):
        ids = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    watch.detach()
    assert watch.guard.errors == {}
    return {site.module for site in kept[-1].sites if not is_probe(site.operand, site.recipe)}


def warned_of(kept) -> list[str]:
    """Modules of which the collector would warn, by what it was told of the run."""
    recorder = kept[-1]
    found = sensitive(facts_of(recorder.sites).values(), 0, 0, recorder.session.facts | recorder.facts)
    return found.extra["modules"] if found is not None else []


def adapters_of(*names: str) -> set[str]:
    return {f"{name}.lora_{part}.default" for name in names for part in "AB"}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
class TestHeadsAndEmbeddings:
    def test_adapters_at_the_head_stay_in_high_precision_with_it(self, kept, tied):
        found = in_fp8(kept, tied=tied, target_modules=["q_proj", "lm_head"], r=RANK)
        assert found == PROJECTIONS | adapters_of("model.layers.0.self_attn.q_proj")
        assert warned_of(kept) == []
        assert "lm_head" in kept[-1].session.facts["left_out"]

    def test_copies_that_are_trained_and_saved_whole_stay_with_what_they_are_copies_of(self, kept, tied):
        found = in_fp8(kept, tied=tied, target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"], r=RANK)
        assert found == PROJECTIONS | adapters_of("model.layers.0.self_attn.q_proj")
        assert warned_of(kept) == []
        probes = {site.module for site in kept[-1].sites if is_probe(site.operand, site.recipe)}
        assert {"lm_head.modules_to_save.default", "model.embed_tokens.modules_to_save.default"} <= probes

    def test_an_adapter_of_the_embedding_is_no_head(self, kept, tied):
        found = in_fp8(kept, tied=tied, target_modules=["q_proj", "embed_tokens"], r=RANK)
        assert found == PROJECTIONS | adapters_of("model.layers.0.self_attn.q_proj")
        assert warned_of(kept) == []
        assert "tied_head" not in kept[-1].session.facts["left_out"]


def test_adapters_compute_in_fp8_where_they_are_wide_enough(kept):
    assert in_fp8(kept, target_modules="all-linear", r=RANK) == PROJECTIONS | adapters_of(*PROJECTIONS)
    assert in_fp8(kept, target_modules="all-linear", r=8) == PROJECTIONS
    assert "narrower than 16" in kept[-1].session.facts["left_out"]


def test_a_head_that_is_asked_for_in_fp8_is_warned_of_under_every_name_of_peft(kept):
    """The rule that finds nothing above finds what is there to be found."""
    every = {"how": {"filter_fn": lambda *_: True}}
    in_fp8(kept, target_modules=["lm_head"], r=RANK, **every)
    assert warned_of(kept) == ["lm_head", "lm_head.lora_A.default", "lm_head.lora_B.default"]
    in_fp8(kept, target_modules=["q_proj"], modules_to_save=["lm_head"], r=RANK, **every)
    assert "lm_head.modules_to_save.default" in warned_of(kept)
