"""What the environment and a trainer's command line say of a recipe, and what is refused."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from fp8watch.recipe import blockwise, current, delayed, mxfp8, nvfp4, observe, resolve_recipe
from fp8watch.recipe.environment import EPS_VARIABLES, FP32_SCALES_VARIABLE, POWER_2_VARIABLES, QPARAMS
from fp8watch.recipe.framework import transformer_engine
from fp8watch.recipe.trainer import trainer_flags

OPERANDS = ("input", "weight", "grad_output")


def values(recipe, field):
    return [getattr(recipe.operand(o), field) for o in OPERANDS]


def test_defaults_are_transformer_engines():
    made = blockwise(environ={})
    assert values(made, "tile") == [(1, 128), (128, 128), (1, 128)]
    assert values(made, "format") == ["E4M3"] * 3
    assert values(made, "power_2_scale") == [True] * 3
    assert values(made, "eps") == [0.0] * 3
    made = current(environ={})
    assert values(made, "tile") == [None] * 3
    assert values(made, "format") == ["E4M3", "E4M3", "E5M2"]
    assert values(made, "power_2_scale") == [False] * 3
    made = delayed()
    assert values(made, "format") == ["E4M3", "E4M3", "E5M2"]
    assert (made.history.amax_history_len, made.history.amax_compute_algo, made.history.margin) == (1024, "max", 0)
    assert values(mxfp8(), "format") == ["E4M3"] * 3
    assert values(mxfp8(), "tile") == [(1, 32)] * 3


@pytest.mark.parametrize("operand", OPERANDS)
def test_each_operand_has_its_own_eps_and_power_2_variable(operand):
    other = [o for o in OPERANDS if o != operand]
    made = blockwise(environ={EPS_VARIABLES[operand]: "1e-12"})
    assert made.operand(operand).eps == 1e-12
    assert [made.operand(o).eps for o in other] == [0.0, 0.0]
    made = blockwise(environ={POWER_2_VARIABLES[operand]: "0"})
    assert made.operand(operand).power_2_scale is False
    assert [made.operand(o).power_2_scale for o in other] == [True, True]
    made = blockwise(environ={FP32_SCALES_VARIABLE: "1", POWER_2_VARIABLES[operand]: "1"})
    assert made.operand(operand).power_2_scale is True
    assert [made.operand(o).power_2_scale for o in other] == [False, False]


@pytest.mark.parametrize("variable", EPS_VARIABLES.values())
@pytest.mark.parametrize("value", ["abc", "", "-1", "-1e-12", "nan", "inf", "1e39"])
def test_a_bad_eps_is_refused_with_name_value_and_rule(variable, value):
    with pytest.raises(ValueError, match=variable) as e:
        blockwise(environ={variable: value})
    assert f"{variable}={value!r}" in str(e.value)
    assert "finite number, 0 or more" in str(e.value)


@pytest.mark.parametrize("variable", [*POWER_2_VARIABLES.values(), FP32_SCALES_VARIABLE])
@pytest.mark.parametrize("value", ["2", "yes", "", "true", "-1"])
def test_a_bad_switch_is_refused_with_name_value_and_rule(variable, value):
    with pytest.raises(ValueError, match=variable) as e:
        blockwise(environ={variable: value})
    assert f"{variable}={value!r}: must be '0' or '1'" in str(e.value)


@pytest.mark.parametrize(
    ("environ", "arguments", "says"),
    [
        ({FP32_SCALES_VARIABLE: "1"}, {}, f"{FP32_SCALES_VARIABLE}='1'"),
        ({POWER_2_VARIABLES["weight"]: "0"}, {}, f"{POWER_2_VARIABLES['weight']}='0'"),
        ({}, {"power_2_scale": False}, "power_2_scale=False"),
    ],
)
def test_fp32_scales_are_refused_on_blackwell(environ, arguments, says):
    with pytest.raises(ValueError, match="Blackwell") as e:
        blockwise(environ=environ, device_capability=(10, 0), **arguments)
    assert says in str(e.value)
    assert "powers of two" in str(e.value)
    assert not blockwise(environ=environ, device_capability=(9, 0), **arguments).weight.power_2_scale
    assert blockwise(environ={}, device_capability=(10, 0)).weight.power_2_scale


def test_a_recipe_made_by_hand_is_refused_on_blackwell_too(monkeypatch):
    made = blockwise(environ={}, power_2_scale=False)
    monkeypatch.setattr("fp8watch.recipe.resolve.capability", lambda: (12, 0))
    with pytest.raises(ValueError, match="Recipe.input.power_2_scale=False: FP32 scales do not exist on Blackwell"):
        resolve_recipe(made)


def test_an_argument_wins_over_its_variable_and_says_so():
    made = blockwise(environ={EPS_VARIABLES["input"]: "1e-10", FP32_SCALES_VARIABLE: "1"}, amax_epsilon=1e-12)
    assert values(made, "eps") == [1e-12] * 3
    assert made.declared_not_effective == (
        f"{EPS_VARIABLES['input']}=1e-10 has no effect: the argument amax_epsilon=1e-12 wins",
    )
    made = blockwise(environ={FP32_SCALES_VARIABLE: "1"}, power_2_scale=True)
    assert made.declared_not_effective == (
        f"{FP32_SCALES_VARIABLE}=1 has no effect: the argument power_2_scale=True wins",
    )


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: blockwise(environ={}, fp8_format="E5M6"), "fp8_format='E5M6'"),
        (lambda: blockwise(environ={}, block_dims=(1, 3, 1)), "block_dims=(1, 3, 1)"),
        (lambda: blockwise(environ={}, block_dims=(2, 2, 1)), "no GEMM takes 128×128 blocks on both sides"),
        (lambda: blockwise(environ={}, amax_epsilon=-1.0), "eps=-1.0"),
        (lambda: blockwise(environ={}, amax_epsilon=1e39), "eps=1e+39: must be finite in float32"),
        (lambda: delayed(amax_history_len=0), "amax_history_len=0"),
        (lambda: delayed(amax_compute_algo="median"), "amax_compute_algo='median'"),
        (lambda: delayed(margin=0.5), "margin=0.5"),
        (lambda: mxfp8(warmup_steps=-1), "warmup_steps=-1"),
        (lambda: delayed(warmup_steps=5, observe_only=True), "warmup_steps=5 with observe_only=True"),
        (lambda: resolve_recipe("int4"), "'blockwise', 'current', 'delayed', 'mxfp8', 'observe'"),
    ],
)
def test_arguments_that_cannot_be_meant(make, says):
    with pytest.raises(ValueError, match=".") as e:
        make()
    assert says in str(e.value)


def test_every_effective_difference_changes_the_fingerprint():
    made = [
        blockwise(environ={}),
        blockwise(environ={}, fp8_format="HYBRID"),
        blockwise(environ={}, power_2_scale=False),
        blockwise(environ={}, amax_epsilon=1e-12),
        blockwise(environ={}, block_dims=(1, 1, 1)),
        blockwise(environ={}, warmup_steps=10),
        observe(environ={}),
        observe(delayed()),
        current(environ={}),
        current(environ={}, fp8_format="E4M3"),
        delayed(),
        delayed(amax_history_len=16),
        delayed(amax_compute_algo="most_recent"),
        delayed(margin=1),
        mxfp8(),
        nvfp4(environ={}),
        resolve_recipe("blockwise", environ={}, argv=["--fp8-format", "e4m3", "--fp8-recipe", "blockwise"]),
    ]
    assert len({r.fingerprint() for r in made}) == len(made)
    assert resolve_recipe("delayed").fingerprint() == delayed().fingerprint()


def test_what_was_declared_in_vain_is_not_in_the_fingerprint():
    quiet, loud = blockwise(environ={}), blockwise(environ={FP32_SCALES_VARIABLE: "1"}, power_2_scale=True)
    assert loud.declared_not_effective
    assert loud.fingerprint() == quiet.fingerprint()
    assert loud.session_facts()["declared_not_effective"] == loud.declared_not_effective[0]
    assert "declared_not_effective" not in quiet.session_facts()


def test_a_variable_set_after_transformer_engine_was_imported_is_said_to_be_without_effect(monkeypatch):
    held = SimpleNamespace(power_2_scale=True, amax_epsilon=0.0)
    block = type(
        "Float8BlockScaling", (), {"fp8_quant_fwd_inp": held, "fp8_quant_fwd_weight": held, "fp8_quant_bwd_grad": held}
    )
    monkeypatch.setitem(sys.modules, "transformer_engine.common.recipe", SimpleNamespace(Float8BlockScaling=block))
    assert blockwise(environ={}).declared_not_effective == ()
    made = blockwise(environ={FP32_SCALES_VARIABLE: "1", EPS_VARIABLES["grad_output"]: "1e-12"})
    assert values(made, "power_2_scale") == [False] * 3  # ours follows
    assert len(made.declared_not_effective) == 4
    assert made.declared_not_effective[0] == (
        f"{FP32_SCALES_VARIABLE}=1 has no effect on Transformer Engine's modules: it was imported before and holds "
        "power_2_scale=True for input; set it before the first import"
    )
    assert made.declared_not_effective[3] == (
        f"{EPS_VARIABLES['grad_output']}=1e-12 has no effect on Transformer Engine's modules: it does not read that "
        "variable, and holds amax_epsilon=0.0 for grad_output; assign recipe.fp8_quant_bwd_grad = "
        "QParams(power_2_scale=False, amax_epsilon=1e-12)"
    )


@pytest.mark.parametrize("by", ["text", "trainer"])
def test_loongforges_transformer_engine_reads_the_variables_of_operands(by, monkeypatch, tmp_path):
    held = SimpleNamespace(power_2_scale=True, amax_epsilon=0.0)
    block = type("Float8BlockScaling", (), dict.fromkeys(QPARAMS.values(), held))
    source = tmp_path / "__init__.py"
    source.write_text(f"eps = os.getenv('{EPS_VARIABLES['input']}')" if by == "text" else "eps = 0.0")
    module = SimpleNamespace(Float8BlockScaling=block, __file__=str(source))
    monkeypatch.setitem(sys.modules, "transformer_engine.common.recipe", module)
    assert transformer_engine() == ("loongforge" if by == "text" else "transformer_engine")
    if by == "trainer":
        monkeypatch.setitem(sys.modules, "loongforge", SimpleNamespace())
    assert transformer_engine() == "loongforge"
    [said] = blockwise(environ={EPS_VARIABLES["weight"]: "1e-12"}).declared_not_effective
    assert said.endswith("it was imported before and holds amax_epsilon=0.0 for weight; set it before the first import")


@pytest.mark.parametrize(
    ("argv", "flags"),
    [
        (["--lr", "1e-3"], {}),
        (["--fp8-format", "e4m3", "--fp8-recipe=blockwise"], {"fp8_format": "e4m3", "fp8_recipe": "blockwise"}),
        (["--fp8-format=hybrid", "--fp8-param-gather"], {"fp8_format": "hybrid", "fp8_param_gather": "1"}),
        (["--fp8-format", "--fp8-recipe"], {}),
    ],
)
def test_flags_come_from_the_command_line(argv, flags):
    assert dict(trainer_flags(argv, modules={})) == flags


def test_flags_come_from_megatron_when_it_has_parsed_its_arguments():
    def module(**args):
        return {"megatron.training.global_vars": SimpleNamespace(get_args=lambda: SimpleNamespace(**args))}

    argv = ["--fp8-format", "e4m3"]
    got = trainer_flags(argv, module(fp8="hybrid", fp8_recipe="delayed", fp8_param_gather=True))
    assert dict(got) == {"fp8_format": "hybrid", "fp8_recipe": "delayed", "fp8_param_gather": "1"}
    got = trainer_flags(argv, module(fp8="e4m3", fp8_recipe="blockwise", fp8_param_gather=False))
    assert dict(got) == {"fp8_format": "e4m3", "fp8_recipe": "blockwise"}
    assert trainer_flags(argv, module(fp8=None, fp8_recipe="delayed", fp8_param_gather=False)) == ()

    def not_yet():
        raise AssertionError("args is not initialized.")

    assert dict(trainer_flags(argv, {"megatron.training": SimpleNamespace(get_args=not_yet)})) == {"fp8_format": "e4m3"}


@pytest.mark.parametrize(
    ("argv", "both"),
    [
        (["--fp8-format", "e4m3"], ("--fp8-format e4m3", "no --fp8-recipe (delayed)")),
        (["--fp8-format", "e4m3", "--fp8-recipe", "delayed"], ("--fp8-format e4m3", "--fp8-recipe delayed")),
        (["--fp8-format", "hybrid", "--fp8-recipe", "blockwise"], ("--fp8-format hybrid", "--fp8-recipe blockwise")),
        (["--fp8-recipe", "blockwise"], ("no --fp8-format", "--fp8-recipe blockwise")),
    ],
)
def test_e4m3_and_blockwise_belong_together(argv, both):
    (warning,) = resolve_recipe("blockwise", environ={}, argv=argv).warnings
    assert all(part in warning for part in both)
    assert "belong together" in warning


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--fp8-format", "e4m3", "--fp8-recipe", "blockwise"],
        ["--fp8-format", "hybrid", "--fp8-recipe", "delayed"],
        ["--fp8-format", "hybrid"],
        ["--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"],
    ],
)
def test_flags_that_fit_are_no_warning(argv):
    made = resolve_recipe("blockwise", environ={}, argv=argv)
    assert made.warnings == ()
    assert dict(made.flags) == dict(trainer_flags(argv, {}))


def test_a_trainers_other_recipe_is_declared_and_not_effective():
    made = resolve_recipe("blockwise", environ={}, argv=["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"])
    assert made.declared_not_effective == (
        "--fp8-recipe tensorwise is declared, the Linears taken over here use blockwise",
    )
    same = resolve_recipe("current", environ={}, argv=["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"])
    assert same.declared_not_effective == ()


def test_attach_prints_what_does_not_fit_and_sends_it(attach, mlp, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "--fp8-format", "e4m3", "--fp8-recipe", "delayed"])
    watch = attach(mlp)
    said = capsys.readouterr().err
    facts = watch._recorder.session.facts
    assert facts["flag.fp8_format"] == "e4m3"
    assert "fp8watch: --fp8-format e4m3 with --fp8-recipe delayed: e4m3 and blockwise belong together" in said
    assert "belong together" in facts["configuration_warning"]
    assert "fp8watch: --fp8-recipe delayed is declared" in said
    assert "--fp8-recipe delayed is declared" in facts["declared_not_effective"]
    assert facts["recipe"] == "blockwise"
