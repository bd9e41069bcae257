"""What is broken on purpose in waiting for the ranks of a job, and the test that sees it."""

from __future__ import annotations

from support.planted import Bug

COME = "tests/detect/test_ranks_come.py"
LATE = "tests/collector/test_late_steps.py"
REGISTER = f"{COME}::test_ranks_that_register_when_the_others_have_said_all_are_compared_with_them[corruption-by-hash]"
KEPT = f"{COME}::test_what_ranks_kept_while_the_collector_was_away_is_compared[corruption-by-hash]"
NEVER = f"{COME}::test_a_rank_that_never_comes_holds_nobody_up_for_longer_than_a_silent_one"
COUNTED = f"{COME}::test_steps_of_no_statistic_are_counted_for_their_session_and_more_of_a_step_is_none"

OF_RANKS = [
    Bug(
        "ranks that have not registered are waited for",
        "step_alignment:Assembly._complete",
        "if self._ranks_come() and len(self._ranks) < self._num_ranks:",
        "if False:",
        REGISTER,
    ),
    Bug(
        "a job says how many ranks it has",
        "engine:DetectionEngine.add_sessions",
        "self._assembly.expect(facts.rank, facts.world_size)",
        "self._assembly.expect(facts.rank)",
        REGISTER,
    ),
    Bug(
        "ranks come back behind an outage",
        "step_alignment:Assembly.heard",
        "if self._heard_at is None or now - self._heard_at > self._silence_s:",
        "if self._heard_at is None:",
        KEPT,
    ),
    Bug(
        "a rank that is far behind comes back",
        "step_alignment:Assembly._is_live",
        "if rank.ended or self._ranks_come():",
        "if rank.ended:",
        KEPT,
    ),
    Bug(
        "ranks that come are waited for longer than one that is late",
        "step_alignment:Assembly._complete",
        "if self._ranks_come() or self._now is None or not pending.at:",
        "if self._now is None or not pending.at:",
        KEPT,
    ),
    Bug(
        "a rank that ended does not come back",
        "step_alignment:Assembly._is_live",
        "return not rank.ended",
        "return True",
        f"{COME}::test_a_rank_that_ended_is_not_waited_for_behind_an_outage",
    ),
    Bug(
        "a rank that never comes is given up",
        "step_alignment:Assembly._ranks_come",
        "and self._now < self._ranks_come_until",
        "",
        NEVER,
    ),
    Bug(
        "few ranks may be further apart while they come",
        "step_alignment:Assembly._max_pending",
        "max(MAX_PENDING_STEPS, MAX_PENDING_WHILE_RANKS_COME // max(1, len(self._ranks), self._num_ranks))",
        "MAX_PENDING_STEPS",
        f"{COME}::test_what_waits_while_ranks_come_is_bounded[2]",
    ),
    Bug(
        "of many ranks few steps wait while they come",
        "step_alignment:Assembly._max_pending",
        "// max(1, len(self._ranks), self._num_ranks)",
        "// max(1, len(self._ranks))",
        f"{COME}::test_what_waits_while_ranks_come_is_bounded[1000]",
    ),
    Bug(
        "ranks of a new attempt come anew",
        "step_alignment:Assembly.restart",
        "self._heard_at = self._ranks_come_until = None",
        "pass",
        f"{COME}::test_a_new_attempt_waits_for_its_ranks_again",
    ),
    Bug(
        "how many ranks a job has is not forgotten",
        "step_alignment:Assembly.expect",
        "num_ranks or self._num_ranks",
        "num_ranks or 1",
        f"{COME}::test_a_new_attempt_waits_for_its_ranks_again",
    ),
    Bug(
        "late steps are counted",
        "engine:DetectionEngine.observe",
        "elif not again:",
        "elif False:",
        f"{COUNTED} {LATE}::test_late_steps_are_counted_once_and_said[sqlite]",
    ),
    Bug(
        "more of a step is not counted as late",
        "engine:DetectionEngine.observe",
        "elif not again:",
        "else:",
        COUNTED,
    ),
    Bug(
        "late steps are handed over once",
        "rank_progress:RankProgress.take_left_out",
        "out, self._left_out = list(self._left_out.values()), {}",
        "out = list(self._left_out.values())",
        f"{COUNTED} {LATE}::test_late_steps_are_counted_once_and_said[sqlite]",
    ),
    Bug(
        "late steps add up",
        "late_steps",
        "num_late_steps=_s.num_late_steps + ",
        "num_late_steps=",
        f"{LATE}::test_late_steps_are_counted_once_and_said[sqlite]",
    ),
    Bug(
        "late steps of before are of no restart",
        "pipeline.run_engines",
        "        made.take_notices()\n",
        "",
        f"{LATE}::test_a_collector_that_begins_again_counts_none_of_them_twice[sqlite]",
    ),
    Bug(
        "many late steps ask for a look",
        "pages.coverage:_agent",
        'if session["num_late_steps"] >= MANY_LATE_STEPS:',
        "if False:",
        f"{LATE}::test_late_steps_are_counted_once_and_said[sqlite]",
    ),
]
