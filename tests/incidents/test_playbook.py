"""The names of the modes are frozen; every mode has words, a fix, alternatives and a runbook."""

from __future__ import annotations

import re
from importlib import resources

import pytest

from fp8watch.recipe.trainer import misfits
from fp8watch_server.detect.modes import MODE_BY_SLUG, MODES, SLUGS, folder_of
from fp8watch_server.detect.remedies import EPS_VARIABLE, QPARAMS, switch_of
from fp8watch_server.incidents.fixes import fixes

FROZEN = [
    "nan-in-loss",
    "zero-tile-eps",
    "dying-tile",
    "dead-layer",
    "delayed-clip",
    "frozen-scale",
    "stale-weight-scale",
    "gradient-underflow",
    "scale-rounding",
    "recipe-mismatch",
    "outlier-growth",
    "attention-logit-growth",
    "optimizer-divergence",
    "bad-batch",
    "silent-data-corruption",
    "accumulator-precision",
    "inf-laundering",
    "sensitive-layer-quantized",
    "kernel-output-fault",
    "cross-rank-disagreement",
    "chronic-quantization-noise",
    "scale-collapse",
    "nan-in-activation",
    "quantiser-fault",
    "scalar-shift",
    "two-jobs-one-run",
    "expert-outlier",
    "limit-ahead",
]
NUMBERS = list(range(1, len(FROZEN) + 1))


def test_the_slugs_are_frozen_and_numbered_in_order() -> None:
    assert list(SLUGS) == FROZEN
    assert [m.number for m in MODES] == NUMBERS


@pytest.mark.parametrize("slug", FROZEN)
def test_every_mode_has_something_to_change(slug: str) -> None:
    got = fixes(slug, module="layers.0.mlp.up_proj", operand="input")
    assert got
    assert all(f.text for f in got)
    assert MODE_BY_SLUG[slug].alternatives
    assert all(other in MODE_BY_SLUG for other, _ in MODE_BY_SLUG[slug].alternatives)


@pytest.mark.parametrize("operand", ["input", "weight", "grad_output"])
def test_a_zero_tile_names_the_variable_of_its_operand_first(operand: str) -> None:
    first, *rest = fixes("zero-tile-eps", module="m", operand=operand)
    assert first.kind == "env"
    assert f"{EPS_VARIABLE[operand]}=1e-12" in first.text
    assert all(v in " ".join(f.text for f in (first, *rest)) for v in EPS_VARIABLE.values())


ENVIRONMENT = ("_AMAX_EPS", "_POWER2")


@pytest.mark.parametrize("mode", ["zero-tile-eps", "dying-tile", "chronic-quantization-noise", "gradient-underflow"])
@pytest.mark.parametrize("operand", ["input", "weight", "grad_output"])
def test_eps_is_set_where_the_framework_of_the_site_reads_it(mode: str, operand: str) -> None:
    hit = "grad_output" if mode == "gradient-underflow" else operand
    eps = 1e-6 if mode in ("chronic-quantization-noise", "gradient-underflow") else 0.0
    given = {"module": "m", "operand": operand, "eps": eps, "power_2_scale": False}
    stock = " ".join(f.text for f in fixes(mode, backend="transformer_engine", **given))
    assert f"`recipe.{QPARAMS[hit]} = QParams(power_2_scale=False, amax_epsilon=1e-12)`" in stock
    assert not any(name in stock for name in ENVIRONMENT)
    for backend in ("loongforge", "triton", "cpu", ""):
        text = " ".join(f.text for f in fixes(mode, backend=backend, **given))
        assert f"{EPS_VARIABLE[hit]}=1e-12" in text
        assert "QParams" not in text


@pytest.mark.parametrize("backend", ["torchao", "own forward"])
@pytest.mark.parametrize("mode", FROZEN)
def test_what_torchao_or_a_module_of_its_own_casts_is_told_no_switch_of_others(mode: str, backend: str) -> None:
    given = {"module": "m", "operand": "grad_output", "operands": ("weight",), "eps": 1e-6, "power_2_scale": True}
    text = " ".join(f.text for f in fixes(mode, backend=backend, **given))
    told = [name for name in (*ENVIRONMENT, "NVTE_", "QParams", "recipe.fp8_quant") if name in text]
    assert not told
    if mode != "recipe-mismatch":  # there flags are facts of the session
        assert not [flag for flag in ("--fp8", "--first", "--te-") if flag in text]
    assert "attach(model, " not in text
    assert "fp8_autocast" not in text


@pytest.mark.parametrize("backend", ["cpu", "triton", "reference"])
@pytest.mark.parametrize("mode", [slug for slug in FROZEN if slug != "recipe-mismatch"])
def test_where_fp8watch_computes_no_flag_of_a_trainer_is_told(mode: str, backend: str) -> None:
    given = {"module": "m", "operand": "grad_output", "operands": ("weight",), "eps": 1e-6, "extra": {"gain": 2.0**-7}}
    text = " ".join(f.text for f in fixes(mode, backend=backend, **given))
    assert not [
        word
        for word in ("--fp8", "--first", "fp8_autocast", "QParams", "Float8", "is_first_microbatch")
        if word in text
    ]


