"""What is broken on purpose in what is told of batches, of weights that stand, and of gradient norms."""

from __future__ import annotations

from support.planted import Bug

BATCHES = "tests/detect/test_batches.py"

OF_BATCHES = [
    Bug(
        "batches that come again",
        "repeated:RepeatedBatches._repeats",
        "self._run[rank] >= ctx.limit.repeated_steps",
        "self._run[rank] >= 99 * ctx.limit.repeated_steps",
        f"{BATCHES}::test_batches_that_come_again_are_told_within_three_steps",
    ),
    Bug(
        "a small data set goes round",
        "repeated:RepeatedBatches._repeats",
        "max(MIN_FRESH, 2 * lag)",
        "MIN_FRESH",
        f"{BATCHES}::test_a_small_data_set_that_goes_round_and_one_that_is_drawn_from_are_silent",
    ),
    Bug(
        "batches that are drawn with return",
        "repeated:RepeatedBatches._repeats",
        "if lag == self._lag.get(rank) else 1",
        "",
        f"{BATCHES}::test_a_small_data_set_that_goes_round_and_one_that_is_drawn_from_are_silent",
    ),
    Bug(
        "labels that are shifted twice",
        "labels:LabelMatch.observe",
        "low - max(EDGE, high - low)",
        "low - 2.0",
        f"{BATCHES}::test_labels_that_are_shifted_twice_are_told_in_their_step",
    ),
    Bug(
        "a share that always varied needs three steps",
        "labels:LabelMatch.observe",
        "(1 if low >= ALWAYS else VARIES_STEPS)",
        "1",
        f"{BATCHES}::test_labels_drawn_at_random_are_told_and_those_that_always_varied_need_three_steps",
    ),
    Bug(
        "a share of labels that is alike by chance is no shift",
        "labels:LabelMatch._finding",
        "share - np.nanmax(self._usual.ordered(), axis=1)  #",
        "3 * (share - usual)  #",
        f"{BATCHES}::test_labels_drawn_at_random_are_told_and_those_that_always_varied_need_three_steps",
    ),
    Bug(
        "what batches are made of",
        "composition:_moved",
        "abs(change) <= max(sigma * spread, LEAST * abs(usual), least)",
        "abs(change) <= 99 * sigma * spread",
        f"{BATCHES}::test_a_mask_that_is_dropped_and_a_source_of_noise_are_information",
    ),
    Bug(
        "weights that stand still",
        "standing:StandingWeights.observe",
        "        self._still[same] += 1\n",
        "",
        f"{BATCHES}::test_weights_that_stand_still_are_named_while_the_others_move",
    ),
    Bug(
        "a frozen weight may stand",
        "standing:_gradients",
        "table.module[gradient & ~table.rowwise & (amax > 0)]",
        "table.module[gradient & (amax > 0)]",
        f"{BATCHES}::test_what_is_frozen_skipped_or_without_a_learning_rate_stands_in_silence",
    ),
    Bug(
        "a step without an update moves nothing",
        "standing:StandingWeights.observe",
        "not now.skipped and not _vanished(ctx)",
        "not _vanished(ctx)",
        f"{BATCHES}::test_what_is_frozen_skipped_or_without_a_learning_rate_stands_in_silence",
    ),
    Bug(
        "a learning rate of nothing moves nothing",
        "standing:StandingWeights.observe",
        "not now.skipped and not _vanished(ctx)",
        "not now.skipped",
        f"{BATCHES}::test_what_is_frozen_skipped_or_without_a_learning_rate_stands_in_silence",
    ),
    Bug(
        "a weight may often stand",
        "standing:StandingWeights._usually_moves",
        "known & (bits >= LOOKS - ODD_LOOKS)",
        "known",
        f"{BATCHES}::test_a_weight_that_often_stands_is_silent",
    ),
    Bug(
        "updates of sixteen bits round to none",
        "standing:StandingWeights.observe",
        " & _of_float32(here)",
        "",
        f"{BATCHES}::test_weights_of_sixteen_bits_may_stand",
    ),
    Bug(
        "where it cannot be told whether a weight is frozen it is information",
        "standing:StandingWeights._finding",
        '"warning" if sure else "info"',
        '"warning"',
        f"{BATCHES}::test_where_one_operand_serves_both_gemms_it_is_information",
    ),
    Bug(
        "a norm at a multiple",
        "gradient_factor:GradientFactor._judge",
        "if abs(change) <= need or",
        "if abs(change) <= 9 * need or",
        f"{BATCHES}::test_a_norm_that_doubles_behind_the_backward_pass_is_told_apart",
    ),
    Bug(
        "whether a factor came behind the backward pass",
        "gradient_factor:GradientFactor._finding",
        "behind = loss_moved is None and abs(entering) <= BEHIND * abs(level - usual)",
        "behind = True",
        f"{BATCHES}::test_a_norm_that_doubles_behind_the_backward_pass_is_told_apart",
    ),
    Bug(
        "a norm that moves with the loss",
        "gradient_factor:_loss_moved",
        "if float((last * side).min()) > float((before * side).max()) else None",
        "if False else None",
        f"{BATCHES}::test_a_norm_that_moves_with_the_loss_is_not_laid_on_what_lies_behind",
    ),
    Bug(
        "the step before a look decides whether a weight had to move",
        "standing:StandingWeights.observe",
        " & updated & (needs | may_need)",
        " & updated",
        f"{BATCHES}::test_a_weight_that_is_unfrozen_stands_in_that_step_in_silence",
    ),
]

