"""Which Linears stay in high precision: heads, routers and ties, by what a model shows and by name at any depth."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp8watch.selection.module_filter import select_linears
from fp8watch.selection.module_roles import role_facts
from fp8watch_agent.record import is_probe
from fp8watch_agent.roles import EMBEDDING, LINEAR, OUTPUT_HEAD, ROUTER, decode_roles, pattern, role_of


def tree(**children):
    """Nested modules out of nested dicts and (in, out)."""
    made = nn.Module()
    for name, child in children.items():
        if isinstance(child, dict):
            module = tree(**child)
        elif isinstance(child, tuple):
            module = nn.Linear(*child, bias=False, device="meta")
        else:
            module = child
        made.add_module(name, module)
    return made


def layers(*blocks):
    return nn.ModuleList(tree(**b) for b in blocks)


def left_out(model):
    return {m.fqn: m.reason for m in select_linears(model, None)[1]}


LLAMA_MLP = {"gate_proj": (64, 192), "up_proj": (64, 192), "down_proj": (192, 64)}


def llama(mlp=LLAMA_MLP):
    attention = {"q_proj": (64, 64), "o_proj": (64, 64)}
    return {"embed_tokens": nn.Embedding(320, 64), "layers": layers(*[{"self_attn": attention, "mlp": mlp}] * 2)}


def test_a_llama_leaves_out_its_head_and_nothing_else():
    assert left_out(tree(model=llama(), lm_head=(64, 320))) == {"lm_head": OUTPUT_HEAD}


@pytest.mark.parametrize("wrapper", [("base_model", "model"), ("model", "language_model"), ("a", "b", "c")])
@pytest.mark.parametrize("name", ["lm_head", "output_layer", "embed_out", "unembed"])
def test_a_head_is_one_at_any_depth(wrapper, name):
    inner = tree(**{"model": llama(), name: (64, 336)})  # padded: its width is not the vocabulary's
    for part in reversed(wrapper):
        inner = tree(**{part: inner})
    assert left_out(inner) == {".".join((*wrapper, name)): OUTPUT_HEAD}


def test_adapters_around_a_head_stay_out_with_it():
    head = {"base_layer": (64, 320), "lora_A": {"default": (64, 16)}, "lora_B": {"default": (16, 320)}}
    assert set(left_out(tree(base_model=tree(model=tree(model=llama(), lm_head=head)))).values()) == {OUTPUT_HEAD}


@pytest.mark.parametrize("name", ["decoder", "logits", "to_vocab"])
def test_an_untied_head_of_any_name_has_one_output_a_token(name):
    model = tree(model=llama(), top={name: (64, 320)})
    assert left_out(model) == {f"top.{name}": OUTPUT_HEAD}


def test_an_mlp_as_wide_as_a_byte_vocabulary_is_no_head():
    block = {"up": (64, 256), "down": (256, 64)}
    assert left_out(tree(embedding=nn.Embedding(256, 64), layers=layers(block, block))) == {}


def test_an_mlp_as_wide_as_a_byte_vocabulary_is_no_head_outside_of_blocks_either():
    model = tree(embedding=nn.Embedding(256, 64), up=(64, 256), down=(256, 64), head=(64, 256))
    assert left_out(model) == {"head": OUTPUT_HEAD}


def test_an_untied_head_of_any_name_is_one_beside_blocks_as_wide_as_the_vocabulary():
    block = {"up": (64, 256), "down": (256, 64)}
    model = tree(embedding=nn.Embedding(256, 64), layers=layers(block, block), decoder=(64, 256))
    assert left_out(model) == {"decoder": OUTPUT_HEAD}


@pytest.mark.parametrize("name", ["output_layer", "embed_out"])
def test_what_a_block_calls_its_output_is_no_head(name):
    block = {"input_layer": (64, 128), name: (128, 64)}
    assert left_out(tree(blocks=layers(block, block))) == {}
    assert role_of(f"blocks.0.{name}") is None
    assert role_of(f"model.{name}") == OUTPUT_HEAD


def test_positions_are_no_vocabulary():
    assert left_out(tree(wpe=nn.Embedding(1024, 64), mlp={"fc": (64, 1024)})) == {}


def test_what_the_model_calls_its_output_embeddings_is_the_head():
    model = tree(body=(64, 64), top=(64, 128))
    model.get_output_embeddings = lambda: model.top
    assert left_out(model) == {"top": OUTPUT_HEAD}


def test_a_model_that_refuses_to_name_its_output_embeddings_is_taken():
    model = tree(body=(64, 64))

    def refuse():
        raise NotImplementedError

    model.get_output_embeddings = refuse
    assert left_out(model) == {}


@pytest.mark.parametrize(
    "moe",
    [
        {"gate": (64, 16), "experts": layers(*[{"w1": (64, 96), "w3": (64, 96), "w2": (96, 64)}] * 4)},  # Mixtral
        {"gate": (64, 256), "experts": layers(*[LLAMA_MLP] * 2), "shared_experts": LLAMA_MLP},  # DeepSeek
        {"gate": {"wg": (64, 16)}, "experts": layers(LLAMA_MLP)},
        {"router": {"layer": (64, 16)}, "experts": layers(LLAMA_MLP)},
    ],
)
def test_what_chooses_among_experts_is_a_router(moe):
    got = left_out(tree(layers=layers({"mlp": moe})))
    assert list(got.values()) == [ROUTER]
    assert next(iter(got)).startswith(("layers.0.mlp.gate", "layers.0.mlp.router"))


@pytest.mark.parametrize(
    "mlp",
    [
        {"gate": (64, 192), "up": (64, 192), "down": (192, 64)},
        {"gate": (128, 32), "up": (128, 32), "down": (32, 128)},  # narrow, as an adapter's
        {"wg": (64, 192), "w_up": (64, 192), "wo": (192, 64)},
        {"gate": (64, 64), "out": (64, 64)},
    ],
)
def test_the_gate_of_an_mlp_is_no_router(mlp):
    assert left_out(tree(layers=layers({"mlp": mlp}, {"mlp": mlp}))) == {}


def test_a_gate_with_few_outputs_is_a_router_although_its_experts_are_elsewhere():
    assert left_out(tree(layers=layers({"gate": (64, 16)}))) == {"layers.0.gate": ROUTER}


def test_the_session_says_roles_that_names_would_get_wrong():
    mlp = {"gate": (64, 192), "up": (64, 192), "down": (192, 64)}
    model = tree(model=llama(mlp), decoder=(64, 320))
    named = [(n, m) for n, m in model.named_modules()]
    linears = [(n, m) for n, m in named if isinstance(m, nn.Linear)]
    told = decode_roles(role_facts(named, linears)["roles"])
    assert told == {"model.layers.*.mlp.gate": LINEAR, "decoder": OUTPUT_HEAD}


def test_attach_leaves_out_whatever_the_collector_would_warn_of(attach):
    names = ["lm_head", "layers.3.router", "layers.0.mlp.gating", "model.output_layer", "embedding", "final_norm"]
    model = nn.Module()
    for name in names:
        parent = model
        for part in name.split(".")[:-1]:
            if not hasattr(parent, part):
                parent.add_module(part, nn.Module())
            parent = getattr(parent, part)
        parent.add_module(name.rpartition(".")[2], nn.Linear(64, 64))
    assert all(role_of(name) for name in names)
    assert set(left_out(model)) == set(names)


def test_patterns_put_numbers_for_layers_and_nothing_else():
    assert pattern("model.layers.12.w1") == "model.layers.*.w1"
    assert pattern("0.conv2.1") == "*.conv2.*"


@pytest.mark.parametrize(
    "name",
    ["model.embed_tokens", "model.embed_tokens.modules_to_save.default", "decoder.embed_positions", "gpt_neox.embed_in",
     "transformer.wte", "embedding.word_embeddings", "tok_embeddings", "token_embedding"],
)  # fmt: skip
def test_embeddings_are_told_by_the_names_that_models_give_them(name):
    assert role_of(name) == EMBEDDING
    assert role_of(f"{name}.proj") is None


class VocabEmbedding(nn.Module):
    """A lookup of another class than torch's, as Megatron's VocabParallelEmbedding."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(320, 64))

    def forward(self, ids):
        return nn.functional.embedding(ids, self.weight)


