"""What is broken on purpose in what is kept of a run, for how long, and in copies of it."""

from __future__ import annotations

from support.planted import Bug

T = "tests/store"
LATER = f"{T}/test_later_attempts.py"
AT = f"{T}/test_last_step.py::test_ranks_that_go_back_one_after_the_other_take_the_last_step_with_them"
QUIET = f"{T}/test_quiet_runs.py"
STEPLESS = f"{QUIET}::test_a_batch_without_steps_leaves_once_it_was_seen_and_is_known_when_it_comes_again"
AGAIN = f"{T}/test_begins_again.py"
FEWER = f"{T}/test_fewer_ranks.py::test_steps_computed_again_are_of_the_ranks_that_are_left"
METRICS = (
    "tests/collector/test_metrics.py::test_of_a_run_that_goes_back_in_place_the_newest_values_are_those_of_where_it_is"
)
BYTES = f"{T}/test_retention.py::test_the_bytes_of_a_cell_are_those_that_are_there"

KEPT = [
    Bug(
        "a backup ends while others commit",
        "store.backup:_sqlite",
        "from_.backup(into)",
        "from_.backup(into, pages=4096)",
        f"{T}/test_commands.py::test_a_backup_ends_though_others_commit_all_the_while",
    ),
    Bug(
        "a host that falls silent is noticed",
        "db.dialect:postgresql_engine",
        "        _impatient(url),",
        "        url,",
        "tests/collector/test_database_away.py::test_no_connection_waits_for_a_host_that_fell_silent",
    ),
    Bug(
        "sheets that are written anew are counted once",
        "store.rollup:roll_up",
        "shown_rank=shown[1], num_bytes=num_bytes)",
        "shown_rank=shown[1], num_bytes=cell.num_bytes + num_bytes)",
        BYTES,
    ),
    Bug(
        "what goes of a cell is counted no more",
        "store.retention:_drop",
        "num_bytes = max(0, num_bytes - size)",
        "num_bytes = max(size, num_bytes)",
        BYTES,
    ),
    Bug(
        "a newer attempt replaces what is rolled up",
        "store.compact:_way",
        "if group.attempt <= past:",
        "if past:",
        f"{LATER}::test_steps_computed_again_after_a_day_replace_those_in_the_roll_up",
    ),
    Bug(
        "hot steps of a newer attempt replace what is rolled up",
        "store.attempts:owners",
        "for key in ((rank, step), (t.ROLLED_RANK, step)):",
        "for key in ((rank, step),):",
        f"{LATER}::test_steps_computed_again_after_a_day_replace_those_in_the_roll_up",
    ),
    Bug(
        "the mean of a loss outlives the rows of its ranks",
        "store.rollup:roll_up",
        "put_scalar_block(conn, run_id, tenant, step0, past)",
        "put_scalar_block(conn, run_id, tenant, step0)",
        f"{LATER}::test_steps_computed_again_after_a_day_replace_those_in_the_roll_up",
    ),
    Bug(
        "a rank whose detail stays is counted in its roll-up alone",
        "store.reading:detail_keys",
        "if attempt > past or (attempt, r) == (past, t.ROLLED_RANK)",
        "if True",
        f"{LATER}::test_the_detail_of_a_rank_that_an_incident_names_is_not_counted_twice",
    ),
    Bug(
        "a run that went back in place is at the step it is at",
        "store.last_step:now_at",
        "seq_at.get(batch.rank, batch.seq) < batch.seq",
        "False",
        f"{AT} {METRICS}",
    ),
    Bug(
        "a rank that is behind has not gone back",
        "store.last_step:now_at",
        "if there_at is None or not batch.began_at < there_at",
        "",
        AT,
    ),
    Bug(
        "a batch that comes late is no step back",
        "store.last_step:now_at",
        "seq_at.get(batch.rank, batch.seq) < batch.seq",
        "batch.rank in seq_at",
        f"{T}/test_last_step.py::test_a_batch_of_before_that_comes_late_is_no_step_back",
    ),
    Bug(
        "the loss of a run that went back in place is that of where it is",
        "run_metrics:NewestScalars._newest_step",
        "looked > run.last_step",
        "False",
        METRICS,
    ),
    Bug(
        "so are the newest values of its sites",
        "store.totals:_add",
        "newest > tuple(at)",
        "False",
        METRICS,
    ),
    Bug(
        "records of ranks that are no more do not count",
        "store.attempts:owners",
        "if fewer:",
        "if False:",
        FEWER,
    ),
    Bug(
        "scalars of ranks that are no more do not count",
        "store.scalars:_fetch",
        "of_name[counts]",
        "of_name",
        FEWER,
    ),
    Bug(
        "ranks that are no more are not exported",
        "export.tables:_ends",
        'found[counting(fewer, found["rank"], found["step"], found["attempt"])]',
        "found",
        FEWER,
    ),
    Bug(
        "a rank that has not come yet counts",
        "store.attempts:counting",
        "(rank < world_size) | ",
        "",
        f"{T}/test_fewer_ranks.py::test_a_rank_that_is_one_of_them_and_has_not_come_yet_stays",
    ),
    Bug(
        "what each rank computed last is read apart",
        "store.reading:_together",
        "apart=rank is not None",
        "",
        FEWER,
    ),
    Bug(
        "tile maps of a newer attempt are newer",
        "store.tile_maps:prune",
        ".order_by(start.desc(), m.step.desc())",
        ".order_by(m.step.desc())",
        f"{AGAIN}::test_its_tile_maps_are_the_newest",
    ),
    Bug(
        "the map that is shown is of the newest attempt",
        "store.tile_maps:_newest_step",
        "start.desc(), m.step.desc()",
        "m.step.desc()",
        f"{AGAIN}::test_its_tile_maps_are_the_newest",
    ),
    Bug(
        "a body of maps is known until its maps are old",
        "store.tile_maps:prune",
        "of_session = older(attempt.scalar_subquery(), k.step_max)",
        "of_session = k.step_max < oldest_kept.step",
        f"{AGAIN}::test_its_tile_maps_are_the_newest",
    ),
    Bug(
        "a rank that missed a start is in the newest one",
        "store.attempts:lowest_current",
        "sa.func.min(s.attempt)",
        "sa.func.max(s.attempt)",
        f"{AGAIN}::test_the_maps_of_a_rank_that_missed_a_start_are_of_now",
    ),
    Bug(
        "the bytes that are kept came last",
        "store.retention:_cells",
        "c.compacted_at.desc(), c.step0.desc()",
        "c.step0.desc()",
        f"{AGAIN}::test_the_bytes_that_are_kept_are_those_that_came_last",
    ),
    Bug(
        "a batch without steps is let go",
        "compactor:Compactor._run",
        "done.num_groups += bool(let_go_stepless(self._db, run_id, tenant, now, cool_after_s=self._cool_after_s))",
        "pass",
        STEPLESS,
    ),
    Bug(
        "a batch without steps waits for the detectors",
        "store.stepless:let_go_stepless",
        "b.step_min.is_(None), b.detected != t.BATCH_PENDING",
        "b.step_min.is_(None)",
        STEPLESS,
    ),
    Bug(
        "a batch that is let go is known when it comes again",
        "store.compact:release",
        "batch_dedup.enter(conn, rows)",
        "pass",
        STEPLESS,
    ),
    Bug(
        "a run that is over is not looked at each time",
        "compactor:Compactor._prune",
        "since = now - settled_after_s(self._policy)",
        "since = None",
        f"{QUIET}::test_retention_looks_at_silent_runs_once_a_day",
    ),
    Bug(
        "a silent run with limits of its own is looked at",
        "store.retention:_runs",
        "sa.or_(r.last_seen_at >= heard_since, limits)",
        "r.last_seen_at >= heard_since",
        f"{QUIET}::test_retention_looks_at_silent_runs_once_a_day",
    ),
    Bug(
        "days of a policy are waited for",
        "store.retention:settled_after_s",
        "(policy.keep_days or 0.0) * DAY_S",
        "0.0",
        f"{QUIET}::test_what_a_policy_deletes_with_time_goes_while_a_run_is_looked_at",
    ),
    Bug(
        "steps that come slowly are compacted together",
        "store.compact:groups_of",
        "if newest <= now - cool_after_s or oldest <= now - cool_after_s * WAITS_TIMES:",
        "if True:",
        f"{T}/test_compaction.py::test_steps_that_come_slowly_are_compacted_together",
    ),
    Bug(
        "tile maps do not wait for the row of their run",
        "store.tile_maps:commit_tile_maps",
        "heard.with_for_update(key_share=True, skip_locked=True)",
        "heard.with_for_update(key_share=True)",
        f"{T}/test_maps_beside_batches.py::test_neither_waits_for_the_other_in_turn",
    ),
    Bug(
        "logged values go with the detail of their rank",
        "store.retention:_delete_steps",
        ", (t.logged, t.logged.c.rank > first)):",
        ",):",
        f"{T}/test_logged_kept.py::test_of_each_name_the_first_rank_that_logged_it_stays",
    ),
    Bug(
        "of each logged name a rank stays",
        "store.retention:_delete_steps",
        "(t.logged, t.logged.c.rank > first)",
        "(t.logged, sa.true())",
        f"{T}/test_logged_kept.py::test_of_each_name_the_first_rank_that_logged_it_stays",
    ),
    Bug(
        "a run may keep everything",
        "store.retention:_policy_of",
        "name: value or None for name",
        "name: value for name",
        f"{T}/test_commands.py::test_a_run_that_is_to_keep_everything_does",
    ),
    Bug(
        "a limit of the command line counts for a run with its own",
        "store.retention:_policy_of",
        "and name not in given",
        "",
        f"{T}/test_commands.py::test_a_run_that_is_to_keep_everything_does",
    ),
    Bug(
        "a run that fell silent is judged while others send",
        "pipeline.detect_worker:DetectWorker._work",
        "if not taken or time.monotonic() - self._ticked_at >= IDLE_S:",
        "if not taken:",
        "tests/collector/test_many_runs.py::test_a_run_that_fell_silent_is_judged_though_others_send",
    ),
    Bug(
        "an engine that leaves memory is saved",
        "pipeline.run_engines:RunEngines.of",
        "self._put_away(out, self._running.pop(out))",
        "self._running.pop(out)",
        "tests/collector/test_many_runs.py::test_an_engine_that_leaves_memory_is_saved",
    ),
    Bug(
        "of an incident that lasts no more maps are asked for",
        "server/fp8watch_server/store/commit.py",
        "_i.last_step <= _i.first_step + CAPTURED_SPAN_STEPS",
        "_i.last_step >= _i.first_step",
        f"{T}/test_lasting_incidents.py::test_maps_are_asked_for_in_its_first_steps",
    ),
    Bug(
        "an attempt that is over asks for no maps",
        "server/fp8watch_server/store/commit.py",
        "_i.attempt\n        >= sa.select",
        "_i.attempt\n        <= sa.select",
        f"{T}/test_lasting_incidents.py::test_no_maps_are_asked_for_because_of_an_attempt_that_is_over",
    ),
    Bug(
        "an agent sends no maps of steps that are far ahead",
        "recorder:Recorder.wanted_captures",
        "if first - 1 <= last_step <= last",
        "if last_step <= last",
        "tests/agent/test_delivery.py::test_capture_requests_are_read_from_the_acknowledgement",
    ),
    Bug(
        "of an incident that lasts detail is kept around its ends",
        "store.retention:_incidents",
        "for end in (first, last)",
        "for end in range(first, last + 1)",
        f"{T}/test_lasting_incidents.py::test_maps_and_detail_are_kept_around_its_ends",
    ),
]
