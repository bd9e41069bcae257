"""What is broken on purpose in the collector, and the test that sees it: a promise a line."""

from __future__ import annotations

from collector.bugs_beside import BESIDE
from collector.bugs_export import EXPORT
from collector.bugs_incidents import INCIDENTS
from collector.bugs_limits import EDGE
from collector.bugs_quotas import QUOTAS
from collector.bugs_relay import RELAY
from collector.bugs_rounding import ROUNDING
from collector.bugs_runs import RUNS
from collector.bugs_scale import SCALE
from collector.bugs_security import DEFENCES
from collector.bugs_store import KEPT
from support.planted import Bug

S = "server/fp8watch_server"
C = "tests/collector"
T = "tests/store"

INGEST = [
    Bug(
        "200 means committed",
        "group_commit:Committer._commit_loop",
        "                answers = self._take(group)\n",
        "                self._answer([(w, Committed(w.batch.header.seq, True, [])) for w in group])\n"
        "                __import__('time').sleep(0.05)  # so that one of a few kills falls between the two\n"
        "                answers = self._take(group)\n",
        f"{C}/test_kill.py::test_kill_9_under_load[sqlite-0]",
    ),
    Bug(
        "another body under a key is a 409",
        "commit:_commit_run",
        "if there == item.sha256[: len(there)] else KeyReused()",
        "if there else KeyReused()",
        f"{C}/test_ingest_answers.py::test_another_body_under_a_key_that_is_taken_is_refused",
    ),
    Bug(
        "a batch that was compacted is known when it comes again",
        "commit:_commit_run",
        "if there is None and h.seq <= session.ledger_seq_max:",
        "if there is None and h.seq < 0:",
        f"{T}/test_compaction.py::test_a_batch_that_comes_late_goes_into_its_block",
    ),
    Bug(
        "of a step sent twice the later batch counts in any order",
        "records:newest_of_each",
        "np.lexsort((parts.seq, parts.attempt, parts.rank, parts.step, parts.site))",
        "np.lexsort((parts.attempt, parts.rank, parts.step, parts.site))",
        f"{C}/test_queries.py::test_of_a_step_that_one_session_sends_twice_the_later_batch_counts_in_any_order",
    ),
    Bug(
        "order does not matter",
        "commit:_commit_run",
        'upsert(conn, t.scalar, scalars, newest_by="seq")',
        "upsert(conn, t.scalar, scalars)",
        f"{T}/test_any_order.py::test_any_order_and_any_moment_of_compaction_give_the_same_answers[sqlite]"
        f" {C}/test_queries.py::test_of_a_step_that_one_session_sends_twice_the_later_batch_counts_in_any_order",
    ),
    Bug(
        "a repeated step belongs to the newer attempt",
        "records:owned",
        "    if owner is None:\n        return parts\n",
        "    return parts\n",
        f"{C}/test_queries.py::test_nothing_of_a_repeated_step_is_left_of_the_older_attempt",
    ),
    Bug(
        "nothing of a refused batch is stored",
        "commit:_commit_run",
        '            outcomes[i] = Unknown("sites", missing)\n            continue\n',
        '            outcomes[i] = Unknown("sites", missing)\n',
        f"{C}/test_ingest_answers.py::test_an_unknown_run_session_or_site_asks_for_registration",
    ),
    Bug(
        "a database that is away is a 503 within a second",
        "db_timeout",
        "WITHOUT_PROGRESS_S = 0.7",
        "WITHOUT_PROGRESS_S = 60.0",
        f"{C}/test_database_away.py::test_postgresql_away_is_a_503_soon_and_heals_by_itself[freeze]",
    ),
    Bug(
        "a 503 says when to come back",
        "db_timeout:unavailable",
        '        headers={"Retry-After": str(RETRY_AFTER_S)},\n',
        "",
        f"{C}/test_database_away.py::test_no_connection_left_is_a_503_and_heals",
    ),
    Bug(
        "more in flight than 128 MiB is a 429",
        "ingest.routes:read_body",
        "if held.total_bytes > MAX_INFLIGHT_BYTES:",
        "if held.total_bytes < 0:",
        f"{C}/test_rolling.py::test_more_than_it_can_hold_is_refused_and_memory_stays",
    ),
    Bug(
        "one body is stored once by two collectors",
        "commit:_commit_run",
        "        if there is None and replays:\n",
        "        if there is None and replays is None:\n",
        f"{C}/test_rolling.py::test_one_body_sent_to_two_collectors_at_once_is_stored_once",
    ),
    Bug(
        "SIGTERM drains",
        "fp8watch_server.cli",
        "DRAIN_S = 10\n",
        "DRAIN_S = 0\n",
        f"{C}/test_rolling.py::test_rolling_restarts_under_load_lose_nothing_and_drain",
    ),
    Bug(
        "a session is part of the key",
        "commit",
        '    _b.session == sa.bindparam("in_session"),\n',
        "",
        f"{C}/test_ingest_answers.py::test_the_same_seq_of_another_session_is_new_data",
    ),
    Bug(
        "a wrong column refuses the whole batch and is named",
        "envelope:exact",
        "    if len(raw) != want:\n",
        "    if len(raw) < 0:\n",
        f"{C}/test_ingest_answers.py::test_one_bad_column_refuses_the_whole_batch_and_is_named",
    ),
    Bug(
        "a clock that is set back changes no order",
        "pending:pending",
        ".order_by(waiting.c.since, b.run_id, b.tenant, b.arrival)",
        ".order_by(waiting.c.since, b.run_id, b.tenant, b.received_at)",
        f"{C}/test_worker.py::test_a_clock_that_is_set_back_changes_no_order",
    ),
    Bug(
        "after a restart from step 0 the newer attempt is looked at",
        "engine_restore:replay",
        "newest = {row.rank: row for row in rows}",
        "newest = {row.rank: row for row in reversed(rows)}",
        f"{C}/test_worker.py::test_after_a_restart_from_step_0_the_engine_is_rebuilt_from_the_newer_attempt",
    ),
    Bug(
        "agents of an older release are understood",
        "wire",
        "READS = (1, 2, 3)",
        "READS = (2, 3)",
        f"{C}/test_versions.py::test_every_version_that_is_read_is_frozen",
    ),
    Bug(
        "bytes of an older release mean what they meant",
        "wire:decode_batch",
        "if header.version == 1:\n",
        "if header.version == 0:\n",
        f"{C}/test_versions.py::test_a_batch_of_every_release_is_taken_kept_and_read",
    ),
    Bug(
        "health is answered while bodies are refused",
        "ingest.routes:read_body",
        "            if held.total_bytes > MAX_INFLIGHT_BYTES:\n",
        "            while held.total_bytes > MAX_INFLIGHT_BYTES:\n                time.sleep(0.5)\n            if held.total_bytes < 0:\n",
        f"{C}/test_rolling.py::test_more_than_it_can_hold_is_refused_and_memory_stays",
    ),
]

