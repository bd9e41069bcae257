"""What is broken on purpose in how overflows, loss jumps and their words are told, and the test that sees it."""

from __future__ import annotations

from support.planted import Bug

T = "tests/detect"
FIXES = "tests/incidents/test_playbook.py"

OVERFLOWS = [
    Bug(
        "a step that overflowed is asked for its loss scale",
        "scale_collapse.overflows:Overflows.cut_off",
        "return self._judge(now, limit)",
        "return []",
        f"{T}/test_overflows.py::test_a_scale_that_falls_with_each_step_is_told_though_each_step_is_skipped",
    ),
    Bug(
        "steps that are skipped for ever are critical",
        "scale_collapse.overflows:Overflows._judge",
        "self._num_skipped + 1 if skipped",
        "1 if skipped",
        f"{T}/test_overflows.py::test_steps_that_are_skipped_for_ever_are_critical",
    ),
    Bug(
        "a search for a loss scale may take longer",
        "scale_collapse.overflows:Overflows._judge",
        "(1 if self._warm else SEARCH)",
        "1",
        f"{T}/test_overflows.py::test_a_search_that_does_not_end_is_told",
    ),
    Bug(
        "a scale that fell by octaves was halved as often",
        "scale_collapse.overflows:Overflows._follow",
        "max(1, round(math.log2(last / scale)))",
        "1",
        f"{T}/test_overflows.py::test_halvings_between_two_looks_are_all_counted",
    ),
    Bug(
        "an overflow of an engine that does not say its scale is no page",
        "nonfinite:_overflowed",
        "gradients if overflow else",
        "gradients & False if overflow else",
        f"{T}/test_overflows.py::test_an_engine_that_skips_and_does_not_say_its_scale_is_information",
    ),
    Bug(
        "a product that overflows is no fault of its kernel",
        "nonfinite:examine",
        "output_mask & ~overflowed",
        "output_mask",
        f"{T}/test_overflows.py::test_a_product_that_overflows_is_no_fault_of_its_kernel",
    ),
    Bug(
        "a loss that was not back warns where gradients stay larger",
        "jump_told:_norm_stays",
        "> limit.grad_norm_jump * jump.usual_grad_norm",
        "> 100 * limit.grad_norm_jump * jump.usual_grad_norm",
        f"{T}/test_loss_stays.py::test_a_spike_that_takes_a_hundred_steps_is_a_warning_and_no_claim_about_data",
    ),
    Bug(
        "gradients that are as ever make a jump information",
        "jump_told:_may_diverge",
        "return stays if stays is not None else",
        "return True if stays is not None else",
        f"{T}/test_loss_stays.py::test_another_domain_whose_gradients_are_as_ever_is_information",
    ),
    Bug(
        "a loss that never comes back is a page",
        "loss_stays:StaysUp.observe",
        "grave = jump.num >= LONG and",
        "grave = False and",
        f"{T}/test_loss_stays.py::test_a_loss_that_never_comes_back_is_critical_after_fifty_steps",
    ),
    Bug(
        "a jump with inputs that moved is told where it does not come back",
        "jump_told:finding",
        "if back and lr is None",
        "if lr is None",
        f"{T}/test_loss_stays.py::test_a_jump_whose_inputs_moved_behind_the_first_gemm_is_told",
    ),
    Bug(
        "gradients that lost their bits leave fp8 open",
        "loss_jump:LossJumps.observe",
        "if lost and",
        "if False and",
        f"{T}/test_loss_stays.py::test_gradients_that_lost_their_bits_before_the_jump_leave_fp8_open",
    ),
    Bug(
        "losses under zero are held against those of before",
        "jump_told:_odd",
        "BRIEF_RATIO * jump.scatter",
        "0.0",
        f"{T}/test_loss_stays.py::test_losses_around_zero_have_odd_batches_too",
    ),
    Bug(
        "blockwise is advised with its format",
        "switches",
        'BLOCKWISE = "--fp8-recipe blockwise --fp8-format e4m3"',
        'BLOCKWISE = "--fp8-recipe blockwise"',
        f"{FIXES}::test_flags_that_are_advised_belong_together_and_are_not_set_already",
    ),
    Bug(
        "fp32 scales are of block scaling alone",
        "switches:fp32_scales",
        'if p.recipe in ("", "blockwise") else []',
        "",
        f"{FIXES}::test_fp32_scales_are_advised_where_block_scales_are_rounded",
    ),
    Bug(
        "a filter of torchao keeps the one before",
        "switches:leave_out",
        " and {OWN_FILTER})",
        ")",
        f"{FIXES}::test_a_config_of_torchao_is_never_made_anew_for_one_field",
    ),
    Bug(
        "four bits are advised eight",
        "switches:finer",
        'if p.recipe == "nvfp4" or p.format == "E2M1":',
        "if False:",
        f"{FIXES}::test_four_bits_are_advised_eight_and_no_coarser_tile",
    ),
    Bug(
        "a tile that an eps guards is told no eps",
        "dying_tile.words:fixes",
        "if p.eps >= GUARD or",
        "if",
        f"{FIXES}::test_a_dying_tile_that_an_eps_guards_is_told_no_eps",
    ),
    Bug(
        "an Inf under delayed scaling is in the history",
        "inf_laundering.words:words",
        "_OTHERWISE.get(s.recipe)",
        "_OTHERWISE.get(s.recipe * 2)",
        f"{T}/test_words_by_recipe.py::test_what_becomes_of_an_inf_is_what_the_recipe_does",
    ),
    Bug(
        "noise that came little by little was not there from the first step",
        "chronic_quantization_noise.detector:Noise._finding",
        "<= SOUND_AT_FIRST",
        ">= 0",
        f"{T}/test_words_by_recipe.py::test_noise_that_came_little_by_little_was_not_there_from_the_first_step",
    ),
    Bug(
        "few looks at high logits are no growth",
        "families.attention_logits:AttentionLogits._is_over",
        " or not known)",
        ")",
        f"{T}/test_attention_logits.py::test_few_looks_at_what_was_above_the_limit_all_along_are_no_growth",
    ),
]
