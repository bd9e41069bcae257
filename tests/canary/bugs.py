"""What is broken on purpose in the canary, and the test that sees it."""

from __future__ import annotations

from planted import Bug

T = "tests/canary"
FAULTS = f"{T}/test_public_kernel_faults.py"
HOLDS = f"{T}/test_self_consistency.py"
TURNS = f"{T}/test_turns.py"
OWN = f"{T}/test_own_forward.py"

BUGS = [
    Bug("what a GEMM reads is held against the operand", "custom_ops:run_operand",
        "if count and first in plan.canary.turn:", "if False:", f"{FAULTS}::test_a_broken_quantiser_is_named_at_its_site"),
    Bug("a GEMM has its turn", "custom_ops:_look_at_output",
        "if factors and (first in plan.canary.turn or first in plan.canary.forced):",
        "if factors and first in plan.canary.forced:", f"{FAULTS}::test_rows_that_nobody_wrote_are_the_kernels"),
    Bug("a tile of zeros is a fault above the flush limit", "self_consistency:check_quantiser",
        "(code_TE == 0).all(1)", "(code_TE == 1).all(1)", f"{HOLDS}::test_each_way_to_be_wrong_has_its_count"),
    Bug("half a step is the limit", "self_consistency:_half_step",
        "(_MANTISSA_BITS[fmt.name] + 1)", "_MANTISSA_BITS[fmt.name] + size * 0.1",
        f"{HOLDS}::test_a_code_that_is_the_next_one_is_off_the_grid"),
    Bug("scale_inv is what the amax gives", "self_consistency:check_quantiser",
        "wrong_scale = judged & _wrong_scales(reads, shape, at, scale_T)", "wrong_scale = judged & False",
        f"{HOLDS}::test_a_scale_one_octave_off_is_wrong_in_both_forms"),
    Bug("an eps is part of the formula", "self_consistency:_scale",
        "amax.clamp_min(spec.eps)", "amax", f"{HOLDS}::test_an_eps_is_part_of_the_formula"),
    Bug("the tile of the largest noise is looked at", "self_consistency:_sampled",
        "if near is None:", "if True:", f"{HOLDS}::test_the_tile_that_is_named_is_looked_at"),
    Bug("turns keep to their share of the time", "canary:Canary.begin_step",
        "self._since + (self.spent_s / self.share if self.share > 0 else math.inf)", "0.0",
        f"{TURNS}::test_then_one_after_the_other_within_its_share_of_the_time"),
    Bug("what happens gives each a turn", "canary:Canary.follow",
        "if full_until > self.followed:", "if False:", f"{TURNS}::test_what_happens_gives_each_a_turn_again"),
    Bug("an uncalled module keeps nobody waiting", "canary:Canary.begin_step",
        "and self._tries < MAX_TRIES", "", f"{TURNS}::test_a_module_that_is_not_called_does_not_keep_the_others_waiting"),
    Bug("a look that was not taken is absent", "slab:Slab.count_outputs",
        "int(Measured.OUTPUTS)", "int(Measured.GEMM)",
        f"{TURNS}::test_an_output_that_is_not_finite_claims_no_error_of_a_gemm"),
    Bug("the ends of an output are among what is sampled", "shadow_gemm:_index",
        "found = sorted({0, size - 1, *found[1:-1]})", "found = [i for i in found if i < size // 2] or found",
        f"{FAULTS}::test_rows_that_nobody_wrote_are_the_kernels"),
    Bug("an output that is no product is no accumulator's", "kernel_output:wrong_outputs",
        "scaled |= has & (error > limit.gemm_wrong)", "pass",
        f"{FAULTS}::test_rows_that_nobody_wrote_are_the_kernels "
        "tests/detect/test_modes.py::test_an_output_off_by_more_than_any_accumulator_is_the_kernels"),
    Bug("check-gemm fails where a GEMM is wrong", "gemm_conformance:check_gemms",
        "abs(gain - 1) <= GEMM_GAIN and not bad", "not bad",
        f"{T}/test_check_gemm.py::test_a_gain_alone_fails"),
    Bug("a foreign GEMM has its turn", "foreign_turn:begin_turn",
        "if first not in canary.turn and first not in canary.forced:", "if first not in canary.forced:",
        f"{OWN}::test_a_public_fault_inside_of_it_is_named_in_its_turn"),
    Bug("what a cast to its format loses is allowed", "shadow_gemm:check_gemm",
        "fine |= lost <= noise.square().sum() * allow.times**2", "pass",
        f"{OWN}::test_it_computes_as_before_and_nothing_is_raised"),
    Bug("the gradient of a weight that calls share is no product", "foreign_turn:Turn.saw_wgrad",
        "if not self.shared:", "if True:", f"{OWN}::test_a_weight_that_two_calls_share_is_no_fault"),
    Bug("a switch says whether a module is in FP8", "own_forward:computes_in_fp8",
        "return any(said) if said else", "return", f"{OWN}::test_what_computes_in_fp8_is_told_from_what_does_not"),
    Bug("others with a forward of their own are held to nothing", "site_placement:put_on_site",
        "if foreign is not None:", "foreign = foreign or Foreign('', ('E4M3', 'E4M3', 'E5M2'))\n    if True:",
        f"{OWN}::test_others_with_a_forward_of_their_own_are_observed_and_held_to_nothing"),
    Bug("without tokens a weight gradient is zero", "shadow_gemm:hold_against_shadow",
        "not output.numel():", "not (output.numel() and first.numel()):",
        f"{FAULTS}::test_the_weight_gradient_of_an_expert_without_tokens_is_zero"),
    Bug("a module that was replaced is observed again", "replaced_modules:ReplacedModules.look",
        "put_on_site(plan, row, module, in_fp8)", "pass", f"{OWN}::test_what_replaces_a_linear_after_attach_is_observed"),
]  # fmt: skip
