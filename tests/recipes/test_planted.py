"""The bugs that the tests of this room were seen to find."""

from __future__ import annotations

import pytest
from support.planted import Bug, all_fit, seen_to_fail

T = "tests/recipes"
KEPT = f"{T}/test_kept_for_backward.py"
HIGH = f"{T}/test_high_precision.py"
ROWS = f"{T}/test_rowwise.py"
FOUR = f"{T}/test_nvfp4.py"
GEMMS = f"{T}/test_gemms.py"
ASKED = f"{T}/test_declared.py"
CHOICE = "tests/scaled_mm/test_gemm_choice.py"
FOREIGN = "tests/attach/test_foreign_fp8.py"
FIXES = "tests/incidents/test_playbook.py"
COMPARED = "tests/diagnose/test_compare.py::test_where_fp8_explains_it_the_switches_come_in_the_order_to_try"
BUGS = [
    Bug("codes are kept for backward", "saved_operands:quantize_for_backward",
        "if later and not torch.compiler.is_compiling() and not kept.numel():", "if later and now:",
        f"{KEPT}::test_a_linear_keeps_no_more_bytes_than_in_bfloat16"),
    Bug("a column has its own scale", "fp8watch/kernels/cpu_source/dequantize.h",
        "(each ? load_f(scale_inv + i) : splat_f(*scale_inv))", "splat_f(*scale_inv)",
        f"{KEPT}::test_dequantised_again_every_code_has_its_bits"),
    Bug("a GEMM in high precision reads the operand", "fp8_linear:_Fp8Linear.backward",
        "grad_MN.mm(weight.to(grad_MN.dtype))", "grad_MN.mm(weight.half().to(grad_MN.dtype))",
        f"{HIGH}::test_its_gemms_are_those_of_the_plain_linear"),
    Bug("a backward in high precision is noted", "fp8_linear:_Fp8Linear.backward",
        "observe(grad_MN, site, GRAD_OUTPUT, False, False)", "pass",
        f"{HIGH}::test_steps_end_by_themselves_whatever_is_in_high_precision"),
    Bug("a GEMM is in FP8 where both operands are", "spec:Recipe.gemms",
        "(all(self.operand(o)", "(any(self.operand(o)", f"{HIGH}::test_its_gemms_are_those_of_the_plain_linear"),
    Bug("what no GEMM reads quantised has no site", "site_quantizer:places",
        "if in_fp8[place.gemm]", "if place", f"{HIGH}::test_observed_it_has_no_site_and_changes_nothing"),
    Bug("a GPU that cannot multiply codes is left alone", "gemm_choice:choose_gemm",
        'GemmChoice("observe", observe(recipe), reason)', 'GemmChoice("emulated", recipe, reason)',
        "tests/scaled_mm/test_gemm_choice.py::test_elsewhere_on_a_gpu_it_is_observed_with_the_reason"),
    Bug("sizes that are no multiples of 16 are taken", "module_filter:select_linears",
        "min(module.in_features, module.out_features) < NARROWEST", "(module.in_features % 16 or module.out_features % 16)",
        "tests/attach/test_linear.py::test_sizes_that_are_no_multiples_of_anything_are_observed_and_computed"),
    Bug("a product of codes is padded to whole sixteens", "fp8watch/kernels/scaled_mm.py", "-columns % MULTIPLE", "0",
        "tests/scaled_mm/test_gemms.py::test_equal_the_emulated_gemms"),
    Bug("a lightened row takes its gain along", "window_merge",
        "Measured.DEPTH | WITH_ENERGIES", "Measured.DEPTH",
        "tests/attach/test_window_merge.py::test_after_a_jump_the_sites_that_jumped_send_all_and_the_others_do_not"),
    Bug("a scale of a row is divided in float64", "rowwise:scale_of_rows",
        ".to(torch.float64)", "", f"{ROWS}::test_codes_and_scales_are_torchaos"),
    # NVFP4
    Bug("a block has a scale in E4M3", "fp8watch/quantize/nvfp4.py", ".clamp_(max=LARGEST_SCALE).to(torch.float8_e4m3fn)",
        ".clamp_(max=LARGEST_SCALE).to(torch.bfloat16)", f"{FOUR}::test_equals_the_oracle"),
    Bug("a sixth is multiplied into the scale of the tensor first", "fp8watch/quantize/nvfp4.py",
        "(of_block * (encode * sixth))", "(of_block * sixth * encode)", f"{FOUR}::test_equals_the_oracle"),
    Bug("an Inf leaves the scale of the tensor 1", "fp8watch/quantize/nvfp4.py", "encode.masked_fill(encode == 0, 1.0)", "encode",
        f"{FOUR}::test_equals_the_oracle"),
    Bug("a block whose scale is 0 is lost", "fp8watch/quantize/nvfp4.py", "masked_fill(reference.spread(self.lost), 0.0)", "clone()",
        f"{FOUR}::test_a_block_far_below_the_tensor_is_lost_and_counts_as_underflow"),
    Bug("the transform has Transformer Engine's signs", "fp8watch/quantize/nvfp4.py", "SIGNS = (1, 1, 1, -1,", "SIGNS = (1, 1, 1, 1,",
        f"{FOUR}::test_the_transform_is_orthonormal_and_drops_out_of_a_product"),
    Bug("rows that are left over skip the transform", "quantize.nvfp4:rotated", "torch.cat((turned, x[whole:].detach()))",
        "torch.cat((turned, 0 * x[whole:].detach()))", f"{FOUR}::test_the_transform_is_orthonormal_and_drops_out_of_a_product"),
    Bug("gradients are right in expectation", "fp8watch/quantize/nvfp4.py", "add_(reference.tiled(noise, tile))",
        "add_(reference.tiled(noise * 0.8, tile))", f"{FOUR}::test_gradients_are_right_in_expectation_and_one_step_away_at_most"),
    Bug("noise is of all bits of the operand", "quantize.nvfp4:noise_of", "bits.sum(dtype=torch.int64)", "bits[0, 0].to(torch.int64)",
        f"{FOUR}::test_noise_is_of_the_operand_alone"),
    Bug("torch's generator is the training's", "quantize.nvfp4:noise_of", "    bits = x.view(", "    return torch.rand(x.shape)\n    bits = x.view(",
        f"{FOUR}::test_noise_is_of_the_operand_alone"),
    Bug("wgrad reads gradients after the transform", "site_quantizer:Nvfp4Quantizer.as_cast", "if self.columnwise and", "if not self.columnwise and",
        f"{GEMMS}::test_nvfp4"),
    Bug("clips are counted of finite operands", "reference_stats:_plain_counts", "if operand.saturated is not None:", "if False:",
        f"{FOUR}::test_clips_are_counted_where_the_scale_of_a_block_is_rounded_down_far"),
    Bug("one operand alone does not go through the transform", "recipe.spec:_check_transform",
        'turned["input"] != turned["grad_output"]', "False", f"{FOUR}::test_what_cannot_be_meant_is_refused"),
    Bug("an accelerator that was made is asked before the environment", "declared:_of_accelerate",
        'str(held.get("_mixed_precision", "")) == "fp8"', 'str(held.get("_mixed_precision", "")) == "no"',
        f"{ASKED}::test_each_way_to_ask_is_read"),
    Bug("a flag with false asks for nothing", "declared:_of_argv",
        "and value.lower() not in _NO", "", f"{ASKED}::test_what_asks_for_none_is_not_taken_for_it"),
    Bug("a configuration file behind a flag is searched", "declared:_of_argv",
        'word if not flag.startswith("-") else value', "word",
        f"{ASKED}::test_a_configuration_file_on_the_command_line_is_searched"),
    Bug("FP8 that was asked for and is not there is said", "declared:not_active",
        "if not asked:", "if True:", f"{ASKED}::test_attach_says_it_and_the_run_has_a_warning"),
    Bug("a model that computes in FP8 is not warned of", "attach:attach",
        "if computing is None:", "if True:", f"{ASKED}::test_a_model_that_computes_in_fp8_is_not_warned_of_and_has_its_own_flags"),
    Bug("weights that the trainer keeps in FP8 come first", "verdict:switches",
        'out.insert(0, "--fp8-param-gather', 'out.append("--fp8-param-gather', COMPARED),
    # how GEMMs are computed where nobody says it
    Bug("on Hopper codes are multiplied unasked", "gemm_choice:choose_gemm",
        "if reason is None:\n        return", 'if reason is None and asked != "auto":\n        return',
        f"{CHOICE}::test_on_hopper_codes_are_multiplied"),
    Bug("a CPU emulates what is asked for", "gemm_choice:choose_gemm", 'device.type == "cpu" or ', "",
        f"{CHOICE}::test_on_a_cpu_it_is_emulated"),
    Bug("codes are multiplied where the product has their tiles", "gemm_choice:_refused", "!= scaled_mm.TILES", "== ()",
        f"{CHOICE}::test_tiles_that_the_product_does_not_have_leave_the_model_alone"),
    Bug("that nothing is in FP8 is told with its reason", "attach_line:attach_line", "if by.reason is not None:", "if False:",
        f"{CHOICE}::test_attach_leaves_a_model_alone_where_codes_cannot_be_multiplied"),
    Bug("that codes are multiplied is told", "attach_line:attach_line", 'if by.how == "scaled_mm"', 'if by.how == ""',
        f"{CHOICE}::test_attach_multiplies_codes_on_hopper_and_says_so"),
    # what is in FP8 already is left as it is
    Bug("a model in FP8 is not converted unasked", "attach:attach", "asked if foreign is None else", "asked if True else",
        f"{FOREIGN}::test_its_linears_are_left_in_the_numerics_they_have"),
    Bug("a recipe that is asked for converts", "attach:attach", "computing if asked is None else None", "computing",
        f"{FOREIGN}::test_a_recipe_that_is_asked_for_converts_them"),
    Bug("parameters kept in FP8 tell of a model in FP8", "foreign_fp8:_tensor",
        'return dtype if dtype.startswith("float8") else None', "return None",
        f"{FOREIGN}::test_its_linears_are_left_in_the_numerics_they_have"),
    Bug("a wrapped parameter tells of a model in FP8", "foreign_fp8:_tensor",
        "type(part).__module__.startswith(_WRAPPERS)", "False",
        f"{FOREIGN}::test_its_linears_are_left_in_the_numerics_they_have"),
    # what is to be set, by the framework that reads it
    Bug("NVIDIA's Transformer Engine has attributes, not variables", "remedies:set_to", "if backend == STOCK:", "if False:",
        f"{FIXES}::test_eps_is_set_where_the_framework_of_the_site_reads_it"),
    Bug("torchao has its own configuration", "switches:_one", "{TORCHAO: torchao, OWN_FORWARD: own}", "{OWN_FORWARD: own}",
        f"{FIXES}::test_what_torchao_or_a_module_of_its_own_casts_is_told_no_switch_of_others"),
    Bug("where fp8watch computes no flag of a trainer is told", "switches:_one", "if backend in _OF_TE:", "if True:",
        f"{FIXES}::test_where_fp8watch_computes_no_flag_of_a_trainer_is_told"),
    Bug("LoongForge's Transformer Engine is known by its text", "framework:transformer_engine",
        'LOONGFORGE if "FP8_QUANT_FWD_INP_AMAX_EPS" in text else STOCK', "STOCK",
        "tests/recipes/test_environment.py::test_loongforges_transformer_engine_reads_the_variables_of_operands"),
    Bug("LoongForge's Transformer Engine is known by its trainer", "framework:transformer_engine",
        'if "loongforge" in sys.modules:', "if False:",
        "tests/recipes/test_environment.py::test_loongforges_transformer_engine_reads_the_variables_of_operands"),
    Bug("an interval without effect is said", "recipe.foreign", "not in (1, -1, None):", "is None:",
        f"{ASKED}::test_an_interval_is_declared_and_not_effective"),
    Bug("a variable that Transformer Engine does not follow is said", "recipe.build:blockwise",
        "notes = list(set_too_late(env, scaling))", "notes: list[str] = []",
        "tests/recipes/test_environment.py::test_a_variable_set_after_transformer_engine_was_imported_is_said_to_be_without_effect"),
    # by operand
    Bug("each operand has its own format", "recipe.build:blockwise", "power_2, eps)\n    return", 'power_2, eps)\n    made["input"] = OperandRecipe(made["input"].tile, "E4M3")\n    return',
        f"{HIGH}::test_formats_are_free_by_operand"),
    Bug("switches are for what FP8 explains", "verdict:judge",
        'param_gather=param_gather) if kind == "fp8" else ()', "param_gather=param_gather)", COMPARED),
]  # fmt: skip


def test_each_bug_still_fits_the_code() -> None:
    all_fit(BUGS)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_each_bug_is_seen(bug: Bug, tree) -> None:
    seen_to_fail(tree, bug)
