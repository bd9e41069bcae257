"""Bugs in the check of checkpoints, in bisections, and in fixes as files."""

from __future__ import annotations

from support.planted import Bug

_C = "tests/diagnose/test_check_checkpoint.py::"
_B = "tests/diagnose/test_bisect.py::"
_F = "tests/incidents/test_fix_files.py::"
_P = "tests/pages/test_checkpoints.py::"
FAULTS = f"{_C}test_each_fault_is_named_with_its_tensor"
CHECKPOINT_BUGS = [
    Bug("codes without scales fail", "check_checkpoint:_check",
        'yield CheckpointFinding(FAIL, name, "scale present"', 'yield CheckpointFinding(WARN, name, "scale present"', FAULTS),
    Bug("scales are positive", "checkpoint_checks:scales", "& (s > 0)", "", FAULTS),
    Bug("empty codes fail", "checkpoint_checks:_fit", "if not bool(filled.any()):\n        yield",
        "if not bool(filled.any()):\n        return\n        yield", FAULTS),
    Bug("a scale that is too large is seen beside one that is too small", "checkpoint_checks:_fit",
        "worst = int(off.argmax())", "worst = int(off.abs().argmax())", FAULTS),
    Bug("a second moment without its first is looked at", "check_checkpoint:_check", "or name in paired:", "or name in paired | alone:",
        f"{_C}test_second_moments_without_first_ones_are_looked_at"),
    Bug("a first moment that is lost is told", "check_checkpoint:_check", "            if first:", "            if False:",
        f"{_C}test_a_first_moment_that_is_lost_is_a_warning"),
    Bug("v is 0 only where m is", "checkpoint_checks:moments", "if num_lost:", "if False:", FAULTS),
    Bug("one element does not hold a weight's energy", "checkpoint_checks:distribution",
        "v.amax**2 > ONE_ELEMENT * v.energy", "False", f"{_C}test_one_element_that_is_most_of_a_weight_is_named"),
    Bug("the same weight of other layers is compared", "check_checkpoint:_peers",
        "if abs(off) > FAR_FROM_PEERS:", "if False:", FAULTS),
    Bug("a scale may lie in another file", "checkpoint_files:Checkpoint.__init__",
        "for name, form in source.forms.items():", "for name, form in list(source.forms.items())[:1]:",
        f"{_C}test_scales_may_lie_in_another_file_and_what_the_index_lists_must_be_there"),
    Bug("nothing in the metadata is executed", "checkpoint_files:_OnlyTorch.find_class",
        "(module, name) not in _OF_METADATA", "False", f"{_C}test_nothing_in_a_checkpoint_is_executed"),
    Bug("of the package of the metadata only its classes are taken", "checkpoint_files:_OnlyTorch.find_class",
        "(module, name) not in _OF_METADATA", 'module.split(".")[0] != "torch"',
        f"{_C}test_no_function_of_torchs_checkpoints_is_called_for_its_metadata"),
    Bug("bits are held against the fingerprint", "check_checkpoint:_of_weight",
        "if now != was:", "if False:", f"{_C}test_the_bits_that_a_watch_saw_are_held_against_those_in_the_file"),
    Bug("a tensor that cannot be read is a finding", "checkpoint_files:DistributedFiles.read",
        "except (Exception, CheckpointException)", "except KeyError",
        f"{_C}test_a_file_that_was_cut_off_is_a_finding_or_a_reason"),
]  # fmt: skip
BISECT_BUGS = [
    Bug("a second culprit is sought", "bisect_search:fewest", "if rest and helps(frozenset(found)):", "if True:",
        f"{_B}test_several_culprits_are_found_and_nothing_else"),
    Bug("a ranking is tried from its front", "bisect_search:_shortest", "while ranked and", "while False and",
        f"{_B}test_a_good_ranking_costs_two_trials"),
    Bug("a single operand is tried", "diagnose.bisection:_operands_of", "left[i] = part", "pass",
        f"{_B}test_a_planted_culprit_is_named_with_its_operand"),
    Bug("several culprits are tried with their inputs together", "diagnose.bisection:_operands_of", "len(left) > 1 and", "False and",
        f"{_B}test_a_planted_culprit_is_named_with_its_operand"),
    Bug("high precision is tried as well", "diagnose.bisection:bisect", "if trials.run(frozenset(modules)).failed:", "if False:",
        f"{_B}test_what_fp8_does_not_explain_is_said"),
    Bug("finished trials are kept", "diagnose.bisection:_Trials._save", "if self._state is None:", "if True:",
        f"{_B}test_an_interrupted_bisection_goes_on_where_it_was"),
    Bug("a state that cannot be written is told before the first trial", "diagnose.bisection:_Trials.__init__",
        "            self._save()", "            pass",
        f"{_B}test_what_cannot_be_written_is_said_before_the_first_trial"),
    Bug("an error of files is traced where that is asked for", "bisect_command:arguments", "    add_traceback(parser)", "    pass",
        f"{_B}test_an_error_of_files_ends_with_two_and_is_traced_where_asked"),
    Bug("a training that raises has failed", "bisect_trial:main", "if _says_nothing(e) else True", "if _says_nothing(e) else False",
        f"{_B}test_a_training_that_raises_has_failed"),
    Bug("flags of torch and numpy are flags", "bisect_trial:_flags_and_losses", "result = plain()", "result = float(plain())",
        f"{_B}test_flags_and_losses_are_taken_as_torch_and_numpy_give_them"),
    Bug("a function that returns nothing says nothing", "bisect_trial:judged", 'else (None, "the function returned no losses")',
        'else (False, "no losses")', f"{_B}test_what_says_nothing_of_the_training_is_no_failure"),
    Bug("an error of the program or of memory is no failure", "bisect_trial:main", "None if _says_nothing(e) else True", "True",
        f"{_B}test_what_says_nothing_of_the_training_is_no_failure"),
    Bug("a rank without losses leaves the word to the others", "diagnose.bisection:_Trials._run",
        'if a["failed"] is not None), None)', "), None)",
        f"{_B}test_of_ranks_those_without_losses_leave_the_word_to_the_others"),
]  # fmt: skip
FIX_BUGS = [
    Bug("a token goes to its own collector", "fix_command:address", "if secret and collector and", "if False and",
        f"{_F}test_a_token_goes_to_the_collector_that_it_is_for_whatever_the_address_says"),
    Bug("a title stays in its line", "incidents.fix_files:one_line", 'c if c.isprintable() else " "', "c",
        f"{_F}test_a_title_stays_in_its_line_and_a_name_in_its_string"),
    Bug("torchao converts all but these", "incidents.fix_files:torchao", "fqn == name or", "",
        f"{_F}test_torchao_converts_all_but_these"),
    Bug("GEMMs are those that read the operand", "incidents.fix_files:Asked.gemms", "self.operands.get(module) or OPERANDS", "OPERANDS",
        f"{_F}test_yaml_says_which_gemms_leave"),
    Bug("a skipped step poisons no checkpoint of the run", "store.checkpoints:_bad",
        "found = [] if step is None else", "found = [Bad(first, POISONED, *name)] if step is None else",
        f"{_P}test_a_checkpoint_is_poisoned_from_the_failure_on_whenever_that_was_found"),
    Bug("poison is inherited", "store.checkpoints:checkpoints", "    _inherit(bad, _origins(conn, run_id, tenant, rows))\n", "",
        f"{_P}test_what_went_on_from_a_poisoned_one_is_poisoned_and_what_went_on_from_a_clean_one_is_not"),
    Bug("false alarms poison nothing", "store.checkpoints:checkpoints", 'if row["closed_as"] != "false-alarm":', "if True:",
        f"{_P}test_a_checkpoint_is_poisoned_from_the_failure_on_whenever_that_was_found"),
]  # fmt: skip
