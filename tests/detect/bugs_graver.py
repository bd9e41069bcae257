"""What is broken on purpose in what an incident takes in: nothing graver, nothing elsewhere, nothing of another topic."""

from __future__ import annotations

from support.planted import Bug

GRAVER = "tests/incidents/test_graver.py::test"
APART = "tests/incidents/test_apart_in_place.py::test"
NORM = "tests/detect/test_unfrozen_norm.py::test"
GRAVEST = "tests/detect/test_gravest_is_named.py::test"

OF_GRAVER = [
    Bug(
        "information takes in nothing that is graver",
        "match:root_of",
        'if i.row["severity"] == "info" and finding.severity != "info":',
        'if i.row["severity"] == "info" and finding.mode in NONFINITE_MODES:',
        f"{GRAVER}_information_takes_in_nothing_graver",
    ),
    Bug(
        "a root of one rank is known by its kind",
        "statistics:Statistics.observe",
        "self._note_root(f.kind, f,",
        "self._note_root(f.mode, f,",
        f"{GRAVER}_what_nobody_observes_is_no_reason_for_a_clip",
    ),
    Bug(
        "settings of modules explain nothing",
        "finding:Finding.kind",
        'if self.mode == "recipe-mismatch" and self.severity == "info":',
        "if False:",
        f"{GRAVER}_what_changed_for_the_model_is_information_that_explains_nothing",
    ),
]

OF_PLACES = [
    Bug(
        "an incident takes in no later failure at another place",
        "match:_is_told",
        'return finding.severity == "info" or not _is_elsewhere(i, finding, sites)',
        "return True",
        f"{APART}_a_failure_of_the_same_mode_at_another_place_much_later_is_told",
    ),
    Bug(
        "information opens nothing beside a warning of its mode",
        "match:_is_told",
        'finding.severity == "info" or not',
        "not",
        f"{APART}_what_begins_together_is_one_failure_at_however_many_places",
    ),
    Bug(
        "what begins together is one failure",
        "match:_is_told",
        "if together or finding.mode in NONFINITE_MODES",
        "if finding.mode in NONFINITE_MODES",
        f"{APART}_what_begins_together_is_one_failure_at_however_many_places",
    ),
    Bug(
        "values that break are one failure wherever",
        "match:_is_told",
        "if together or finding.mode in NONFINITE_MODES or",
        "if together or",
        f"{APART}_values_that_break_are_one_failure_wherever",
    ),
    Bug(
        "operands of a module are at one place",
        "match:_places",
        "theirs = {sites[s].module for",
        "theirs = {(sites[s].module, s) for",
        f"{APART}_of_one_place_it_is_the_same_failure_though_not_all_operands_were_named",
    ),
    Bug(
        "places that are not all named are not elsewhere",
        "match:_is_elsewhere",
        "theirs and mine and all_named and not",
        "theirs and mine and not",
        f"{APART}_of_one_place_it_is_the_same_failure_though_not_all_operands_were_named",
    ),
    Bug(
        "another topic is another failure",
        "match:_is_told",
        "i.topic is not None and i.topic != finding.topic",
        "False",
        f"{APART}_another_topic_of_a_mode_is_another_failure",
    ),
    Bug(
        "a topic is read back",
        "incidents.stored:load",
        'topic=root.get("topic")',
        'topic=root.get("topic", "")',
        f"{APART}_an_incident_of_an_earlier_version_has_no_topic_and_takes_all_in",
    ),
    Bug(
        "a page is about what made it one",
        "fold:_absorb",
        "    elif graver and not _is_explained(row, finding):",
        "    elif graver and row is None:",
        f"{APART}_what_becomes_critical_is_told_with_what_made_it_so",
    ),
    Bug(
        "where a page began stays",
        "fold:_absorb",
        "        incident.flow, incident.weight_born, incident.origin_rank = began\n",
        "",
        f"{APART}_what_becomes_critical_is_told_with_what_made_it_so",
    ),
    Bug(
        "each topic comes and goes by itself",
        "messages:_fired_before",
        '"scalar" if row["mode"] == "scalar-shift" else "topic"',
        '"scalar" if row["mode"] == "scalar-shift" else "stride"',
        f"{APART}_of_one_mode_each_topic_comes_and_goes_by_itself",
    ),
]

OF_NORM = [
    Bug(
        "a norm of more weights is laid on nothing behind the backward pass",
        "gradient_factor:GradientFactor._finding",
        "behind = loss_moved is None and not changed and",
        "behind = loss_moved is None and",
        f"{NORM}_a_norm_that_triples_where_weights_are_unfrozen_is_information_that_says_so",
    ),
    Bug(
        "a norm of fewer weights is smaller",
        "gradient_factor:GradientFactor._finding",
        "if level > usual else self._of.ceased(NUM_LAST)",
        "if level > usual else (0, 0)",
        f"{NORM}_a_norm_that_falls_where_weights_are_frozen_is_information_that_says_so",
    ),
    Bug(
        "what was unfrozen long before is no reason",
        "gradients_in_norm:GradientsInNorm.began",
        "self._of_all(self._first >= at)",
        "self._of_all(self._first >= 20)",
        f"{NORM}_a_norm_that_triples_for_another_reason_stays_a_warning",
    ),
    Bug(
        "one weight of many moves no norm",
        "gradients_in_norm",
        "SHARE = 0.05\n",
        "SHARE = 0.0\n",
        f"{NORM}_a_norm_that_triples_for_another_reason_stays_a_warning",
    ),
    Bug(
        "a norm that grows is no norm of fewer weights",
        "gradient_factor:GradientFactor._finding",
        "self._of.began(NUM_LAST) if level > usual else self._of.ceased(NUM_LAST)",
        "max(self._of.began(NUM_LAST), self._of.ceased(NUM_LAST))",
        f"{NORM}_a_norm_that_triples_for_another_reason_stays_a_warning",
    ),
]

OF_DELAYED = [
    Bug(
        "the site is named that makes a clip grave",
        "families.delayed:_gravest_first",
        "    first = rows[grave[rows]][:1]\n",
        "    first = rows[:1]\n",
        f"{GRAVEST}_a_mild_clip_before_a_deep_one_in_data_flow_hides_no_page",
    ),
    Bug(
        "a clip is as grave as its gravest site",
        "families.delayed:Delayed._clip_finding",
        '"critical" if grave.any() else',
        '"critical" if grave[now.in_flow(mask)[0]] else',
        f"{GRAVEST}_a_mild_clip_before_a_deep_one_in_data_flow_hides_no_page",
    ),
    Bug(
        "of two that are as grave the first is named",
        "families.delayed:_gravest_first",
        "rows[grave[rows]][:1]",
        "rows[grave[rows]][-1:]",
        f"{GRAVEST}_of_two_that_are_as_grave_the_first_in_data_flow_is_named",
    ),
]
