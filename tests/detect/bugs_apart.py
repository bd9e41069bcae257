"""What is broken on purpose in what keeps faults apart: from information, from other places, from attempts that are over."""

from __future__ import annotations

from support.planted import Bug

HABITS = "tests/incidents/test_habits.py"
BREAKS = f"{HABITS}::test_what_breaks_in_it_opens_a_critical_incident_with_its_notice"
ORDER = "tests/detect/test_order.py"
KEPT = "tests/detect/test_kept_apart.py"
DATA = "tests/detect/test_batches.py"
LEAPS = "tests/detect/test_names_of_real_trainings.py::test_an_embedding_that_leaps_is_named_and_fp8_is_not[15.0-True] "
LEAPS += "tests/detect/test_names_of_real_trainings.py::test_an_embedding_that_leaps_is_named_and_fp8_is_not[4.0-True]"
GROWS = f"{DATA}::test_an_input_that_grows_is_no_matter_of_batches_that_come_again_or_labels_that_are_shifted"
OTHERWISE = f"{ORDER}::test_training_that_goes_back_behind_a_batch_that_was_sent_otherwise_begins_anew"

OF_APART = [
    Bug(
        "what breaks is no consequence of information",
        "engine:DetectionEngine._roll_up",
        'if f.mode in SPREADING and f.severity != "info":',
        "if f.mode in SPREADING:",
        BREAKS,
    ),
    Bug(
        "a habit takes in no noise",
        "finding:Finding.kind",
        'self.extra.get("kind") in _HABITS',
        "False",
        f"{HABITS}::test_it_takes_in_no_noise",
    ),
    Bug(
        "open information takes in nothing that breaks",
        "match:root_of",
        'if i.row["severity"] == "info" and finding.severity != "info":',
        "if False:",
        f"{HABITS}::test_information_of_an_earlier_version_takes_in_nothing_that_breaks",
    ),
    Bug(
        "weights that break are no matter of information",
        "match:target_of",
        ' and i.row["severity"] != "info"',
        "",
        f"{HABITS}::test_weights_that_break_are_no_matter_of_information",
    ),
    Bug(
        "a gap behind a restart ends no statistics",
        "engine:DetectionEngine._belongs",
        "last is None or stream.attempt == self._restarted",
        "last is None or not self._restarted",
        f"{ORDER}::test_many_steps_that_are_missing_behind_a_restart_end_no_statistics",
    ),
    Bug(
        "a rank that goes on is of the attempt that is on",
        "engine:DetectionEngine._belongs",
        "self._restarted if near else stream.attempt",
        "stream.attempt",
        f"{ORDER}::test_a_rank_that_goes_on_without_a_restart_is_missed_by_nobody_behind_a_gap",
    ),
    Bug(
        "late steps of the attempt before are of no statistics",
        "engine:DetectionEngine._belongs",
        "        return near\n",
        "        return True\n",
        f"{ORDER}::test_late_steps_of_the_attempt_before_are_of_no_statistics",
    ),
    Bug(
        "a cause mutes at its place",
        "statistics:Statistics._is_muted",
        'if not less and _reaches(root, {module} - {""}, mine):',
        "if True:",
        f"{KEPT}::test_an_expert_without_tokens_takes_in_what_is_wrong_in_its_module_and_nowhere_else "
        f"{KEPT}::test_a_scale_that_is_wrong_takes_in_the_noise_of_its_module_alone",
    ),
    Bug(
        "what leaped shows in what is behind it",
        "detect.precedence",
        "SHOWS_BEHIND = frozenset({LEAP, WEIGHT_LEAP, WEIGHT_FIRST})",
        "SHOWS_BEHIND: frozenset[str] = frozenset()",
        LEAPS,
    ),
    Bug(
        "of one step a cause takes in what is at its place",
        "statistics:without_consequences",
        "_reaches(root.kind, theirs, mine)",
        "True",
        f"{KEPT}::test_of_one_step_a_cause_takes_in_what_is_in_its_own_module",
    ),
    Bug(
        "a cause whose modules are not all named shows anywhere",
        "statistics:_modules",
        'if int(found.extra.get("num_sites", 0)) > len(ids):',
        "if False:",
        f"{KEPT}::test_of_one_step_a_cause_takes_in_what_is_in_its_own_module",
    ),
    Bug("a batch that comes again makes no input grow", "detect.finding", '    "repeated": BLIND,\n', "", GROWS),
    Bug("labels that are shifted make no input grow", "detect.finding", '    "labels": BLIND,\n', "", GROWS),
    Bug(
        "halves of a batch have the place of the whole",
        "engine:DetectionEngine.observe",
        "max(stream.last_seq, header.parent_seq)",
        "max(stream.last_seq, header.seq)",
        OTHERWISE,
    ),
    Bug(
        "a half that comes late is none of a training that went back",
        "engine:DetectionEngine._went_back",
        "batch.header.parent_seq",
        "batch.header.seq",
        OTHERWISE,
    ),
    Bug(
        "a state from behind a split batch",
        "session_state:Stream.upgraded",
        'fields["last_seq"] &= (1 << SPLIT_SHIFT) - 1',
        "pass",
        f"{ORDER}::test_a_state_from_behind_a_split_batch_knows_the_order_of_whole_ones",
    ),
    Bug(
        "noise that begins later elsewhere has its own place",
        "chronic_quantization_noise.detector:Noise.observe",
        "latches, float(within))",
        "latches, float('inf'))",
        f"{KEPT}::test_noise_that_begins_elsewhere_long_after_some_that_stays_is_told_with_its_place",
    ),
    Bug(
        "noise that begins together has one place",
        "chronic_quantization_noise.detector:Noise.observe",
        "latches, float(within))",
        "latches, 0.0)",
        f"{KEPT}::test_noise_that_begins_elsewhere_long_after_some_that_stays_is_told_with_its_place",
    ),
    Bug(
        "noise that a format always has is no fault",
        "chronic_quantization_noise.detector:Noise.observe",
        " & (now.sqnr_db < band + ORDINARY_DB)",
        "",
        f"{KEPT}::test_noise_that_rises_to_what_the_format_always_has_is_no_fault[32.9-told_as0]",
    ),
    Bug(
        "alarms that began apart are few",
        "hysteresis:began_apart",
        " and len(begins) < MAX_GROUPS",
        "",
        f"{KEPT}::test_alarms_that_began_apart_are_few_and_in_the_order_of_the_rows",
    ),
]