SETUP = "tests/detect/test_training_setup.py"

OF_TRAINING = [
    Bug(
        "moments that change between two steps",
        "optimizer_state:OptimizerState.observe",
        "if not hit:",
        "if hit:",
        f"{SETUP}::test_moments_that_change_alone_are_told_in_their_step",
    ),
    Bug(
        "a checkpoint that is loaded is no corruption",
        "optimizer_state:OptimizerState.observe",
        " and not logs.get(WEIGHTS_CHANGED)",
        "",
        f"{SETUP}::test_moments_that_come_with_their_weights_were_loaded",
    ),
    Bug(
        "clipping that stops",
        "training_setup:TrainingSetup._clipping",
        "if self._num_now < GONE_STEPS:",
        "if True:",
        f"{SETUP}::test_clipping_that_stops_is_told_in_its_third_step_with_the_first",
    ),
    Bug(
        "a norm that is scheduled",
        "training_setup:TrainingSetup._clipping",
        " or not _same(norm, self._now):",
        ":",
        f"{SETUP}::test_a_step_that_was_not_clipped_and_a_norm_that_is_scheduled_are_silent",
    ),
    Bug(
        "gradients beyond what they were clipped to",
        "training_setup:TrainingSetup._beyond",
        "self._largest > self._lost",
        "self._largest < self._lost",
        f"{SETUP}::test_gradients_beyond_what_they_were_clipped_to_are_the_optimizers",
    ),
    Bug(
        "clipping that comes back is not lost",
        "training_setup:TrainingSetup._beyond",
        "if norm <= self._lost:",
        "if False:",
        f"{SETUP}::test_clipping_that_comes_back_before_gradients_grow_is_no_divergence",
    ),
    Bug(
        "lost clipping is told once, with both",
        "training_setup:TrainingSetup.observe",
        "None if beyond is not None else clipping",
        "clipping",
        f"{SETUP}::test_clipping_that_stops_is_told_in_its_third_step_with_the_first",
    ),
    Bug(
        "weights that were written from the start",
        "optimizer_state:OptimizerState._weights",
        "if last < 0 and self._num_steps > FROM_THE_START:",
        "if last < 0:",
        f"{SETUP}::test_weights_that_were_written_from_the_start_are_written_on_purpose",
    ),
    Bug(
        "what writes to weights do is told by its own name",
        "statistics:Statistics._is_muted",
        "self.num_steps - seen <= held and",
        "False and",
        f"{SETUP}::test_what_writes_to_weights_do_is_told_by_its_own_name",
    ),
    Bug(
        "weights that are written now and then",
        "optimizer_state:OptimizerState._weights",
        "or (self._is_told and not hit)",
        "",
        f"{SETUP}::test_weights_that_are_written_for_the_first_time_are_information",
    ),
    Bug(
        "second moments that are 0",
        "optimizer_state:OptimizerState.observe",
        "if zeros is not None:",
        "if False:",
        f"{SETUP}::test_second_moments_that_are_0_are_the_optimizers",
    ),
    Bug(
        "few second moments that are 0",
        "optimizer_state:OptimizerState._zeros",
        "> ZERO_SHARE * logs.get(SECOND_LOOKED, math.inf)",
        "> 0",
        f"{SETUP}::test_a_few_second_moments_that_are_0_are_not_told",
    ),
    Bug(
        "what else it could be fits what was found",
        "explain:explain",
        "others or mode.alternatives",
        "mode.alternatives",
        f"{SETUP}::test_what_else_it_could_be_fits_what_was_found",
    ),
    Bug(
        "a causal module that sees ahead",
        "training_setup:TrainingSetup._ahead",
        "if not modules:",
        "if modules:",
        f"{SETUP}::test_attention_that_sees_ahead_is_told_once_with_its_module",
    ),
]