STORE = [
    Bug(
        "scalars of a cell are of one moment",
        "scalars:put_scalar_block",
        "    for name, fetched in _fetch(conn, t.scalar, (run_id, tenant), t.SCALAR_NAMES, where).items():\n",
        "    for name in t.SCALAR_NAMES:\n        fetched = _fetch(conn, t.scalar, (run_id, tenant), [name], where)[name]\n",
        f"{T}/test_compaction.py::test_scalars_that_come_while_a_cell_is_packed_do_not_tear_it",
    ),
    Bug(
        "two workers count a batch once",
        "pending:mark",
        "    if done.rowcount != len(arrivals):\n",
        "    if done.rowcount < 0:\n",
        f"{C}/test_worker.py::test_two_workers_on_one_database_count_a_batch_once",
    ),
    Bug(
        "one collector leads",
        "leader:Leader._held",
        "            if not mine:\n",
        "            if False:\n",
        f"{T}/test_rounds.py::test_one_leads_until_it_lets_go",
    ),
    Bug(
        "who does not lead does nothing",
        "leader_loop:LeaderLoop._one",
        "            if self._leader.held():\n",
        "            if self._leader.held() or True:\n",
        f"{T}/test_rounds.py::test_who_does_not_lead_forgets_and_does_nothing"
        f" {T}/test_rounds.py::test_of_two_compactors_one_works_until_it_stops",
    ),
    Bug(
        "compaction is crash-safe",
        "compact:compact",
        '    crash("compact.encoded")\n',
        '    with writing(engine) as conn:\n        _let_go(conn, group, got)\n    crash("compact.encoded")\n',
        f"{T}/test_kill.py::test_killed_anywhere_compaction_loses_nothing_and_doubles_nothing[sqlite]",
    ),
    Bug(
        "a roll-up that was overtaken is not shown",
        "rollup:_still",
        "compacted_at=cell.compacted_at)).rowcount != 1:",
        "compacted_at=cell.compacted_at)).rowcount < 0:",
        f"{T}/test_compaction.py::test_a_roll_up_that_a_late_batch_overtakes_is_not_shown",
    ),
    Bug(
        "retention keeps what an incident is about",
        "retention:prune",
        "if cell.shown_rank is None or _near(cell, spans):",
        "if cell.shown_rank is None:",
        f"{T}/test_retention.py::test_around_an_incident_detail_stays_for_good_and_so_do_the_ranks_that_one_names",
    ),
    Bug(
        "retention keeps the ranks that an incident names",
        "retention:prune",
        "(keep == t.KEPT_ROLLUP and s[1] not in odd)",
        "keep == t.KEPT_ROLLUP",
        f"{T}/test_retention.py::test_around_an_incident_detail_stays_for_good_and_so_do_the_ranks_that_one_names",
    ),
    Bug(
        "a loss that rank 0 does not have stays for SQL",
        "retention:_told_by",
        "s.loss_class.is_not(None), ",
        "",
        f"{T}/test_retention.py::test_a_loss_that_rank_0_does_not_have_stays_and_so_does_a_step_that_broke_on_another",
    ),
    Bug(
        "retention goes on where it was broken off",
        "retention:prune",
        "            if keep >= cell.kept and not unfinished:\n",
        "            if keep >= cell.kept:\n",
        f"{T}/test_kill.py::test_killed_anywhere_retention_keeps_the_sums_that_it_promises",
    ),
    Bug(
        "an ETag is of what was asked",
        "api.routes:_chart",
        "request.url.path, request.url.query)",
        "request.url.path)",
        f"{T}/test_api.py::test_an_answer_that_is_as_it_was_is_a_304",
    ),
    Bug(
        "an ETag is of what it rests on",
        "etag:validator",
        '    parts += [f"{row.arrival}:{row.step_min}" for row in found.hot]\n',
        "",
        f"{T}/test_api.py::test_an_answer_that_is_as_it_was_is_a_304",
    ),
    Bug(
        "migrations keep data",
        "0004_first_release:upgrade",
        "def upgrade() -> None:\n",
        'def upgrade() -> None:\n    op.execute("DELETE FROM scalar")\n',
        f"{T}/test_migrations.py::test_a_database_of_a_release_keeps_its_data",
    ),
    Bug(
        "NaN is data",
        "commit:classify",
        "kinds[np.isnan(values)] = 1",
        "kinds[np.isnan(values)] = 2",
        f"{C}/test_nonfinite.py::test_sql_tells_them_apart",
    ),
    Bug(
        "no maximum takes a NaN in silence",
        "rank_merge:RankMerge._merge",
        "into[at] = np.maximum(into[at], values)",
        "into[at] = np.fmax(into[at], values)",
        f"{C}/test_nonfinite.py::test_a_nan_on_one_rank_is_not_averaged_away",
    ),
    Bug(
        "what was not measured is absent, never 0",
        "record:holds",
        "wanted | int(Measured.CODES) if groups & Measured.CAST else wanted",
        "wanted",
        f"{T}/test_codes_alone.py::test_what_the_cast_did_is_absent_and_the_rest_is_there[sqlite-False]",
    ),
    Bug(
        "a tile map of codes alone says nothing of the cast",
        "tile_maps:kept_map",
        'evidence.get("cast") != "absent"',
        "bool(evidence)",
        f"{T}/test_codes_alone.py::test_a_tile_map_of_codes_alone_has_no_underflow[sqlite-evidence0-None]",
    ),
    Bug(
        "a point says which steps it stands for",
        "series:_chart_of",
        'if columns["window_steps_back"].any() else {}',
        "if False else {}",
        f"{T}/test_windows.py::test_a_point_says_which_steps_it_stands_for_and_where_the_largest_amax_lay[hot-sqlite]",
    ),
    Bug(
        "a point that is left out takes its steps along",
        "series:_chart",
        "(steps[index] - by[index])",
        "(steps[index] - by[: len(index)])",
        f"{T}/test_windows.py::test_points_that_are_left_out_take_theirs_along[sqlite]",
    ),
    Bug(
        "the step of the largest amax is that of the rank that has it",
        "server/fp8watch_server/store/records.py",
        '"amax_steps_back": "amax_max", ',
        "",
        f"{T}/test_windows.py::test_a_point_says_which_steps_it_stands_for_and_where_the_largest_amax_lay[hot-sqlite]",
    ),
    Bug(
        "pages say how many steps a point may stand for",
        "coverage:merged_steps",
        '.get("merge_steps")',
        '.get("merged")',
        "tests/pages/test_merged_steps.py::test_pages_say_how_many_steps_a_point_may_stand_for",
    ),
    Bug(
        "the chart that comes with a page says the steps of a point",
        "first_chart:at_step",
        "if first == step:",
        "if True:",
        "tests/pages/test_merged_steps.py::test_a_point_says_its_steps_before_any_script_runs",
    ),
    Bug(
        "the history of a run is not searched for its loss",
        "run_metrics:NewestScalars._newest_step",
        ".where(*_of_run(run), c.step.between(first, run.last_step))",
        ".where(*_of_run(run))",
        f"{C}/test_metrics.py::test_the_newest_loss_is_looked_for_near_the_last_step_alone",
    ),
    Bug(
        "however many ranks there are as many rows are searched",
        "run_metrics:NewestScalars._newest_step",
        ".limit(NEWEST_ROWS)",
        "",
        f"{C}/test_metrics.py::test_the_newest_loss_is_looked_for_near_the_last_step_alone",
    ),
    Bug(
        "what does not fit in the answer is not read",
        "site_metrics:sites",
        "        if budget.left < len(COUNTERS):",
        "        if False:",
        f"{C}/test_metrics.py::test_what_does_not_fit_any_more_is_not_read",
    ),
    Bug(
        "metrics are bounded",
        "series_budget:SeriesBudget.take",
        "        if count > self.left:\n",
        "        if count < 0:\n",
        f"{C}/test_metrics.py::test_series_are_bounded_and_what_was_left_out_is_counted",
    ),
]

BUGS = [
    *INGEST,
    *DEFENCES,
    *RELAY,
    *SCALE,
    *EDGE,
    *RUNS,
    *QUOTAS,
    *STORE,
    *ROUNDING,
    *EXPORT,
    *INCIDENTS,
    *KEPT,
    *BESIDE,
]
