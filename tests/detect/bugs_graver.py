"""What is broken on purpose in what an incident takes in: nothing graver, nothing elsewhere, nothing of another topic."""

from __future__ import annotations

from support.planted import Bug

GRAVER = "tests/incidents/test_graver.py::test"

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
