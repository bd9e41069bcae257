"""What is broken on purpose in what is told of updates, of gradients that are not those of their step, and of copied rows."""

from __future__ import annotations

from support.planted import Bug

UPDATES = "tests/detect/test_weight_updates.py"
TOLD = f"{UPDATES}::test_each_is_told_with_its_mode_place_and_fix"
SILENT = f"{UPDATES}::test_what_is_seen_once_or_is_an_adjustment_is_silent"

ANEW = "tests/detect/test_weight_set_anew.py"
SUMS = "tests/detect/test_gradient_sums.py"
NO_SUM = f"{SUMS}::test_what_is_no_sum_or_not_known_is_silent"
ADDS_UP = f"{SUMS}::test_what_does_not_add_up_is_told_with_its_process"

OF_UPDATES = [
    Bug(
        "what always was another gradient goes on",
        "weight_updates:WeightUpdates._finding",
        'max(OTHERS_APART, more.get("apart", 1))',
        "1",
        f"{UPDATES}::test_gradients_that_always_were_others_are_one_incident_however_seldom_they_are_looked_at",
    ),
    Bug(
        "a parameter has its own name, whoever shares it",
        "gradient_sketches:name_of",
        "name if group and first.isdecimal() else parameter",
        "parameter",
        f"{SUMS}::test_of_processes_that_share_some_gradients_the_one_that_is_missing_is_told_with_the_parameters_own_name",
    ),
    Bug(
        "what never added up is no sum",
        "gradient_sums:GradientSums._is_news",
        "RIGHT_TIMES * before",
        "0 * before",
        NO_SUM,
    ),
    Bug("one parameter that never added up", "gradient_sums:GradientSums._is_news", "NEW_IN_A_ROW or", "1 or", NO_SUM),
    Bug(
        "parameters that add up between those that do not",
        "gradient_sums:GradientSums.observe",
        "self._row.clear()",
        "",
        NO_SUM,
    ),
    Bug(
        "parameters that were not looked at before",
        "gradient_sums:GradientSums._is_news",
        "RIGHT_TIMES * before > len(self._right)",
        "True",
        f"{SUMS}::test_where_one_parameter_after_the_other_is_wrong_at_its_first_look_that_is_news",
    ),
    Bug("sums that round more in this run", "gradient_sums:GradientSums.observe", "max(APART, usual)", "APART", NO_SUM),
    Bug(
        "how far sums round is learned first",
        "gradient_sums:GradientSums.observe",
        "elif learns:",
        "elif False:",
        NO_SUM,
    ),
    Bug("a sum of which a process is not there", "gradient_sketches:of_step", "== {len(of)}", "!= set()", NO_SUM),
    Bug(
        "what names nobody is seen twice",
        "gradient_sums:GradientSums._follow",
        "if not (seen or verdict.ranks) or",
        "if",
        NO_SUM,
    ),
    Bug("a process that is missing is named", "gradient_sums:judge", '("missing", -1.0), ', "", ADDS_UP),
    Bug("a process that is counted twice is named", "gradient_sums:judge", ', ("twice", 1.0)', "", ADDS_UP),
    Bug(
        "a process that got something else is named", "gradient_sums:judge", "if not wrong.all():", "if False:", ADDS_UP
    ),
    Bug(
        "processes that keep their own",
        "gradient_sums:judge",
        'is_part else "own"',
        'is_part else "apart"',
        ADDS_UP,
    ),
    Bug(
        "what one process got of a part is its own alone",
        "gradient_sums:judge",
        '"alone" if is_part',
        '"own" if is_part',
        f"{SUMS}::test_of_a_sum_that_is_kept_in_parts_who_holds_one_says_what_it_got",
    ),
    Bug(
        "a part that is wrong has its next turn later where there are many",
        "gradient_sums:GradientSums._goes_on",
        "max(AGAIN_STEPS, STEPS_A_RANK * num_ranks)",
        "8",
        f"{SUMS}::test_parts_that_one_process_alone_gets_wrong_are_seen_again_in_its_next_turn",
    ),
    Bug(
        "a process is named only where no other fits",
        "gradient_sums:judge",
        "fits[others[0]] > max(",
        "True or fits[others[0]] > max(",
        f"{SUMS}::test_a_rank_is_named_only_where_no_other_fits",
    ),
    Bug(
        "an update that goes astray once",
        "weight_updates:WeightUpdates._again",
        "return len(steps) + 1 >= times",
        "return True",
        SILENT,
    ),
    Bug(
        "an update that goes astray is told of its own tensor",
        "weight_updates:WeightUpdates._of_rank",
        'self._again("update-astray", about, step)',
        'self._again("update-astray", "", step)',
        SILENT,
    ),
    Bug("a rate that doubles", "weight_updates", "RATE_LEAP = 3.0", "RATE_LEAP = 1.5", SILENT),
    Bug(
        "what an update did has a place",
        "weight_updates:WeightUpdates._finding",
        "if module and f.module == module",
        "if f.module == about",
        TOLD,
    ),
    Bug(
        "weights that were coarse from the start",
        "weight_updates:WeightUpdates._of_rank",
        'if self._first["weights-rounded "] > FROM_THE_START',
        "if True",
        f"{UPDATES}::test_weights_that_were_coarse_from_the_start_are_information",
    ),
    Bug(
        "an update that always went astray",
        "weight_updates:WeightUpdates._of_rank",
        'if self._first[f"update-astray {about}"] > BY_HABIT',
        "if True",
        f"{UPDATES}::test_an_update_that_went_astray_from_the_start_is_information",
    ),
    Bug(
        "gradients that are left go on",
        "weight_updates:WeightUpdates._is_due",
        "if step - last < REPEAT_STEPS:",
        "if last >= 0:",
        f"{UPDATES}::test_what_goes_on_is_one_incident",
    ),
    Bug(
        "groups that always held copies",
        "copies:CopiedRows._is_more",
        "share < most + MORE",
        "share < MORE",
        f"{UPDATES}::test_rows_that_are_copies_are_told_where_they_were_not_and_groups_that_always_were_are_silent",
    ),
    Bug(
        "labels that stand among the tokens",
        "composition",
        "NAMES = (MASK, SCORED, CONCENTRATION, TARGETS, SHIFTS[0])",
        "NAMES = (MASK, SCORED, CONCENTRATION, TARGETS)",
        f"{UPDATES}::test_labels_that_stand_where_they_are_asked_for_are_information",
    ),
    Bug(
        "a learning rate below zero",
        "weight_updates:WeightUpdates.observe",
        'and not (view.scalar("lr") or 0.0) < 0',
        "",
        f"{UPDATES}::test_a_learning_rate_below_zero_is_told_with_its_step_and_value",
    ),
    Bug(
        "a gradient that arrives a little otherwise",
        "weight_updates:WeightUpdates._arrivals",
        "off[name] >= FAR_APART and ",
        "",
        f"{UPDATES}::test_gradients_that_always_were_others_or_are_nearly_right_are_information",
    ),
    Bug(
        "gradients that arrive as zeros",
        "weight_updates:WeightUpdates._arrivals",
        "if flushed >= FLUSHED_SHARE:",
        "if False:",
        TOLD,
    ),
    Bug(
        "the gradient that is furthest off is named",
        "weight_updates:WeightUpdates._arrivals",
        "name = max(off,",
        "name = min(off,",
        TOLD,
    ),
    Bug(
        "normal noise beside a parameter of few elements",
        "weight_updates:WeightUpdates._arrivals",
        "normal > 0 and normal + num_few >= len(off)",
        "normal >= len(off)",
        f"{UPDATES}::test_normal_noise_on_gradients_is_information_and_few_elements_do_not_warn",
    ),
    Bug(
        "few elements do not warn",
        "weight_updates:WeightUpdates._arrivals",
        "FAR_APART and not few",
        "FAR_APART",
        f"{UPDATES}::test_normal_noise_on_gradients_is_information_and_few_elements_do_not_warn",
    ),
    Bug(
        "what happens to gradients on their way makes no operand wrong",
        "detect.finding",
        '    "gradient-apart": ON_THE_WAY,\n',
        "",
        f"{UPDATES}::test_what_happens_on_the_way_takes_in_no_fault_of_an_operand",
    ),
    Bug(
        "information takes nothing in",
        "finding:Finding.kind",
        'BLIND if told == ON_THE_WAY and self.severity == "info" else told',
        "told",
        f"{UPDATES}::test_information_takes_in_no_batch_and_no_divergence",
    ),
    Bug(
        "where most weights were written a model was loaded",
        "corruption:Corruption._leap",
        "if written is not None and not first and loads_most(*written[:2]):",
        "if False:",
        f"{ANEW}::test_where_most_weights_were_written_a_model_was_loaded",
    ),
    Bug(
        "values that break behind a load are a page",
        "corruption:Corruption._leap",
        "if written is not None and not first and loads_most(*written[:2]):",
        "if written is not None and loads_most(*written[:2]):",
        f"{ANEW}::test_where_most_weights_were_written_a_model_was_loaded",
    ),
    Bug(
        "what was as large before grows again",
        "optimizer_divergence.detector:Divergence._judge",
        "growing[: len(self._level)] &= ~(history[-1][: len(self._level)] <= self._level)",
        "pass",
        f"{ANEW}::test_weights_of_earlier_that_grow_again_diverge_when_they_are_larger_than_they_were[1.75-says0]",
    ),
    Bug(
        "what grows beyond what it was diverges",
        "optimizer_divergence.detector:Divergence._judge",
        "<= self._level)",
        "<= np.inf)",
        f"{ANEW}::test_weights_of_earlier_that_grow_again_diverge_when_they_are_larger_than_they_were[6.0-says1]",
    ),
    Bug(
        "what is flushed is said of the parameter that lost most",
        "weight_updates:WeightUpdates._arrivals",
        "if flushed > known.flushed:",
        "if True:",
        f"{UPDATES}::test_what_is_flushed_is_said_of_the_parameter_that_lost_most",
    ),
]