def test_megatrons_flag_is_told_beside_what_sets_it_without_megatron() -> None:
    for mode, flag, name in (
        ("chronic-quantization-noise", "--fp8-recipe blockwise", "Float8BlockScaling()"),
        ("delayed-clip", "--fp8-amax-history-len 1024", "DelayedScaling(amax_history_len=1024"),
        ("gradient-underflow", "--fp8-format hybrid", "Format.HYBRID"),
        ("sensitive-layer-quantized", "--te-precision-config-file", "fp8_autocast(enabled=False)"),
    ):
        text = " ".join(f.text for f in fixes(mode, module="m", operand="input", backend="transformer_engine"))
        assert flag in text
        assert name in text
    assert 'recipe="blockwise"' in " ".join(f.text for f in fixes("chronic-quantization-noise", backend="cpu"))
    assert not any("--first-last-layers-bf16" in f.text for slug in FROZEN for f in fixes(slug))  # of other layers


def advice(mode: str, backend: str = "cpu", **already: object) -> str:
    given = {"module": "m", "operand": "input", "extra": {"already": already}, "backend": backend}
    return " ".join(f.text for f in fixes(mode, **given))


@pytest.mark.parametrize("backend", ["cpu", "transformer_engine"])
def test_what_is_set_already_is_not_advised(backend: str) -> None:
    set_so = {"recipe": "delayed", "margin": 1, "amax_history_len": 16, "amax_compute_algo": "max"}
    text = advice("delayed-clip", backend, **set_so)
    assert "margin=2" in text
    assert "1 is set" in text
    assert "margin=1" not in text
    assert "longer history than the 16 passes" in text
    assert "amax_history_len=1024" in text
    assert "amax_compute_algo" not in text
    text = advice("delayed-clip", backend, **{**set_so, "amax_history_len": 1024})
    assert "istory" not in text
    text = advice("delayed-clip", backend, amax_history_len=1024, amax_compute_algo="most_recent")
    assert "The maximum over the history" in text
    assert "amax_history_len=" not in text
    assert "margin=1" in advice("delayed-clip", backend)  # nothing is said of what is set
    assert "margin=1" in advice("delayed-clip", backend, margin=0)
    assert "margin" not in advice("chronic-quantization-noise", backend, recipe="blockwise")
    assert "margin" not in advice("chronic-quantization-noise", backend, recipe="delayed", margin=0)
    assert "margin=0" in advice("chronic-quantization-noise", backend, recipe="delayed", margin=2)
    text = advice("chronic-quantization-noise", backend, recipe="blockwise")
    assert "lockwise" not in text
    assert "1×32" in text
    assert "E5M2" not in advice("gradient-underflow", backend, **{"grad_output.format": "E5M2"})


def test_a_fact_that_changed_has_the_name_of_the_framework() -> None:
    assert (
        switch_of("grad_output.format", "torchao", False) == "Float8LinearConfig.cast_config_grad_output.target_dtype"
    )
    assert switch_of("input.power_2_scale", "torchao", False) == "Float8LinearConfig.round_scales_to_power_of_2"
    assert switch_of("weight.eps", "own forward", False) == "eps of weight in the module's own cast"
    assert switch_of("weight.eps", "transformer_engine", False) == "recipe.fp8_quant_fwd_weight.amax_epsilon"
    assert switch_of("weight.eps", "cpu", True) == EPS_VARIABLE["weight"]
    assert switch_of("flag.fp8_recipe", "torchao", True) == "--fp8-recipe"


def test_the_kind_of_scale_is_set_where_the_framework_of_the_site_reads_it() -> None:
    stock = " ".join(f.text for f in fixes("scale-rounding", operands=("weight",), backend="transformer_engine"))
    assert "`recipe.fp8_quant_fwd_weight = QParams(power_2_scale=True, amax_epsilon=0)`" in stock
    assert "NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1" in stock  # this one it reads
    assert not any(name in stock for name in ENVIRONMENT)
    ours = " ".join(f.text for f in fixes("scale-rounding", operands=("weight",), backend="cpu"))
    assert "NVTE_FP8_BLOCK_SCALING_FWD_WEIGHT_POWER2=1" in ours


def test_an_eps_that_did_not_guard_is_raised_in_either_framework() -> None:
    assert "AMAX_EPS=1e-10, up from 1e-13" in fixes("zero-tile-eps", operand="input", eps=1e-13)[0].text
    assert "amax_epsilon=1e-10)`, up from" in fixes("zero-tile-eps", eps=1e-13, backend="transformer_engine")[0].text


def test_a_stale_weight_scale_starts_with_param_gather_and_a_divergence_with_the_learning_rate() -> None:
    assert "--fp8-param-gather" in fixes("stale-weight-scale")[0].text
    assert "10 to 20 %" in fixes("optimizer-divergence")[0].text
    assert "0.002" in fixes("optimizer-divergence", lr=6e-2, usual_lr=2e-3)[0].text


