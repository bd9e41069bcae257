"""What is broken on purpose in how causes are told from consequences, and in what sentences claim."""

from __future__ import annotations

from support.planted import Bug

D, INCIDENTS = "server/fp8watch_server/detect", "server/fp8watch_server/incidents"
FIRST = "tests/detect/test_what_came_first.py"
REJUDGED = "tests/incidents/test_rejudged.py"
WORDS = "tests/incidents/test_nothing_measured.py::test_no_claim_is_made_about_what_was_not_measured"

CAUSES = [
    Bug(
        "a loss that jumps asks for the learning rate",
        "loss_jump:LossJumps._begins",
        "            lr=leap if leap is not None and step - LR_BEFORE <= leap[0] else None,\n",
        "            lr=None,\n",
        f"{FIRST}::test_a_learning_rate_that_leaps_right_before_the_loss_is_the_cause_though_no_weight_was_measured",
    ),
    Bug(
        "a learning rate that leaped long before is no cause",
        "loss_jump:LossJumps._begins",
        "            lr=leap if leap is not None and step - LR_BEFORE <= leap[0] else None,\n",
        "            lr=leap,\n",
        f"{FIRST}::test_a_learning_rate_that_leaped_long_before_is_not_blamed_for_a_batch",
    ),
    Bug(
        "a learning rate that leaps for one step is remembered",
        "lr_schedule:Schedule.observe",
        "        self.jump_step = None\n        if rising",
        "        self.jump_step = self.last_leap = None\n        if rising",
        f"{FIRST}::test_a_learning_rate_that_leaps_for_one_step_and_healthy_quantisers_are_no_matter_of_fp8",
    ),
    Bug(
        "a leap of amax needs no kurtosis",
        "context:Context.leaping",
        "            return np.asarray(named & (over >= need))\n",
        "            return np.asarray(named & (over >= need) & (self.now.log2_kurtosis > 8))\n",
        f"{FIRST}::test_an_input_that_leaps_is_told_at_once_whatever_its_kurtosis",
    ),
    Bug(
        "a leap that is measured later explains the loss",
        "precedence",
        '{"chronic-quantization-noise", "bad-batch", "gradient-underflow", "dead-layer", "attention-logit-growth"}',
        '{"chronic-quantization-noise", "gradient-underflow", "dead-layer", "attention-logit-growth"}',
        f"{FIRST}::test_a_leap_that_is_measured_later_takes_the_jump_of_the_loss_over",
    ),
    Bug(
        "a verdict needs inputs that were measured",
        "loss_jump:_finding",
        "    healthy = inputs is not None and inputs.healthy is True\n",
        "    healthy = inputs is None or inputs.healthy is True\n",
        f"{FIRST}::test_a_learning_rate_that_leaps_right_before_the_loss_is_the_cause_though_no_weight_was_measured",
    ),
    Bug(
        "what broke later does not lose what jumped before",
        "statistics:Statistics.observe",
        "            return self._told([f for d in self._detectors for f in d.cut_off(now, self.limit)], window)\n",
        "            return []\n",
        f"{FIRST}::test_bad_batches_before_an_inf_are_an_incident_of_their_own",
    ),
    Bug(
        "what began earlier is muted by nothing that came later",
        "statistics:Statistics._is_muted",
        "            follows = began <= found.latest(window)\n",
        "            follows = began <= found.step + window\n",
        f"{FIRST}::test_bad_batches_before_an_inf_are_an_incident_of_their_own",
    ),
    Bug(
        "what began earlier is taken over by nothing that came later",
        "match:explained_by",
        '        if finding.earliest(window) <= latest(i.cause, i.row["first_step"], window):\n',
        "        if finding.step > 0:\n",
        f"{REJUDGED}::test_a_failure_that_began_later_explains_nothing_that_came_before",
    ),
    Bug(
        "an incident begins with its onset",
        "fold:_new",
        '        "first_step": finding.onset,\n',
        '        "first_step": finding.step,\n',
        f"{REJUDGED}::test_an_incident_begins_with_its_onset",
    ),
    Bug(
        "later evidence is sent once",
        "messages:write_rejudged",
        '    if any(got.idempotency_key.endswith(f":{key}") for got in fired):\n',
        '    if not any(got.idempotency_key.endswith(f":{key}") for got in fired):\n',
        f"{REJUDGED}::test_evidence_that_comes_later_re_judges_an_open_incident_and_says_so_once",
    ),
    Bug(
        "energies have windows of their own",
        "chronic_quantization_noise.detector:Noise.observe",
        "        chronic = self._chronic.update(noisy, ~np.isnan(now.sqnr_db), now.step)\n",
        "        chronic = self._chronic.update(noisy, now.seen, now.step)\n",
        f"{FIRST}::test_noise_that_only_full_samples_hold_is_counted_by_them",
    ),
    Bug(
        "an incident lasts from sample to sample",
        "engine:DetectionEngine._roll_up",
        "streams, self._apart(f)) for f in found]",
        "streams, self._light_apart()) for f in found]",
        f"{FIRST}::test_noise_that_only_full_samples_hold_is_counted_by_them",
    ),
    Bug(
        "inputs without moments must stand far above",
        "outlier",
        "WITHOUT_MOMENTS = 2.0\n",
        "WITHOUT_MOMENTS = 1.0\n",
        f"{FIRST}::test_inputs_between_samples_must_stand_far_above_where_no_kurtosis_says_outlier",
    ),
    Bug(
        "inputs that were not measured are not called ordinary",
        "bad_batch.words:_inputs_words",
        "    if measured is None or not about:\n",
        "    if measured is None and not about:\n        return 'Inputs are of ordinary size'\n    if not about:\n",
        WORDS,
    ),
    Bug(
        "a gradient that was not measured is not called ordinary",
        "silent_data_corruption.words:words",
        '        if f.extra.get("gradient_seen")\n        else "and the gradient',
        '        if not f.extra.get("gradient_seen")\n        else "and the gradient',
        WORDS,
    ),
    Bug(
        "an invariant that was not measured is not said to hold",
        "optimizer_divergence.words:words",
        'holds = " The scale invariant holds." if f.extra.get("invariant_held") else ""',
        'holds = " The scale invariant holds."',
        WORDS,
    ),
    Bug(
        "operands that were not measured leave the kernel unjudged",
        "kernel_output_fault.words:words",
        '    if not f.extra.get("operands_seen"):\n',
        '    if f.extra.get("operands_seen") == 0:\n',
        WORDS,
    ),
    Bug(
        "one odd batch warns nobody",
        "loss_jump:_finding",
        'notice = about["shift"] or (back and after <= BRIEF_STEPS and jump.loss < BRIEF_RATIO * jump.usual)',
        'notice = about["shift"]',
        "tests/detect/test_what_came_first.py::test_an_odd_batch_that_is_over_in_one_step_warns_nobody",
    ),
    Bug(
        "growth that is borne warns nobody",
        "outlier:Outliers._finding",
        '            "info" if borne else "warning",\n',
        '            "warning",\n',
        "tests/detect/test_what_came_first.py::test_an_input_that_grows_warns_when_its_quantiser_no_longer_bears_it",
    ),
    Bug(
        "a judgement that comes back breaks nothing",
        "messages:write_rejudged",
        '    if any(got.idempotency_key.endswith(f":{key}") for got in fired):\n',
        "    if len(fired) < 0:\n",
        f"{REJUDGED}::test_a_judgement_that_comes_back_is_sent_once_and_breaks_nothing",
    ),
    Bug(
        "what takes over is not dated before itself",
        "fold:_absorb",
        '    if takes_over and PRECURSORS.get(finding.mode) != row["mode"]:',
        '    if takes_over and row["mode"] == "":',
        f"{REJUDGED}::test_what_takes_over_is_not_dated_before_it_can_have_begun",
    ),
    Bug(
        "consequences do not move a beginning to any past",
        "fold:_mute",
        "min(first, max(finding.onset, first if root.earliest is None else root.earliest))",
        "min(first, finding.onset)",
        f"{REJUDGED}::test_consequences_do_not_move_a_beginning_to_any_past",
    ),
    Bug(
        "one long gap is no rhythm",
        "sample_gaps:SampleGaps.of",
        "np.where(two[:, 0] > 0, two[:, 0], two[:, 1])",
        "two[:, 1]",
        "tests/incidents/test_fold.py::test_one_long_gap_between_samples_keeps_no_incident_open",
    ),
    Bug(
        "of two leaps of the learning rate the last counts",
        "lr_schedule:Schedule.observe",
        "(self.jump_step is None or leap):",
        "self.jump_step is None:",
        f"{FIRST}::test_of_a_learning_rate_that_leaps_twice_the_last_leap_is_named",
    ),
    Bug(
        "a loss is told with the step of its peak",
        "loss_jump:_finding",
        'round(jump.usual, 4), "", jump.peak)]',
        'round(jump.usual, 4), "", jump.step)]',
        f"{FIRST}::test_a_loss_that_peaks_later_is_told_with_the_step_of_its_peak",
    ),
    Bug(
        "names of what nobody observes are read in one pass",
        "unobserved:_items",
        "(m := _ITEM.match(text, at))",
        "(m := _ITEM.search(text, at))",
        "tests/detect/test_reports.py::test_a_text_that_lists_nothing_is_read_in_no_time",
    ),
]
