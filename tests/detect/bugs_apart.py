"""What is broken on purpose in what keeps faults apart: from information, from other places, from attempts that are over."""

from __future__ import annotations

from support.planted import Bug

HABITS = "tests/incidents/test_habits.py"
BREAKS = f"{HABITS}::test_what_breaks_in_it_opens_a_critical_incident_with_its_notice"

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
        'if i.row["severity"] == "info" and finding.mode in NONFINITE_MODES:',
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
]
