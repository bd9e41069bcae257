"""What is broken on purpose in detection, and the test that sees it: a real report or a rule of the engine a line."""

from __future__ import annotations

from planted import Bug

D = "server/fp8watch_server/detect"
T = "tests/detect"

REPORTS = [
    Bug(
        "the eps of the operand is named",
        "fixes_statistical",
        '"grad_output": "FP8_QUANT_BWD_GRAD_AMAX_EPS"',
        '"grad_output": "FP8_QUANT_FWD_WEIGHT_AMAX_EPS"',
        f"{T}/test_reports.py::test_nan_gradients_at_once_with_eps_0",
    ),
    Bug(
        "the tile of an Inf is named",
        "view:StepView.element",
        "row // max(tile_rows, 1), column // max(tile_columns, 1))",
        "row, column)",
        f"{T}/test_reports.py::test_the_inf_rule_of_blockwise_scaling_launders_with_the_tile_named",
    ),
    Bug(
        "outputs off by a factor are told",
        "kernel_output:wrong_outputs",
        '        found.append(_wrong(view, view.in_flow(scaled), "kernel-output-fault", "critical"))\n',
        "        pass\n",
        f"{T}/test_reports.py::test_e5m2_bytes_read_as_e4m3_make_gradients_too_small_by_two_to_the_seven",
    ),
    Bug(
        "modules that a filter left out are counted",
        "detect.registry:Registry.add_session",
        "        changes += s.coverage(facts, before)\n",
        "",
        f"{T}/test_reports.py::test_a_regex_left_three_of_477_modules_in_bf16"
        f" {T}/test_reports.py::test_a_filter_that_leaves_out_too_much_is_told_against_the_checkpoint",
    ),
    Bug(
        "scales that were forced are an event",
        "sessions",
        '_SITE_FACTS = ("tile", "format", "power_2_scale", "eps", "recipe")',
        '_SITE_FACTS = ("tile", "format", "eps", "recipe")',
        f"{T}/test_reports.py::test_power_of_two_scales_that_were_forced_are_an_event_at_that_step_and_show_in_the_sqnr",
    ),
    Bug(
        "shards that were not reduced are told",
        "view",
        'PER_TENSOR = ("delayed", "current")',
        'PER_TENSOR = ("delayed",)',
        f"{T}/test_reports.py::test_tensor_parallel_ranks_that_take_amax_of_their_shard_disagree_before_the_nan",
    ),
    Bug(
        "recomputation is compared with the forward pass",
        "sessions:own_contradictions",
        '("recompute_fingerprint", "the recomputation")',
        '("", "the recomputation")',
        f"{T}/test_reports.py::test_recomputation_in_another_precision_is_told_by_its_fingerprint",
    ),
    Bug(
        "the tokens of an expert are counted",
        "kernel_output:finding",
        "    if tokens is not None:\n",
        "    if tokens:\n",
        f"{T}/test_reports.py::test_uninitialised_rows_of_an_expert_without_tokens",
    ),
    Bug(
        "a poisoned checkpoint is flagged",
        "engine:Engine._step",
        "            found.append(poisoned_checkpoint)\n",
        "            pass\n",
        f"{T}/test_reports.py::test_one_nan_of_a_wgrad_poisons_a_checkpoint_that_is_flagged",
    ),
    Bug(
        "scales go on after a resume",
        "engine:Engine._restart",
        "        self._scales.restart()\n",
        "",
        f"{T}/test_reports.py::test_a_resume_whose_scales_do_not_continue",
    ),
    Bug(
        "the group that was not reduced over is named",
        "agreement:Agreement._axes",
        "                blamed.append(axis)\n",
        "                pass\n",
        f"{T}/test_reports.py::test_amax_reduced_over_the_wrong_group_is_named_with_the_group",
    ),
    Bug(
        "SwiGLU is named",
        "delayed:Delayed._clip_finding",
        'swiglu=facts.operand == "input" and',
        'swiglu=facts.operand == "weight" and',
        f"{T}/test_reports.py::test_delayed_scaling_and_swiglu_outliers_name_the_channel",
    ),
    Bug(
        "FP8 is not accused of what it did not do",
        "nonfinite:_nan_in_loss",
        '        verdict="shared" if forward_seen else "unknown",\n',
        '        verdict="fp8" if forward_seen else "unknown",\n',
        f"{T}/test_reports.py::test_controls_hardware_compiler_and_initialisation_leave_fp8_innocent",
    ),
]

