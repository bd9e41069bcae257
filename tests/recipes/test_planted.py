"""The bugs that the tests of this room were seen to find."""

from __future__ import annotations

import pytest
from support.planted import Bug, all_fit, seen_to_fail

T = "tests/recipes"
KEPT = f"{T}/test_kept_for_backward.py"
HIGH = f"{T}/test_high_precision.py"
ROWS = f"{T}/test_rowwise.py"
ASKED = f"{T}/test_declared.py"
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
    Bug("a GEMM is in FP8 where both operands are", "spec:Recipe.gemms",
        "(all(self.operand(o)", "(any(self.operand(o)", f"{HIGH}::test_its_gemms_are_those_of_the_plain_linear"),
    Bug("what no GEMM reads quantised has no site", "site_quantizer:places",
        "if in_fp8[place.gemm]", "if place", f"{HIGH}::test_observed_it_has_no_site_and_changes_nothing"),
    Bug("a GPU that cannot multiply codes is left alone", "gemm_choice:choose_gemm",
        'GemmChoice("observe", observe(recipe), reason)', 'GemmChoice("emulated", recipe, reason)',
        "tests/scaled_mm/test_gemm_choice.py::test_elsewhere_on_a_gpu_it_is_observed_with_the_reason"),
    Bug("a lightened row takes its gain along", "window_merge",
        "Measured.DEPTH | WITH_ENERGIES", "Measured.DEPTH",
        "tests/attach/test_window_merge.py::test_after_a_jump_the_sites_that_jumped_send_all_and_the_others_do_not"),
    Bug("a scale of a row is divided in float64", "rowwise:scale_of_rows",
        ".to(torch.float64)", "", f"{ROWS}::test_codes_and_scales_are_torchaos"),
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
