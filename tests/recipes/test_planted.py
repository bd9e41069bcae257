"""The bugs that the tests of this room were seen to find."""

from __future__ import annotations

import pytest
from planted import Bug, all_fit, seen_to_fail

T = "tests/recipes"
KEPT = f"{T}/test_kept_for_backward.py"
HIGH = f"{T}/test_high_precision.py"
ROWS = f"{T}/test_rowwise.py"
BUGS = [
    Bug("codes are kept for backward", "kept_operands:quantize_for_backward",
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
]  # fmt: skip


def test_each_bug_still_fits_the_code() -> None:
    all_fit(BUGS)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_each_bug_is_seen(bug: Bug, tree) -> None:
    seen_to_fail(tree, bug)
