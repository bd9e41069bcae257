"""Bugs in what looks at gradients that were left or repeated, at what updates did, at rates, and at recomputations."""

from __future__ import annotations

from support.planted import Bug

_T = "tests/attach/test_updates.py::"
_B = "tests/attach/test_batch_facts.py::"
_LEFT = f"{_T}test_gradients_that_nobody_clears_are_told_in_each_such_step"
_NAMED = f"{_T}test_a_gradient_that_is_that_of_the_step_before_is_named_clipped_or_not"
_ROUNDED = f"{_T}test_weights_that_are_rounded_behind_updates_are_told_with_their_bits"
_SHRINK = f"{_T}test_weights_that_all_shrink_are_told_beside_their_decay"
_ROWS = f"{_T}test_updates_of_other_rows_are_named_with_their_tensor"
_RATE = f"{_T}test_a_group_whose_rate_leaps_beside_the_others_is_named_and_a_schedule_of_all_is_not"
_AGAIN = f"{_T}test_a_recomputation_of_other_values_is_named"
_TWICE = f"{_T}test_an_update_that_is_applied_again_is_told_with_the_step_behind_it"
_NOT_TWICE = f"{_T}test_a_second_step_that_is_not_on_the_same_gradients_applies_none_again"
_MEANT = f"{_T}test_what_a_weight_was_to_move_by_is_adams_step_and_its_decay"
_TIMES = f"{_T}test_weights_that_move_further_than_adam_says_are_told_by_how_much"
_STAY = "tests/attach/test_left_on_purpose.py::"
_ASIDE = f"{_STAY}test_gradients_that_are_asked_for_before_others_are_cleared_leave_none"
_NO_HOOK = f"{_STAY}test_no_hook_is_put_where_gradients_are_cleared_and_none_stays"
_OUT = f"{_STAY}test_a_layer_that_was_taken_out_of_an_optimizer_keeps_its_gradient"
_G = "tests/attach/test_gradient_arrival.py::"
_S = "tests/attach/test_gradient_sums.py::"
_C = "tests/attach/test_closures.py::"
_N = "tests/attach/test_nested_steps.py::"
_ONE = f"{_N}test_an_update_of_optimizers_one_inside_the_other_is_one_step"
_P = "tests/attach/test_gradient_shards.py::"
_SHARED = f"{_G}test_gradients_of_several_processes_are_said_as_sketches_in_turns_that_no_clock_paces"
_WAYS = f"{_G}test_what_trainings_do_to_gradients_says_nothing"
_ANOTHER = f"{_G}test_another_gradient_than_backward_gave_is_told_with_its_parameter"
UPDATE_BUGS = [
    Bug("values that are clipped one by one", "gradient_arrival:_apart", "torch.where(rounding | clipped,", "torch.where(rounding,", _WAYS),
    Bug("what micro-batches before have left", "gradient_arrival:_see", "there.clone(), there + now", "there.clone(), now.clone()", _WAYS),
    Bug("what autograd gave went elsewhere", "gradient_arrival:GradientArrival.before", "look.there if look.mark == (gradient.data_ptr(), gradient._version) else look.expected",
        "look.expected", _WAYS),
    Bug("a gradient times a number is the same", "gradient_arrival:_apart", "of_got - (of_got * of_expected).sum() / energy * of_expected", "of_got - of_expected", _WAYS),
    Bug("two bytes round", "gradient_arrival:_apart", "max(LEAST_APART, ROUNDINGS * torch.finfo(dtype).eps)", "LEAST_APART",
        f"{_G}test_micro_batches_in_two_bytes_are_rounded"),
    Bug("a gradient that arrives otherwise", "gradient_arrival:GradientArrival.named", "if not apart > 0 or name not in self._right:", "if True:", _ANOTHER),
    Bug("only the smallest are flushed", "gradient_arrival:_apart", "* smallest", "", _ANOTHER),
    Bug("another one from the first look on", "gradient_arrival:GradientArrival.named", "if not apart > 0 or name not in self._right:", "if not apart > 0:",
        f"{_G}test_what_was_another_one_from_the_first_look_on_is_counted_and_not_named"),
    Bug("most were another one from the first look on", "gradient_arrival:GradientArrival.named", "max(OTHERS, len(self._right))", "OTHERS",
        f"{_G}test_what_was_not_looked_at_before_is_not_said_to_be_so_from_the_start"),
    Bug("each has its first turn soon", "gradient_arrival:GradientArrival.after", "if known.next > len(some):", "if True:",
        f"{_G}test_turns_rest_where_a_look_is_much_beside_a_step"),
    Bug("turns go through a model from one end to the other", "gradient_arrival:_scattered", "i * stride % num", "i",
        f"{_G}test_turns_reach_each_and_neighbours_far_apart"),
    Bug("a turn of several rests longer", "gradient_arrival:GradientArrival.after", "int(num * LOOK_S", "int(LOOK_S", f"{_G}test_a_turn_of_several_rests_longer"),
    Bug("no hook is left between steps", "gradient_arrival:GradientArrival.before", "look.handle.remove()", "",
        f"{_G}test_between_two_steps_no_parameter_has_a_hook_and_numbers_stay"),
    Bug("gradients of several processes", "gradient_arrival:_shared_by", "num if num > 1 else 0", "0", _SHARED),
    Bug("no clock decides when processes say a sketch", "gradient_arrival:GradientArrival.after", "known.rest = STEPS_APART - 1", "known.rest = int(now - last) % 3",
        _SHARED),
    Bug("a sketch of values that were clipped", "gradient_sketch:sketches", "_products(got).where(~clipped, math.nan)", "_products(got)", f"{_S}test_values_that_are_clipped_one_by_one_say_nothing"),
    Bug("a sketch of what is not finite", "gradient_sketch:only_finite", "math.isfinite(numbers[n])", "True", f"{_S}test_sketches_are_linear_and_say_nothing_of_what_is_not_finite"),
    Bug("processes have the same signs", "gradient_sketch:_signs", "manual_seed(SEED)", "manual_seed(__import__('os').getpid())", f"{_S}test_what_is_reduced_adds_up"),
    Bug("a part of a step ends none", "watch:Watch._on_optimizer", "if not is_part and", "if", _ONE),
    Bug("an optimizer around others has no gradients of its own", "optimizer_looks:OptimizerLooks.after", "looks and not parts", "looks", _ONE),
    Bug("weights are moved behind a part's step", "standing_state:StandingState.after", "self._settle(part)", "pass", _ONE),
    Bug("a step that raised is around nothing", "nested_steps:NestedSteps.begins", "if _is_above(frame, s)", "",
        f"{_N}test_a_step_that_raised_is_around_nothing"),
    Bug("moments of a part are looked at", "watch:Watch._on_optimizer", "if (is_part := self._owner.is_part(optimizer, nesting)) or",
        "if not (is_part := self._owner.is_part(optimizer, nesting)) and", f"{_N}test_moments_are_looked_at_where_they_are"),
    Bug("what a closure's backward gave", "step_boundary:_before_optimizer", "or not any(waits):", "or True:", f"{_C}test_a_step_with_a_closure_is_a_step_like_others"),
    Bug("weights that an optimizer moved before it calls its closure", "step_boundary:_is_called_first", " or not has_run", " or True",
        f"{_C}test_a_step_with_a_closure_is_a_step_like_others"),
    Bug("a gradient that is changed behind a closure's backward", "step_boundary:_then_look", "if not looked:", "if False:",
        f"{_C}test_a_gradient_that_is_changed_behind_the_closure_s_backward_is_told"),
    Bug("micro-batches of a gradient that is sharded add up", "gradient_shards:ShardLook._see", "self._given += now", "self._given = now.clone()", f"{_P}test_what_is_scattered_adds_up"),
    Bug("a step that is left out before gradients are sharded", "gradient_shards:ShardLook._see", " or self._shards.is_cleared", "", f"{_P}test_what_is_scattered_adds_up"),
    Bug("gradients that are kept in parts add up over micro-batches", "gradient_shards:Shards.is_cleared", "all(", "any(", f"{_P}test_what_is_scattered_adds_up"),
    Bug("one process alone", "gradient_shards:_is_known", "device_mesh.size() > 1", "device_mesh.size() > 0", f"{_P}test_one_process_alone_says_nothing_that_nobody_could_judge"),
    Bug("all look at the same rows", "gradient_shards:Shards.rows_of", "first = shard *", "first = 0 *", f"{_P}test_what_is_scattered_adds_up"),
    Bug("parts have their turns", "gradient_shards:ShardLook.__init__", "turn % shards.num", "0", f"{_P}test_what_is_scattered_adds_up"),
    Bug("copies of a part", "gradient_shards:Shards.__init__", "mesh.get_local_rank(axis)", "mesh.get_rank()", f"{_P}test_copies_of_a_part_are_all_held_against_the_sum"),
    Bug("gradients that nobody could look at are said", "gradient_arrival:GradientArrival.unseen", "if self._met:", "if True:",
        f"{_G}test_that_no_gradient_could_be_held_against_another_is_said"),
    Bug("gradients that were looked at are not said to be unseen", "gradient_arrival:GradientArrival.before", "self._met = True", "",
        f"{_G}test_that_no_gradient_could_be_held_against_another_is_said"),
    Bug("looks at gradients wait for no device", "gradient_arrival:GradientArrival.before", "if got.is_cpu and torch.equal", "if torch.equal",
        f"{_G}test_nothing_waits_for_a_device"),
    Bug("decay that is no part of the moments", "update_size:update_times", "+ decay * was.double()", "", _MEANT),
    Bug("another rate is no second update", "update_size:update_times", "torch.where(agree & far, median, 0.0)", "torch.where(agree, median, 0.0)", _TIMES),
    Bug("weights that do not move along what they were to", "update_size:update_times", "large & (along > ALONG * (energy * went).sqrt()) & (energy > 0)",
        "large & (energy > 0)", _MEANT),
    Bug("updates that are mostly rounding", "update_size:update_times", "known = large & ", "known = ", _MEANT),
    Bug("weights that do not agree", "update_size:update_times", "torch.where(agree & far,", "torch.where(far,",
        f"{_T}test_weights_that_do_not_agree_are_no_larger_update"),
    Bug("an update that is applied again", "gradients_left:GradientsLeft.before", "if known and not any(one.begun for one in known):", "if False:", _TWICE),
    Bug("a second step behind another pass", "gradients_left:_again", "(now == one.values).all() &", "", _NOT_TWICE),
    Bug("gradients that nobody clears", "gradients_left:_hold", "torch.equal(now, values) if first", "False if first", _LEFT),
    Bug("gradients that are cleared before their own backward", "gradients_left:_hold", "else bool(now.any())", "else True",
        "tests/attach/test_standing_elements.py::test_gradients_are_left_by_their_values"),
    Bug("gradients that are written over", "gradients_left:_lies_along", "> ALONG * now.norm() * last.norm()", "> -torch.inf",
        f"{_T}test_gradients_that_are_written_over_need_not_be_cleared"),
    Bug("gradients that are assigned", "gradients_left:_lies_along", " or gradient.data_ptr() != one.address", "",
        f"{_T}test_gradients_that_are_written_over_need_not_be_cleared"),
    Bug("gradients that are cleared before autograd adds to them", "gradients_left:_adds", "if one.stays is not False:", "if False:", _ASIDE),
    Bug("gradients that autograd adds to are left all the same", "gradients_left:_adds", "            _look(one)", "            one.stays = False",
        f"{_STAY}test_gradients_that_are_asked_for_and_nobody_clears_the_others"),
    Bug("a hook where gradients were cleared", "gradients_left:GradientsLeft.backward_begins", "if one.stays is not False and one.handle is None and", "if one.handle is None and", _NO_HOOK),
    Bug("a hook that stays behind its step", "gradients_left:GradientsLeft.before", "_let_go(known)", "pass", _NO_HOOK),
    Bug("gradients of what was taken out of an optimizer", "gradients_left:GradientsLeft.before", " and _is_held(optimizer, one.parameter)", "",
        f"{_STAY}test_a_gradient_that_is_left_as_its_layer_is_taken_out_is_added_to_and_not_stepped_with"),
    Bug("a layer that was taken out of an optimizer between two looks", "update_turns:_ended", " or not all(id(row.parameter) in held for row in turn.rows)", "", _OUT),
    Bug("beside a layer that was taken out of an optimizer", "update_turns:UpdateTurns._begun", " and id(known.rows[i].parameter) in held", "",
        f"{_STAY}test_beside_layers_that_were_taken_out_the_others_are_looked_at"),
    Bug("a layer that is frozen and moves", "update_turns:_ended", "repeated & (moved != 0).any(1)", "repeated & (moved == 0).any(1)",
        f"{_STAY}test_a_layer_that_is_frozen_and_moves_with_its_last_gradient_is_named"),
    Bug("a layer that is frozen at a rate of 0", "update_turns:_ended", "repeated & (moved != 0).any(1)", "repeated",
        f"{_STAY}test_a_layer_that_is_frozen_at_a_rate_of_0_repeats_its_gradient_and_says_nothing"),
    Bug("where a backward begins is heard", "step_state:StepState.saw_backward", "for hears in self.on_backward:", "for hears in ():", _LEFT),
    Bug("a gradient that repeats", "update_turns:_repeated", "(far <= ROUNDINGS * eps)", "(far < 0)", _NAMED),
    Bug("a gradient that repeats has another factor where it is clipped", "update_turns:_repeated", "factor[:, None] * last", "last", _NAMED),
    Bug("one batch again and again", "update_turns:_repeated", " & (others > OTHERS_MOVED) & (others < torch.inf)", "",
        f"{_T}test_one_batch_again_and_again_at_a_rate_of_0_repeats_all_gradients_and_says_nothing"),
    Bug("weights on a coarser grid", "update_turns:_coarse", "COARSE: coarse.sum()", "COARSE: 0 * coarse.sum()", _ROUNDED),
    Bug("the bits that rounded weights hold", "update_turns:_coarse", "16 - 5 * ", "16 - 0 * ", _ROUNDED),
    Bug("weights that shrink together", "update_turns:_shrink", "shrink = -(moved * was)", "shrink = (moved * was)", _SHRINK),
    Bug("weights that shrink now and then", "update_turns:UpdateTurns.named", "if self._num_shrunk < SHRUNK_LOOKS:", "if not shrinks:", _SHRINK),
    Bug("weights that the loss wants smaller", "update_turns:_shrink", "PULL_TIMES * pull", "0 * pull",
        f"{_T}test_weights_that_the_loss_wants_smaller_are_no_decay"),
    Bug("updates of other rows", "update_astray:astray", "!= -against[at].sign()", "== -2 * against[at].sign()", _ROWS),
    Bug("a gradient that is near the last one in its largest elements", "update_turns:_repeated", " & near", "",
        f"{_T}test_gradients_that_are_near_the_last_ones_in_their_largest_elements_are_no_repetition"),
    Bug("rows that move by the rounding of their decay", "update_astray:beside_decay", " & (rest.abs() > STILL * was.abs())", "", f"{_T}test_rows_that_no_token_names_move_by_decay_and_its_rounding_alone"),
    Bug("decay that is not what the group says", "update_astray:beside_decay", "torch.where(against == 0, found, -decays[:, None])", "-decays[:, None]",
        f"{_T}test_rows_that_no_token_names_move_by_decay_and_its_rounding_alone"),
    Bug("one tensor alone goes astray", "update_astray:astray", " & (others < OTHERS_ASTRAY)", "",
        f"{_T}test_averages_that_become_the_weights_are_no_misplaced_update"),
    Bug("turns rest for as long as they cost", "update_turns:_Known.rests", "int(took_s /", "int(0 * took_s /",
        f"{_T}test_turns_rest_for_as_long_as_they_cost"),
    Bug("looks at updates wait for no device", "update_turns:_at", "values.index_select(0, place.view(1))[0]", "values[int(place)]",
        f"{_T}test_nothing_waits_for_a_device[AdamW]"),
    Bug("a rate that leaps beside the others", "group_rates:GroupRates.before", "share > LEAP * before[p]", "share > 99 * before[p]", _RATE),
    Bug("a group that is unfrozen", "group_rates:GroupRates.before", "if before.get(p, 0.0) > 0 and share > LEAP * before[p]",
        "if share > LEAP * before[p]", f"{_T}test_a_group_that_is_unfrozen_did_not_leap"),
    Bug("a recomputation of other values", "recompute_values:RecomputeValues.again", "self._found[row] = torch.maximum", "_ = torch.maximum",
        _AGAIN),
    Bug("a recomputation is held against every first pass of its step", "recompute_values:RecomputeValues.again", "for first in kept]).amin()",
        "for first in kept[-1:]]).amin()", f"{_T}test_a_pipeline_runs_several_first_passes_before_the_first_comes_back"),
    Bug("targets that are not scored are no class", "batch_arithmetic:concentration",
        "known if ignored is None else known[known != ignored]", "known",
        f"{_B}test_class_targets_are_as_varied_as_those_that_are_scored"),
    Bug("targets beside tokens", "batch_facts:BatchFacts.take", "if not self._paired and self._targets is not None:",
        "if self._targets is not None:", f"{_B}test_targets_beside_tokens_are_none_of_classes"),
    Bug("rows that are copies", "batch_arithmetic:copies", "1.0 - len(np.unique(known)) / len(rows[0])", "0.0",
        f"{_B}test_rows_that_are_copies_of_another_are_counted"),
    Bug("rows that are copies in C", "fp8watch/kernels/cpu_source/batch.h", "hashes[places[place] - 1] != hashes[i]", "1",
        f"{_B}test_rows_that_are_copies_of_another_are_counted"),
    Bug("rows with one mask are no copies in C", "fp8watch/kernels/cpu_source/batch.h", "hashes[i] += sum;",
        "hashes[i] = sum;", f"{_B}test_rows_with_the_same_mask_and_other_tokens_are_no_copies"),
    Bug("rows with one mask are no copies", "batch_facts:_rows", "for x in inputs if x.ndim >= 1",
        "for x in inputs[-1:] if x.ndim >= 1", f"{_B}test_rows_with_the_same_mask_and_other_tokens_are_no_copies"),
]  # fmt: skip