ENGINE = [
    Bug(
        "a batch that comes twice is judged once",
        "engine:Engine.observe",
        "        if header.seq in stream.seqs:\n",
        "        if header.seq in stream.seqs and header.seq < 0:\n",
        f"{T}/test_order.py::test_a_batch_that_comes_twice_is_judged_once",
    ),
    Bug(
        "steps are put back in order",
        "step_alignment:Assembly.ready",
        "            step = min(self._pending)\n",
        "            step = next(iter(self._pending))\n",
        f"{T}/test_order.py::test_batches_that_overtake_each_other_and_come_twice_change_no_verdict[chronic-quantization-noise]",
    ),
    Bug(
        "a gap is waited for",
        "step_alignment",
        "GAP_BATCHES = 3\n",
        "GAP_BATCHES = 0\n",
        f"{T}/test_order.py::test_batches_that_overtake_each_other_and_come_twice_change_no_verdict[chronic-quantization-noise]",
    ),
    Bug(
        "steps behind a gap are not taken for sampling",
        "step_alignment:Assembly._is_gap",
        "(later and min(later) - step == apart)",
        "step + apart in later",
        f"{T}/test_order.py::test_batches_that_overtake_each_other_and_come_twice_change_no_verdict[chronic-quantization-noise]",
    ),
    Bug(
        "a restart begins a new baseline",
        "engine:Engine._restart",
        "        self._statistics = Statistics(len(self._table), self.thresholds)\n        self._scales.restart()\n",
        "        self._scales.restart()\n",
        f"{T}/test_order.py::test_a_restart_begins_a_new_baseline[120]",
    ),
    Bug(
        "going back in place begins anew",
        "engine:Engine._went_back",
        '        return int(batch.steps["step"][0]) < stream.last_step\n',
        "        return False\n",
        f"{T}/test_order.py::test_training_that_goes_back_within_a_session_begins_anew",
    ),
    Bug(
        "the state keeps the baselines",
        "state",
        '_SKIPPED = {"limit", "_pending", "_of_scalars"}',
        '_SKIPPED = {"limit", "_pending", "_of_scalars", "_roots"}',
        f"{T}/test_state.py::test_an_engine_that_was_read_back_says_what_the_first_would_have",
    ),
    Bug(
        "a state of another version is refused",
        "state:load",
        'if not isinstance(body, dict) or body.get("version") != VERSION:',
        "if not isinstance(body, dict):",
        f"{T}/test_state.py::test_what_is_no_state_is_refused",
    ),
    Bug(
        "a baseline is frozen while its alarm is on",
        "statistics:Statistics._learn_sites",
        "                take &= ~frozen\n",
        "                pass\n",
        f"{T}/test_scenarios.py::test_a_fault_that_lasts_does_not_become_the_new_normal",
    ),
    Bug(
        "gradients are judged against each other",
        "context:Context.above_usual",
        "            change[gradients] -= np.median(common)\n",
        "            pass\n",
        f"{T}/test_scenarios.py::test_what_all_gradients_do_together_is_no_fault_of_one",
    ),
    Bug(
        "nothing statistical is said while a run is young",
        "schedule:Schedule.warm",
        "        if self._first_step is None or step - self._first_step < self._warmup_steps:\n",
        "        if self._first_step is None:\n",
        f"{T}/test_divergence.py::test_nothing_is_judged_in_the_first_fifty_steps",
    ),
    Bug(
        "not measured is not zero",
        "degenerate:degenerate",
        '    scale = columns.has(Measured.SCALE) & (columns.raw("num_tiles") > 0)\n',
        '    scale = columns.raw("num_tiles") > 0\n',
        f"{T}/test_modes.py::test_what_was_not_measured_is_never_read_as_zero",
    ),
    Bug(
        "a unit that is wrong is refused",
        "rules:_type_of",
        "            if given and _SAME_UNIT.get(given.lower(), given) != unit:\n",
        "            if given and not unit:\n",
        f"{T}/test_rules.py::test_what_cannot_be_meant_is_refused",
    ),
    Bug(
        "a threshold that cannot be is refused",
        "rules:_type_of",
        "Meta(ge=threshold.low, le=threshold.high)",
        "Meta(ge=-1e308, le=1e308)",
        f"{T}/test_rules.py::test_what_cannot_be_meant_is_refused",
    ),
    Bug(
        "a threshold that is not known is refused",
        "rules:_section",
        '            problems.append(f"{where} {name}: unknown threshold{hint};',
        '            str(f"{where} {name}: unknown threshold{hint};',
        f"{T}/test_rules.py::test_what_cannot_be_meant_is_refused",
    ),
    Bug(
        "thresholds of a file are used",
        "rules:Rules.thresholds_for",
        "                values |= section.values\n",
        "                pass\n",
        f"{T}/test_rules.py::test_every_section_that_matches_counts",
    ),
]
