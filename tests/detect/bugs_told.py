"""What is broken on purpose in what is told under the name of its cause."""

from __future__ import annotations

from support.planted import Bug

TOLD = "tests/detect/test_told_by_its_cause.py"
PLACE = "tests/incidents/test_at_its_place.py"
APART = "tests/detect/test_kept_apart.py"

TOLD_BY_CAUSE = [
    Bug(
        "an LR that climbs out of its range is followed",
        "lr_schedule:Schedule._climbed",
        "            if lr <= LR_JUMP * peak:\n",
        "            if lr <= 99 * LR_JUMP * peak:\n",
        f"{TOLD}::test_an_lr_that_climbs_out_of_its_range_is_a_jump_from_its_first_step_beyond_it",
    ),
    Bug(
        "a warm-up to where the LR was is no climb",
        "lr_schedule:Schedule._climbed",
        "        if peak is None or lr <= peak:\n",
        "        peak = self.usual_lr\n        if peak is None or lr <= peak:\n",
        f"{TOLD}::test_a_warm_up_to_where_it_was_and_one_from_nothing_are_no_climb",
    ),
    Bug(
        "logits that follow the LR are the optimizer's",
        "families.attention_logits:AttentionLogits._finding",
        "        risen = ctx.schedule.risen(since)\n",
        "        risen = None\n",
        f"{TOLD}::test_logits_that_grow_when_the_lr_has_left_its_range_are_the_optimizers",
    ),
    Bug(
        "an LR that leaped long before explains no logits",
        "lr_schedule:Schedule.risen",
        "step <= self.risen_step + AFTER_RISE_STEPS",
        "step <= self.risen_step + 99 * AFTER_RISE_STEPS",
        f"{TOLD}::test_logits_that_grow_long_after_the_lr_leaped_are_told_by_themselves",
    ),
    Bug(
        "logits that grow again after one leap are no news",
        "families.attention_logits:AttentionLogits._finding",
        "goes_on, self._told = self._told == at, at",
        "goes_on, self._told = False, at",
        f"{TOLD}::test_logits_that_grow_again_after_one_leap_of_the_lr_open_nothing_new",
    ),
    Bug(
        "a diverging optimizer explains a weight that leaps",
        "precedence:explains",
        '        return root == "optimizer-divergence" or "silent-data-corruption"',
        '        return "silent-data-corruption"',
        f"{TOLD}::test_a_weight_that_leaps_under_moments_that_are_wrong_is_no_flipped_bit",
    ),
    Bug(
        "second moments that stay wrong are told on",
        "optimizer_state:OptimizerState._zeros",
        "        goes_on = last >= 0 and ctx.now.step - last < REPEAT_STEPS\n",
        "        goes_on = last >= 0 and ctx.now.step - last < REPEAT_STEPS\n        if goes_on:\n            return []\n",
        f"{TOLD}::test_second_moments_that_stay_wrong_keep_their_incident_open",
    ),
    Bug(
        "a weight that leaped into the step that broke was there first",
        "families.corruption:Corruption.cut_off",
        "        first = self._was_there_first(now, limit)\n",
        "        first = None\n",
        f"{TOLD}::test_a_weight_that_leaped_is_told_in_the_step_that_it_breaks",
    ),
    Bug(
        "a weight that leaps behind broken values is theirs",
        "families.corruption:Corruption.cut_off",
        "        self._blind = True\n",
        "",
        f"{TOLD}::test_a_weight_that_leaps_behind_values_that_broke_before_is_their_consequence",
    ),
    Bug(
        "weights that shrink together are told",
        "shrinking:Shrinking.observe",
        '(("weights", ctx.weights()), ("inputs", ctx.inputs()))',
        '(("inputs", ctx.inputs()),)',
        f"{TOLD}::test_weights_that_lose_a_share_of_themselves_in_each_step_are_told",
    ),
    Bug(
        "inputs that shrink together are told",
        "shrinking:Shrinking.observe",
        '(("weights", ctx.weights()), ("inputs", ctx.inputs()))',
        '(("weights", ctx.weights()),)',
        f"{TOLD}::test_inputs_that_shrink_together_while_weights_stand_are_told",
    ),
    Bug(
        "what falls at once does not shrink",
        "shrinking",
        "EACH_HALF = 0.25\n",
        "EACH_HALF = -1.0\n",
        f"{TOLD}::test_what_becomes_smaller_at_once_does_not_shrink",
    ),
    Bug(
        "a history that lags in a young model is no noise",
        "chronic_quantization_noise.detector:_lags",
        "(not ctx.warm)",
        "False",
        f"{TOLD}::test_a_history_that_lags_in_a_young_model_is_not_chronic",
    ),
    Bug(
        "a loss that scatters by a factor is held against its factors",
        "loss_jump:LossJumps._begins",
        " or loss - usual <= _of_skewed(ctx.base.loss, usual)",
        "",
        f"{TOLD}::test_a_loss_that_scatters_by_a_factor_has_no_bad_batch",
    ),
    Bug(
        "tiles below the range of a scale say nothing of the quantiser",
        "quantiser_fault.detector:_destroyed",
        ' & (view.raw("amax_min_nonzero") > _LEAST_AMAX)',
        "",
        f"{TOLD}::test_tiles_below_the_range_of_a_scale_are_no_fault_of_the_quantiser",
    ),
    Bug(
        "weights that were loaded otherwise have a place",
        "recipe_mismatch.detector:loaded",
        '{name.removesuffix(".weight") for name',
        "{name for name",
        f"{TOLD}::test_what_was_loaded_otherwise_has_the_place_of_its_weight",
    ),
    Bug(
        "of two that explain each other one is told",
        "statistics:without_consequences",
        " and not _first(f, root)",
        "",
        f"{TOLD}::test_of_two_that_explain_each_other_the_earlier_is_the_cause",
    ),
    Bug(
        "what explains at its place explains nothing elsewhere",
        "match:_at_one_place",
        "    return bool(theirs & mine)\n",
        "    return bool(theirs)\n",
        f"{PLACE}::test_what_names_no_place_follows_no_cause_at_one",
    ),
    Bug(
        "of an attention one projection stands beside the other",
        "match:_at_one_place",
        '({m.rpartition(".")[0] for m in modules} for modules in (theirs, mine))',
        "(theirs, mine)",
        f"{PLACE}::test_logits_follow_a_scale_that_is_wrong_in_their_own_attention_and_in_no_other",
    ),
    Bug(
        "what stays broken keeps its cause open",
        "fold:_mute",
        '        root.row["last_step"] = max(root.row["last_step"], finding.step)\n',
        "        pass\n",
        f"{PLACE}::test_what_was_explained_and_stays_broken_keeps_its_cause_open",
    ),
    Bug(
        "a rare look does not reach back",
        "match:explained_by",
        "window_steps * i.stride",
        "window_steps * max(i.stride, _stride(finding))",
        f"{PLACE}::test_a_fault_that_is_seen_in_rare_samples_does_not_reach_back_over_their_distance",
    ),
    Bug(
        "what fades is named where it comes first",
        "fold:_absorb",
        "_is_upstream(",
        "False and _is_upstream(",
        f"{PLACE}::test_what_fades_is_named_where_it_comes_first_in_data_flow",
    ),
    Bug(
        "no number that breaks makes a loss better",
        "precedence:explains",
        "        return root == FALL\n",
        "        return other in EXPLAINS.get(root, ()) or 'bad-batch' in EXPLAINS.get(root, ())\n",
        f"{APART}::test_a_loss_that_falls_and_a_quantiser_that_breaks_are_two_incidents_each_with_its_step",
    ),
    Bug(
        "of a loss that may be negative no share is told",
        "modes.bad_batch.words:level_words",
        "min(usual, loss) <= 0",
        "usual == 0",
        f"{APART}::test_of_a_loss_that_may_be_negative_no_share_is_told",
    ),
    Bug(
        "what was loaded otherwise explains what follows",
        "finding:Finding.kind",
        "            return LOADED\n",
        "            return self.mode\n",
        f"{APART}::test_what_follows_from_a_load_that_changed_the_model_is_told_under_it",
    ),
    Bug(
        "a small batch warns nobody",
        "families.loss_jump:_finding",
        "(brief or jump.small is not None)",
        "brief",
        f"{APART}::test_a_loss_that_jumps_in_a_small_batch_is_information",
    ),
]
