"""What is broken on purpose where readers, people, ranks and other collectors are at work at the same time."""

from __future__ import annotations

from support.planted import Bug

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
        "who waits for a thread with a connection leaves some to the threads",
        "http.databases:connection_in_turn",
        "async with state.turns, contextmanager_in_threadpool",
        "async with contextmanager_in_threadpool",
        f"{R}::test_more_readers_than_connections_hinder_neither_ingest_nor_each_other",
    ),
    Bug(
        "readiness waits behind no question",
        "api.routes:readyz",
        "_ask, shards.home, limiter",
        "_ask, connect_everywhere(request).__enter__().conns[0].engine, limiter",
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
]
