"""The bugs that the tests of this room were seen to find."""

from __future__ import annotations

import pytest
from diagnose.bugs_checkpoints import BISECT_BUGS, CHECKPOINT_BUGS, FIX_BUGS
from diagnose.bugs_commands import COMMAND_BUGS
from support.planted import Bug, all_fit, seen_to_fail

T = "tests/diagnose"
IMPACT = f"{T}/test_loss_impact.py"
FORMATS = f"{T}/test_formats.py"
WHAT_IF = f"{T}/test_what_if.py"
MOMENTS = f"{T}/test_moments.py"
COLLECTIVES = f"{T}/test_collectives.py"
COMPARE = f"{T}/test_compare.py"
COMMANDS = f"{T}/test_commands.py"
CALIBRATE = f"{T}/test_calibrate.py"
BUGS = [
    Bug("an impact has the size and sign of what the loss does", "loss_impact:ImpactSums.add",
        "(grad_MN.double() * error).sum(1)", "(grad_MN.double() * y).sum(1)",
        f"{IMPACT}::test_of_a_loss_that_is_linear_in_the_output_the_impact_is_exact"),
    Bug("an error of the gradient is projected on what the update follows", "backward_impact:Stepper.__init__",
        "(n - u) / share", "u",
        f"{IMPACT}::test_backward_gemms_cost_what_a_step_with_them_shows"),
    Bug("delayed scales of an attached model are asked about", "loss_impact:loss_impact",
        "delayed_scales(inner) if attached else None", "None",
        f"{IMPACT}::test_an_attached_models_own_scales_are_asked_about"),
    Bug("parameters are put back after a step", "backward_impact:Stepper._back",
        "p.copy_(before)", "p.copy_(p)", f"{IMPACT}::test_backward_gemms_cost_what_a_step_with_them_shows"),
    Bug("MX exponents are rounded down where the format says so", "readers:MxFloorReader.see",
        "- 127 - self._max_exponent", "- 126 - self._max_exponent", f"{FORMATS}::test_mxfp8_and_nvfp4_are_torchaos"),
    Bug("a block of NVFP4 has an E4M3 scale", "diagnose.nvfp4:quantize_nvfp4",
        ".to(torch.float8_e4m3fn).float()", "", f"{FORMATS}::test_mxfp8_and_nvfp4_are_torchaos"),
    Bug("of two numbers as near the even one is taken", "number_grid:Grid.round",
        "torch.round(scaled)", "torch.floor(scaled + 0.5)",
        f"{FORMATS}::test_rounding_takes_the_nearest_number_and_of_two_the_even_one"),
    Bug("a delayed scale keeps its margin", "readers:RecipeReader.note",
        "self.recipe.history or AmaxHistory()", "AmaxHistory()",
        f"{FORMATS}::test_a_delayed_scale_follows_the_passes_before_with_margin_and_history"),
    Bug("bounds hold what a power-of-two scale may be", "depth_what_if:_bounds",
        "(1.0 if f.power_2_scale else 0.0)", "0.0",
        f"{WHAT_IF}::test_a_stored_sketch_bounds_what_another_format_would_flush"),
    Bug("a module that the recipe keeps is not converted", "attach:attach",
        "kept=chosen.high_precision_modules", "kept=()",
        f"{CALIBRATE}::test_a_single_bad_layer_stays_in_high_precision_and_attach_reads_that_back"),
    Bug("a loss that is not finite is not calibrated", "calibrate:_Seen.step", "if not math.isfinite(loss):", "if False:",
        f"{CALIBRATE}::test_a_loss_that_is_not_finite_is_refused"),
    Bug("an operand that is not finite is served by no recipe", "calibrate:_Seen._why", "if steps := self.nonfinite.get((module, operand)):",
        "if steps := 0:", f"{CALIBRATE}::test_an_operand_that_is_not_finite_is_served_by_no_recipe"),
    Bug("what was not measured is not fine", "calibrate:_Seen._why", "if math.isnan(sqnr) and max(", "if False and max(",
        f"{CALIBRATE}::test_what_was_not_measured_is_not_fine"),
    Bug("an operand of zeros loses nothing", "calibrate:_Seen._why", " and max(self.amax[module, operand]) > 0", "",
        f"{CALIBRATE}::test_an_operand_of_zeros_loses_nothing"),
    Bug("an unknown key of a recipe file is refused", "fp8watch.recipe.file:_known",
        "    if unknown:", "    if unknown and False:",
        f"{CALIBRATE}::test_a_file_that_cannot_be_meant_is_refused_by_name"),
    Bug("moments are rounded behind every step", "moments:_Run.step", "moment.copy_(rounded)", "pass",
        f"{MOMENTS}::test_drift_is_that_of_a_training_with_moments_in_bf16_and_nothing_of_the_callers_changes"),
    Bug("a moment that does not move is counted", "moments:_Counts.add", "moved & (rounded == before)", "moved & (rounded != rounded)",
        f"{MOMENTS}::test_what_is_flushed_and_what_does_not_move_is_counted"),
    Bug("a partial sum is rounded to what is sent", "collectives:_reduced", "total = f.round(raw)", "total = raw",
        f"{COLLECTIVES}::test_a_sum_in_bf16_is_that_of_ranks_which_add_one_after_the_other_and_nothing_of_the_callers_changes"),
    Bug("a scale leaves room for the sum", "collectives:_scale", "(len(g) if f.reserve else 1)", "1",
        f"{COLLECTIVES}::test_without_room_for_the_sum_it_clips_and_with_it_small_gradients_are_flushed"),
    Bug("losses that may be negative are not held against the first", "verdict:_rise",
        "if got[0] > 0 and min(got) >= 0:\n        ratio = max(got) / got[0]", "if True:\n        ratio = max(got) / max(got[0], 1e-12)",
        f"{COMPARE}::test_losses_that_cross_zero_are_not_held_against_the_first_of_them"),
    Bug("a loss next to zero is not held against itself", "verdict:_usual", "median(map(abs, high)) if", "0.0 if",
        f"{COMPARE}::test_losses_that_cross_zero_are_not_held_against_the_first_of_them"),
    Bug("losses that may be negative rise as well", "verdict:_rise", "RISE_OF_SIGNED * spread > 0", "math.inf",
        f"{COMPARE}::test_losses_that_cross_zero_and_explode_in_both_are_shared_however_far_apart"),
    Bug("a picture that cannot be written is told before anything is computed", "diagnose.command:main",
        "        check_files(args)\n", "", f"{COMMANDS}::test_what_cannot_work_is_said_in_one_line"),
    Bug("a sum without noise is JSON", "collectives:CollectivesWhatIf.as_json", "as_plain(asdict(self))", "asdict(self)",
        f"{COLLECTIVES}::test_the_command_says_it_as_a_table_as_json_and_as_a_picture"),
    Bug("moments that break are JSON", "moments:MomentsWhatIf.as_json", "as_plain(asdict(self))", "asdict(self)",
        f"{MOMENTS}::test_a_training_that_breaks_in_a_format_is_json_all_the_same"),
    *CHECKPOINT_BUGS,
    *BISECT_BUGS,
    *FIX_BUGS,
    *COMMAND_BUGS,
]  # fmt: skip


def test_each_bug_still_fits_the_code() -> None:
    all_fit(BUGS)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_each_bug_is_seen(bug: Bug, tree) -> None:
    seen_to_fail(tree, bug)
