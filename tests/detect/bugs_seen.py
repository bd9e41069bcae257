"""What is broken on purpose in what trainings were seen to do without a word, and in statistics that go round."""

from __future__ import annotations

from planted import Bug

SEEN = "tests/detect/test_seen_to_be_wrong.py"
SCALARS = "tests/detect/test_scalar_shift.py"
ROTATED = "tests/detect/test_rotated.py"

SEEN_TO_BE_WRONG = [
    Bug(
        "scalar-shift",
        "scalar_shift.detector:ScalarShifts._shifted",
        "np.abs(self._in_a_row) >= IN_A_ROW)",
        "np.abs(self._in_a_row) >= 99 * IN_A_ROW)",
        f"{SCALARS}::test_a_level_shift_of_any_scalar_is_information",
    ),
    Bug(
        "a known name warns outside of its band",
        "scalar_shift.detector:ScalarShifts._banded",
        "            out[i] = over or under\n",
        "            out[i] = over and under\n",
        f"{SCALARS}::test_known_names_warn_outside_of_their_band",
    ),
    Bug(
        "a mean over nothing is no fault",
        "scalar_shift.detector:ScalarShifts._nonfinite",
        "        fresh = bad & ~self._odd\n",
        "        fresh = bad\n",
        f"{SCALARS}::test_a_mean_over_nothing_that_is_infinite_now_and_then_from_the_start_is_silent",
    ),
    Bug(
        "healthy scalars spike",
        "scalar_shift.detector:ScalarShifts._shifted",
        " & (np.abs(away) > 2 * furthest)",
        "",
        f"{SCALARS}::test_healthy_rl_is_silent",
    ),
    Bug(
        "gradients that vanish without a logged norm",
        "gradient_fall:GradientFall._fallen",
        "        change = np.where(now.all_zero, math.inf, change)\n",
        "        change = np.full(len(now), np.nan)\n",
        f"{SCALARS}::test_a_loss_that_is_scaled_away_is_said_whether_the_norm_is_logged_or_not",
    ),
    Bug(
        "a level of the loss in what scatters",
        "bad_batch.level",
        "WINDOWS = ((8, 24, 2.5), (24, 48, 1.25))\n",
        "WINDOWS = ((8, 24, 2.5), (24, 48, 12.5))\n",
        f"{SEEN}::test_a_loss_that_stays_some_percent_higher_is_information_and_not_fp8",
    ),
    Bug(
        "a mild clip is on the timeline",
        "delayed",
        "NOTICED_DEPTH = 2.0\n",
        "NOTICED_DEPTH = 20.0\n",
        f"{SEEN}::test_a_mild_clip_of_one_step_is_on_the_timeline",
    ),
    Bug(
        "harm by the SQNR has a window of its own",
        "delayed:Delayed.observe",
        "        clip |= self._harmed.update(harmed, measured, now.step)\n",
        "        clip |= self._harmed.update(harmed, delayed, now.step)\n",
        f"{SEEN}::test_harm_that_only_full_samples_hold_is_counted_by_them",
    ),
    Bug(
        "the number that fired is in the title",
        "chronic_quantization_noise.words:words",
        '    if by != "underflow" and (db',
        "    if (db",
        f"{SEEN}::test_underflow_that_fired_is_in_the_title_and_the_healthy_sqnr_is_not",
    ),
    Bug(
        "an operand that is noise is critical",
        "quantiser_fault.detector:_intact",
        'judged & (view.raw("amax_max") > _LEAST_AMAX)',
        'judged & (view.raw("amax_max") < 0)',
        f"{SEEN}::test_an_operand_that_is_noise_is_critical_and_no_matter_of_granularity",
    ),
    Bug(
        "an input alone is dead",
        "dead_layer.detector:DeadLayers.observe",
        "self._latch.update(far | (low & inputs & gradients), named, now.step)",
        "self._latch.update(low & inputs & gradients, named, now.step)",
        f"{SEEN}::test_an_input_that_became_zero_behind_a_residual_is_told",
    ),
    Bug(
        "a module that is no longer called",
        "dead_layer.detector:DeadLayers._absent",
        "        self._pause = np.where(seen, 0, self._pause + 1)\n",
        "        self._pause = np.where(seen, 0, self._pause)\n",
        f"{SEEN}::test_a_module_that_is_no_longer_called_and_one_that_no_gradient_reaches_are_told",
    ),
    Bug(
        "a weight that rested is not corrupted",
        "silent_data_corruption.detector:Corruption.observe",
        "        move[rested], apart = np.nan, min(MAX_APART, apart)\n",
        "        apart = min(MAX_APART, apart)\n",
        f"{SEEN}::test_an_expert_that_rests_now_and_then_is_silent",
    ),
    Bug(
        "baselines continue over the sessions of a run",
        "engine:Engine._resume",
        "        if before.continues_at(step):\n",
        "        if False:\n",
        f"{SEEN}::test_a_learning_rate_times_thirty_right_after_a_resume_is_told",
    ),
    Bug(
        "a run from scratch has no past",
        "engine:Engine._resume",
        "        if before.continues_at(step):\n",
        "        if True:\n",
        f"{SEEN}::test_a_run_that_begins_again_from_scratch_is_not_held_against_its_past",
    ),
    Bug(
        "flags have the names of their framework",
        "remedies:switch_of",
        "    return _HISTORY[fact] if by_flags and fact in _HISTORY else fact\n",
        "    return fact\n",
        f"{SEEN}::test_all_flags_that_changed_at_a_resume_are_named_as_the_framework_names_them",
    ),
    Bug(
        "a flag that went is a change",
        "sessions:differences",
        "        if (known or name.startswith(FLAG)) and value != before:\n",
        "        if known and value != before:\n",
        f"{SEEN}::test_a_flag_that_came_or_went_at_a_resume_is_a_change",
    ),
    Bug(
        "a restart is no other configuration",
        "sessions",
        '            "restart_count",\n',
        "",
        f"{SEEN}::test_what_a_restart_is_and_what_is_not_seen_are_no_flags",
    ),
    Bug(
        "a hash does not tell the step",
        "agreement:Agreement._corrupted",
        "            began=now.step if last_agreed is None else last_agreed + 1,\n",
        "            began=now.step,\n",
        f"{SEEN}::test_a_weight_that_differs_is_told_with_the_steps_between_which_it_happened",
    ),
    Bug(
        "shards are not replicas",
        "agreement:Agreement._learned",
        "                known = before * 2 > int(np.count_nonzero(agreed | differed)) and before > 0\n",
        "                known = before > 0\n",
        f"{SEEN}::test_shards_that_begin_as_equal_zeros_are_not_taken_for_replicas",
    ),
    Bug(
        "the channel of an outlier",
        "cross_rank_step:Now.channel",
        "        return tile[1] if tile is not None and tile[1] // max(width, 1) == own[1] else None\n",
        "        return None\n",
        f"{SEEN}::test_an_outlier_that_owns_its_tile_is_told_with_its_channel",
    ),
    Bug(
        "ranks that take turns do not share their tiles",
        "cross_rank_step:Now.beside",
        "self._rolled_up(name, self._measured(group))",
        "self._rolled_up(name)",
        f"{ROTATED}::test_ranks_that_take_turns_do_not_make_the_sqnr_of_a_site_better",
    ),
    Bug(
        "an incident lasts from turn to turn of its site",
        "engine:Engine._apart",
        "        return max(self._light_apart(), self._samples.of(sampled, rows[rows >= 0]))\n",
        "        return self._light_apart()\n",
        f"{ROTATED}::test_a_gemm_that_is_wrong_stays_one_incident_between_the_turns_of_its_shadow",
    ),
    Bug(
        "noise far under its band is soon told",
        "chronic_quantization_noise.detector:Noise.__init__",
        "        self._deep = Latch(num_sites, 3, 4)\n",
        "        self._deep = Latch(num_sites, 30, 32)\n",
        f"{ROTATED}::test_noise_far_under_its_band_is_told_after_three_samples_of_its_site",
    ),
    Bug(
        "information that grows worse is told",
        "fold:_grew_worse",
        ' and (severity == "critical" or told == "info")\n',
        ' and severity == "critical"\n',
        "tests/incidents/test_rejudged.py::test_information_that_grows_worse_is_told_by_what_made_it_more",
    ),
]
