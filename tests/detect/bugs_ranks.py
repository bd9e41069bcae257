"""What is broken on purpose in waiting for the ranks of a job, and the test that sees it."""

from __future__ import annotations

from support.planted import Bug

COME = "tests/detect/test_ranks_come.py"
LATE = "tests/collector/test_late_steps.py"
REGISTER = f"{COME}::test_ranks_that_register_when_the_others_have_said_all_are_compared_with_them[corruption-by-hash]"
FIRST = f"{COME}::test_what_ranks_kept_is_compared_though_each_sends_its_newest_batch_first[corruption-by-hash-2]"
NEVER = f"{COME}::test_a_rank_that_never_comes_holds_nobody_up_for_longer_than_one_that_is_late"
COUNTED = f"{COME}::test_steps_of_no_statistic_are_counted_for_their_session_and_more_of_a_step_is_none"

OF_RANKS = [
    Bug(
        "a job says how many ranks it has",
        "engine:DetectionEngine.add_sessions",
        "self._assembly.expect(facts.rank, facts.world_size)",
        "self._assembly.expect(facts.rank)",
        REGISTER,
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
    Bug(
        "ranks that have not registered are waited for",
        "step_alignment:Assembly._complete",
        "if self._ranks_come():",
        "if False:",
        REGISTER,
    ),
    Bug(
        "a rank that never comes is given up",
        "step_alignment:Assembly.heard",
        "self._ranks_come_until = now + self._late_rank_s",
        "self._ranks_come_until = now + 100 * self._late_rank_s",
        NEVER,
    ),
    Bug(
        "ranks come back behind an outage",
        "step_alignment:Assembly.heard",
        "else now - self._heard_at > self._silence_s:",
        "else False:",
        FIRST,
    ),
    Bug(
        "a step that a rank has kept is waited for though a newer one has come",
        "step_alignment:Assembly._is_awaited",
        "if self._before(self._come_back_until):",
        "if False:",
        FIRST,
    ),
    Bug(
        "ranks that come back are waited for longer than one that is late",
        "step_alignment:Assembly._complete",
        "if self._before(self._come_back_until) or self._now is None or not pending.at:",
        "if self._now is None or not pending.at:",
        f"{COME}::test_what_ranks_kept_while_the_collector_was_away_is_compared[corruption-by-hash]",
    ),
    Bug(
        "what was kept comes before the newest",
        "step_alignment:Assembly._is_gap",
        "        if self._before(self._come_back_until):\n            return True\n",
        "",
        f"{COME}::test_what_one_rank_kept_is_judged_in_its_order[True]",
    ),
    Bug(
        "what was kept before there was a collector comes before the newest",
        "step_alignment:Assembly._is_gap",
        "return self._before(self._come_back_until) and any(rank.keeps for rank in self._ranks.values())",
        "return False",
        f"{COME}::test_what_one_rank_kept_is_judged_in_its_order[False]",
    ),
    Bug(
        "a rank that ended does not come back",
        "step_alignment:Assembly._is_awaited",
        "return not state.ended",
        "return True",
        f"{COME}::test_a_rank_that_ended_is_not_waited_for_behind_an_outage",
    ),
    Bug(
        "a clock that was wrong once is set right",
        "step_alignment:Assembly.tick",
        "if self._now is not None and at < self._now - self._silence_s:",
        "if False:",
        f"{COME}::test_a_clock_that_jumps_holds_nobody_up_for_longer[86400.0] "
        f"{COME}::test_a_clock_that_jumps_holds_nobody_up_for_longer[-3600.0]",
    ),
    Bug(
        "large batches may wait",
        "step_alignment",
        "MAX_PENDING_STEPS, MAX_PENDING_RECORDS = 512, 1 << 18\n",
        "MAX_PENDING_STEPS, MAX_PENDING_RECORDS = 64, 1 << 18\n",
        f"{COME}::test_batches_of_more_steps_than_may_wait_of_large_ones_are_compared",
    ),
    *(
        Bug(
            f"what waits is bounded: {what}",
            "step_alignment:Assembly._is_full",
            old,
            new,
            f"{COME}::test_what_waits_is_bounded[{case}]",
        )
        for what, old, new, case in (
            ("steps", "num > MAX_PENDING_STEPS or ", "", "1-512"),
            ("records", " or records > MAX_PENDING_RECORDS", "", "2621-100"),
            ("many records", "num > VERY_FEW_STEPS and records > FEW_RECORDS", "False", "104857-40"),
        )
    ),
    Bug(
        "ranks of a new attempt come anew",
        "step_alignment:Assembly.restart",
        "self._heard_at = self._ranks_come_until = self._come_back_until = None",
        "pass",
        f"{COME}::test_a_new_attempt_waits_for_its_ranks_again",
    ),
    Bug(
        "a rank that registers is heard of when the clock next moves",
        "step_alignment:Assembly.expect",
        "self._unheard |= state.heard_at is None",
        "state.heard_at = self._now if state.heard_at is None else state.heard_at",
        f"{COME}::test_ranks_of_a_later_attempt_are_compared_as_well[False-corruption-by-hash]",
    ),
    Bug(
        "an attempt begins once, as its ranks have registered",
        "session_state:Attempt.is_joined_at",
        "return number == self.number",
        "return False",
        f"{COME}::test_ranks_of_a_later_attempt_are_compared_as_well[True-corruption-by-hash]",
    ),
    Bug(
        "an attempt begins once, as the steps say",
        "session_state:Attempt.is_joined_at",
        "and abs(step - self.step) <= within",
        "and False",
        f"{COME}::test_ranks_that_go_back_in_place_do_so_together",
    ),
    Bug(
        "a rank that begins again and again begins new attempts",
        "session_state:Attempt.is_joined_at",
        "return not took_part and ",
        "return ",
        f"{COME}::test_ranks_that_go_back_in_place_do_so_together",
    ),
    Bug(
        "what was not judged is not settled",
        "engine:DetectionEngine.delivered_step",
        "[] if waits is None else [waits - 1]",
        "[]",
        f"{COME}::test_ranks_that_go_back_in_place_do_so_together",
    ),
    Bug(
        "a session of an attempt before is not the newest",
        "engine:DetectionEngine._begin_session",
        "if same_rank and 0 < number < newest:",
        "if False:",
        f"{COME}::test_a_session_of_an_attempt_before_that_is_heard_late_is_not_the_newest",
    ),
    Bug(
        "more of a step is not counted as late",
        "engine:DetectionEngine.observe",
        "            elif not again:\n",
        "            else:\n",
        COUNTED,
    ),
    Bug(
        "no state is saved without what waits for ranks",
        "detect_worker:DetectWorker._save",
        "if running.engine.settling:",
        "if False:",
        f"{LATE}::test_what_waits_for_ranks_is_judged_though_the_collector_begins_again[sqlite]",
    ),
    Bug(
        "engines that hold steps back stay in memory",
        "run_engines:RunEngines.of",
        "if not self._running[k].engine.settling",
        "if True",
        f"{LATE}::test_what_waits_for_ranks_is_judged_though_other_runs_have_their_turns[sqlite]",
    ),
    Bug(
        "a replay waits for nobody at its end",
        "pipeline.replay:replay",
        "if last is not None:",
        "if False:",
        f"{LATE}::test_a_replay_ends_with_what_waits_for_ranks[sqlite]",
    ),
]
