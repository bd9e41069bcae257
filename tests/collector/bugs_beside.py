"""What is broken on purpose where readers, people, ranks and other collectors are at work at the same time."""

from __future__ import annotations

from support.planted import Bug

CLOCKS = "tests/collector/test_many_runs.py::test_clocks_go_on_where_more_waits_than_a_round_takes"
A = "tests/collector/test_attempts.py"
L = "tests/collector/test_last_connections.py"
G = "tests/store/test_migrations_beside.py"
M = "tests/incidents/test_many_resolved.py"
P = "tests/collector/test_people_beside.py"
R = "tests/collector/test_readers_beside.py"

BESIDE = [
    Bug(
        "requests have connections of their own",
        "db.pools:for_requests",
        'if engine.dialect.name != "postgresql":',
        "if True:",
        f"{R}::test_ingest_goes_on_where_requests_have_taken_every_connection",
    ),
    Bug(
        "what comes back to a pool that was disposed of is closed",
        "db.closing_pool:ClosingPool._do_return_conn",
        "        record.close()\n",
        "",
        f"{L}::test_what_comes_back_to_a_pool_that_was_disposed_of_is_closed",
    ),
    Bug(
        "who waits at a pool that is disposed of has the next connection",
        "db.closing_pool:ClosingPool._do_return_conn",
        "super()._do_return_conn(record)  #",
        "pass  #",
        f"{L}::test_who_waits_at_a_pool_that_is_disposed_of_has_the_next_connection",
    ),
    Bug(
        "who waits for a thread with a connection leaves some to the threads",
        "http.databases:connection_in_turn",
        "async with state.turns, contextmanager_in_threadpool",
        "async with contextmanager_in_threadpool",
        f"{R}::test_more_readers_than_connections_hinder_neither_ingest_nor_each_other",
    ),
    Bug(
        "readiness waits behind no question",
        "api.readiness:readyz",
        "_ask, shards.home, limiter",
        "_ask, next(iter(shards.connections().__enter__().conns)).engine, limiter",
        f"{R}::test_ingest_goes_on_where_requests_have_taken_every_connection",
    ),
    Bug(
        "a worker that finds no connection forgets nothing",
        "leader_loop:LeaderLoop._one",
        "            self.num_failures += 1\n            return",
        "            self.num_failures += 1\n            self._forget()\n            return",
        f"{R}::test_a_worker_that_finds_no_connection_keeps_the_engines_of_all_runs",
    ),
    Bug(
        "an engine that has seen what was not committed goes",
        "detect_worker:DetectWorker._take",
        "            self._engines.drop(key)  # it may have seen uncommitted batches\n",
        "",
        f"{R}::test_what_was_seen_and_not_committed_is_seen_once_by_the_engine_that_goes_on",
    ),
    Bug(
        "a rank that missed a start is with the others in the next",
        "store.registrations:_begun_with",
        "return int(found or of_all)",
        "return after + 1",
        f"{A}::test_ranks_that_were_not_in_a_smaller_start_are_with_the_others_in_the_next",
    ),
    Bug(
        "what is told of later is in the attempt that it began with",
        "store.registrations:_begun_with",
        "found = of_all if of_all == after + 1 else",
        "found = of_all if True else",
        f"{A}::test_sessions_that_are_told_of_later_are_in_the_attempt_that_they_began_with",
    ),
    Bug(
        "an attempt that is over takes in nobody",
        "store.registrations:_begun_with",
        "        return of_all + 1\n",
        "        return of_all\n",
        f"{A}::test_a_rank_that_comes_first_after_a_long_silence_begins_an_attempt",
    ),
    Bug(
        "clocks that differ tear no start apart",
        "store.registrations:_begun_with",
        "s.last_seen_at >= now - OVER_AFTER_S, s.started_at >= started_at - OVER_AFTER_S",
        "s.last_seen_at >= started_at - OVER_AFTER_S",
        f"{A}::test_clocks_that_are_hours_ahead_of_the_collectors_tear_no_start_apart",
    ),
    Bug(
        "an action on a cause holds one incident at a time",
        "api.incident_actions:_change_in",
        "    num_changed = 0\n    for incident_id in asking:\n        with writing(engine) as conn:\n            row =",
        "    num_changed = 0\n    with writing(engine) as conn:\n        for incident_id in sorted(r.id for r in rows):\n            row =",
        f"{P}::test_neither_waits_for_the_other_with_what_the_other_wants_in_hand",
    ),
    Bug(
        "of what is over the incidents near a finding are loaded",
        "incidents.stored:resolved_near",
        "of_mode, *near)",
        "of_mode)",
        f"{M}::test_a_new_failure_asks_as_much_of_the_database_after_many_as_after_one",
    ),
    Bug(
        "a finding that comes late joins what is over and near",
        "incidents.stored:resolved_near",
        "t.last_step >= min(steps) - window",
        "t.last_step >= max(steps) + window",
        f"{M}::test_a_new_failure_asks_as_much_of_the_database_after_many_as_after_one",
    ),
    Bug(
        "clocks of runs go on however much of others waits",
        "detect_worker:DetectWorker._work",
        "if not taken or time.monotonic() - self._ticked_at",
        "if not taken or taken < BATCHES_AT_ONCE and time.monotonic() - self._ticked_at",
        f"{CLOCKS}_but_not_of_runs_whose_batches_wait",
    ),
    Bug(
        "no rank is late whose batch waits",
        "detect_worker:DetectWorker._work",
        "{*self._taken_to, *self._waiting()}",
        "self._taken_to",
        f"{CLOCKS}_but_not_of_runs_whose_batches_wait",
    ),
    Bug(
        "one collector migrates at a time",
        "db.migrations:_upgrade",
        "conn.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))",
        "pass",
        f"{G}::test_collectors_that_start_together_on_an_empty_database_all_start",
    ),
    Bug(
        "a migration that waits for a table lets others through",
        "db.migrations:_upgrade",
        "str(LOCK_MS)",
        '"0"',
        f"{G}::test_who_asks_a_table_does_not_wait_behind_a_migration_that_waits_for_it",
    ),
    Bug(
        "a migration is begun again while a table is in use",
        "db.migrations:upgrade",
        "time.monotonic() > until:",
        "True:",
        f"{G}::test_who_asks_a_table_does_not_wait_behind_a_migration_that_waits_for_it",
    ),
]