class ParallelHead(nn.Module):
    """A product of another class than nn.Linear, that returns a bias beside it, as Megatron's ColumnParallelLinear."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(320, 64))

    def forward(self, x):
        return nn.functional.linear(x, self.weight), None


class TiedParallelHead(nn.Module):
    weight = None

    def forward(self, x, weight):
        return nn.functional.linear(x, weight), None


class OfItsOwnClasses(nn.Module):
    """A model of such classes; returns a 0-d loss."""

    def __init__(self, tied=False):
        super().__init__()
        self.embedding = nn.Module()
        self.embedding.word_embeddings = VocabEmbedding()
        self.up = nn.Linear(64, 64)
        self.output_layer = TiedParallelHead() if tied else ParallelHead()

    def forward(self, ids):
        x = self.up(self.embedding.word_embeddings(ids))
        weight = [self.embedding.word_embeddings.weight] if self.output_layer.weight is None else []
        return self.output_layer(x, *weight)[0].square().mean()


def test_heads_and_embeddings_of_classes_of_their_own_are_looked_at_by_default(attach):
    watch = attach(OfItsOwnClasses())
    watch._model(torch.randint(0, 320, (2, 8))).backward()
    watch.step()
    found = {(s.module, s.operand) for s in watch._recorder.sites if is_probe(s.operand, s.recipe)}
    assert found == {("embedding.word_embeddings", "output"), ("output_layer", "output"), ("output_layer", "input")}
    assert set(watch._recorder.step(0)[1]) >= {(module, operand, "rowwise") for module, operand in found}
    assert not watch.guard.errors


def test_an_embedding_of_another_class_is_a_gemm_only_where_it_may_be_the_head(attach, capsys):
    attach(OfItsOwnClasses())
    assert "not taken: output_layer (ParallelHead [320, 64], 83 %); run" in capsys.readouterr().err
    attach(OfItsOwnClasses(tied=True))
    assert "not taken: embedding.word_embeddings (VocabEmbedding [320, 64], 83 %); run" in capsys.readouterr().err