def runbook_of(slug: str) -> str:
    page = resources.files("fp8watch_server.detect.modes").joinpath(folder_of(slug), "runbook.md")
    return page.read_text(encoding="utf-8")


@pytest.mark.parametrize("slug", FROZEN)
def test_every_mode_has_a_runbook_of_its_own(slug: str) -> None:
    text = runbook_of(slug)
    assert text.startswith("# ")
    assert slug in text
    for heading in ("## What it is", "## How to confirm", "## What to change", "## How to prove it is fixed"):
        assert heading in text


def test_the_runbook_names_the_number_of_its_mode() -> None:
    for mode in MODES:
        assert f"Mode {mode.number}, `{mode.slug}`" in runbook_of(mode.slug)


RECIPES = ("delayed", "current", "blockwise", "mxfp8", "nvfp4", "rowwise")
FLAG = re.compile(r"--fp8-(recipe|format) (\w+)")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("mode", [slug for slug in FROZEN if slug != "recipe-mismatch"])
def test_flags_that_are_advised_belong_together_and_are_not_set_already(mode: str, recipe: str) -> None:
    """By the rule that `attach` holds trainers' flags to."""
    given = {"operand": "grad_output", "extra": {"already": {"recipe": recipe}, "gain": 2.0**-7}}
    for fix in fixes(mode, module="m", backend="transformer_engine", recipe=recipe, **given):
        flags = {
            f"fp8_{name}": value for name, value in FLAG.findall(fix.text.replace("(or --fp8-recipe tensorwise)", ""))
        }
        if not flags:
            continue
        after = {"fp8_recipe": recipe, "fp8_format": "e4m3" if recipe == "blockwise" else "hybrid"} | flags
        assert misfits(tuple(after.items()), None)[0] == (), fix.text


@pytest.mark.parametrize("recipe", RECIPES)
def test_fp32_scales_are_advised_where_block_scales_are_rounded(recipe: str) -> None:
    def text(**more: object) -> str:
        given = {"module": "m", "operand": "input", "recipe": recipe} | more
        return " ".join(f.text for f in fixes("chronic-quantization-noise", **given))

    assert ("FP32_SCALES" in text()) is (recipe == "blockwise")
    assert "FP32_SCALES" not in text(power_2_scale=False)
    assert "round_scales_to_power_of_2" not in text(backend="torchao", power_2_scale=False)


@pytest.mark.parametrize("mode", FROZEN)
def test_a_config_of_torchao_is_never_made_anew_for_one_field(mode: str) -> None:
    """A new one is tensorwise, and a new filter converts what the old one left out."""
    given = {"module": "m", "operand": "grad_output", "operands": ("weight",), "eps": 1e-6, "power_2_scale": True}
    for recipe in ("", "rowwise", "current"):
        text = " ".join(f.text for f in fixes(mode, backend="torchao", recipe=recipe, **given))
        assert "Float8LinearConfig(" not in text.replace("from_recipe_name(", "")
        assert "`CastConfig(" not in text
        assert text.count("module_filter_fn=") == text.count("and your_filter(module, fqn)")
        assert 'from_recipe_name("rowwise")' not in text or recipe != "rowwise" or mode == "cross-rank-disagreement"


def test_four_bits_are_advised_eight_and_no_coarser_tile() -> None:
    for backend in ("transformer_engine", "reference"):
        text = advice_of("chronic-quantization-noise", backend, "nvfp4", "E2M1")
        assert "mxfp8" in text
        assert "lockwise" not in text
        assert "E5M2" not in advice_of("gradient-underflow", backend, "nvfp4", "E2M1")


def advice_of(mode: str, backend: str, recipe: str, format: str) -> str:
    given = {"module": "m", "operand": "grad_output", "recipe": recipe, "format": format}
    return " ".join(f.text for f in fixes(mode, backend=backend, **given))


@pytest.mark.parametrize("eps", [0.0, 1e-12])
def test_a_dying_tile_that_an_eps_guards_is_told_no_eps(eps: float) -> None:
    text = " ".join(f.text for f in fixes("dying-tile", module="m", operand="input", eps=eps))
    assert ("AMAX_EPS" in text) is (eps == 0)


@pytest.mark.parametrize(
    ("backend", "word"),
    [
        ("transformer_engine", "use_split_accumulator"),
        ("torchao", "use_fast_accum=False"),
        ("own forward", "torch._scaled_mm"),
    ],
)
def test_the_accumulator_is_set_where_the_framework_reads_it(backend: str, word: str) -> None:
    assert word in fixes("accumulator-precision", module="m", operand="input", backend=backend)[0].text
    changed = {"changes": [("eps", 1, 0, "the recomputation")]}
    told = fixes("recipe-mismatch", backend=backend, extra=changed)[0].text
    assert ("te.checkpoint" in told) is (backend == "transformer_engine")
