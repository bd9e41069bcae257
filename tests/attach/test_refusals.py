"""What cannot work is refused at attach, with value, rule and remedy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp8watch.kernels import resolve
from fp8watch.recipe import blockwise, resolve_recipe


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"recipe": "int4"}, ValueError, "recipe='int4' is unknown"),
        ({"recipe": "int4"}, ValueError, "'delayed'"),
        ({"recipe": 8}, TypeError, "recipe=8"),
        ({"collector": "localhost:8900"}, ValueError, "collector='localhost:8900'"),
        ({"collector": "ftp://x"}, ValueError, "http://"),
        ({"every": 0}, ValueError, "every=0"),
        ({"every": True}, ValueError, "every=True"),
        ({"tile_maps": "some"}, ValueError, "tile_maps='some'"),
        ({"tags": "ablation"}, TypeError, "tags='ablation': must be a sequence of texts"),
        ({"tags": ["a", ""]}, ValueError, "must be at most 50 texts of 1 to 100"),
        ({"tile_maps": "every:0"}, ValueError, "every:0"),
        ({"overhead_budget": 2}, ValueError, "overhead_budget=2"),
        ({"start_step": -1}, ValueError, "start_step=-1"),
        ({"run": ""}, ValueError, "run=''"),
        ({"optimizer": 3}, TypeError, "optimizer=int"),
        ({"filter_fn": 3}, TypeError, "filter_fn=3"),
        ({"filter_fn": lambda m, n: "yes"}, TypeError, "must return True, False or None"),
    ],
)
def test_arguments(attach, mlp, arguments, error, says):
    with pytest.raises(error, match=".*") as e:
        attach(mlp, **arguments)
    assert says in str(e.value)
    assert type(mlp.up) is nn.Linear


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("FP8_QUANT_FWD_INP_AMAX_EPS", "abc"),
        ("FP8_QUANT_FWD_WEIGHT_AMAX_EPS", "-1"),
        ("FP8_QUANT_BWD_GRAD_AMAX_EPS", "nan"),
        ("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "yes"),
        ("NVTE_FP8_BLOCK_SCALING_FWD_INP_POWER2", "2"),
        ("FP8WATCH_RUN", "a b"),
        ("FP8WATCH_EVERY", "-3"),
        ("FP8WATCH_DISABLED", "maybe"),
        ("FP8WATCH_COLLECTOR", "nonsense"),
    ],
)
def test_variables(attach, mlp, monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=variable) as e:
        attach(mlp)
    assert value in str(e.value)
    assert type(mlp.up) is nn.Linear


def test_a_model_that_is_none(attach):
    with pytest.raises(TypeError, match="model=dict"):
        attach({})


def test_what_is_left_out_is_said_with_the_reason(attach, capsys):
    class Lora(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    model = nn.ModuleDict(
        {
            "q": nn.Linear(32, 32),
            "lora": Lora(32, 32),
            "narrow": nn.Linear(32, 3),
            "router": nn.Linear(32, 32),
            "lm_head": nn.Linear(32, 64),
            "wide": nn.Linear(32, 32).double(),
        }
    )
    attach(model)
    line = capsys.readouterr().err
    assert line.startswith(f"fp8watch: 1 Linear now compute in FP8 (blockwise, backend {resolve(None, 'cpu').NAME})")
    for part in (
        "lora (own forward (Lora))",
        "narrow (32×3: narrower than 16)",
        "router (router)",
        "lm_head (output head)",
        "wide (weight is float64",
    ):
        assert part in line
    assert line.count("\n") == 1


def test_tied_embeddings_stay_as_they_are(attach):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(64, 32)
            self.mix = nn.Linear(32, 32)
            self.out = nn.Linear(32, 64, bias=False)
            self.out.weight = self.embedding.weight

    model = Tied()
    attach(model)
    assert type(model.out) is nn.Linear
    assert type(model.mix) is not nn.Linear


def test_attach_twice_watches_once(attach, mlp):
    first = attach(mlp)
    second = attach(mlp)
    assert second.summary()["num_sites"] == 0
    second.detach()
    mlp(torch.randn(8, 64)).backward()
    first.step()
    assert len(first._recorder.steps) == 1


def test_effective_configuration_is_fingerprinted():
    assert blockwise(environ={}).fingerprint() == resolve_recipe("blockwise", environ={}).fingerprint()
    eps = blockwise(environ={"FP8_QUANT_BWD_GRAD_AMAX_EPS": "1e-12"})
    assert eps.grad_output.eps == 1e-12
    assert eps.fingerprint() != blockwise(environ={}).fingerprint()
    fp32 = blockwise(environ={"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1", "NVTE_FP8_BLOCK_SCALING_FWD_INP_POWER2": "1"})
    assert (fp32.input.power_2_scale, fp32.weight.power_2_scale) == (True, False)
    assert blockwise(fp8_format="HYBRID", environ={}).grad_output.format == "E5M2"


def test_a_filter_can_leave_the_rest_to_the_default(attach, mlp):
    attach(mlp, filter_fn=lambda module, fqn: False if fqn == "up" else None)
    assert [type(m) is nn.Linear for m in (mlp.up, mlp.down, mlp.lm_head)] == [True, False, True]


def test_a_filter_that_says_yes_is_obeyed(attach, mlp):
    attach(mlp, filter_fn=lambda module, fqn: fqn == "lm_head")
    assert [type(m) is nn.Linear for m in (mlp.up, mlp.down, mlp.lm_head)] == [True, True, False]


def test_wrappers_change_neither_names_nor_choice(attach):
    def parts():
        return nn.ModuleDict({"model": nn.Sequential(nn.Linear(32, 32)), "lm_head": nn.Linear(32, 64)})

    plain = attach(parts())
    block = parts()
    block["model"] = torch.compile(block["model"], backend="eager")
    wrapped = attach(torch.compile(nn.DataParallel(block), backend="eager"))
    assert {t.fqn for t in wrapped._table} == {t.fqn for t in plain._table} == {"model.0", "lm_head"}
