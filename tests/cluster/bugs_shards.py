"""What is broken on purpose in shards, and the test that sees it."""

from __future__ import annotations

from support.planted import Bug

S = "tests/cluster/test_shards.py"
LISTED = f"{S}::test_each_run_lies_on_one_shard_and_all_are_listed"
BEFORE = f"{S}::test_runs_from_before_stay_at_home_and_a_further_shard_moves_none"
JOINED = f"{S}::test_batches_that_a_relay_joins_and_tile_maps_go_to_the_shards_of_their_runs"
APART = f"{S}::test_databases_that_do_not_belong_together_are_refused"
ALL = f"{S}::test_what_is_said_of_all_runs_reaches_each_shard"
M = "tests/cluster/test_move.py"
ENDED = f"{M}::test_ended_at_any_point_it_is_finished_by_the_same_command"
QUEUED = "tests/cluster/test_queue_shards.py"
AWAY = "tests/cluster/test_shard_away.py::test_a_shard_that_is_away_refuses_its_own_runs_and_nobody_elses"

SHARDS = [
    Bug(
        "of two collectors that place a run the first counts",
        "db.directory:Directory.place",
        "upsert(conn, t.shard_of_run, [row], update=())",
        'upsert(conn, t.shard_of_run, [row], update=["shard"])',
        f"{S}::test_collectors_that_place_a_run_at_once_agree",
    ),
    Bug(
        "runs from before there were shards stay at home",
        "db.directory:Directory.read",
        "found = HOME if here is not None else None",
        "found = None",
        BEFORE,
    ),
    Bug(
        "a further shard moves no run",
        "db.directory:Directory.read",
        "found: str | None = conn.execute(sa.select(d.shard).where(d.run_id == run_id, d.tenant == tenant)).scalar()",
        "found: str | None = None",
        BEFORE,
    ),
    Bug(
        "a further shard draws from all others",
        "db.directory:order_of",
        'f"{name}\\0{run_id}".encode()',
        'f"{name}\\0{run_id}\\0{len(tuple(names))}".encode()',
        BEFORE,
    ),
    Bug(
        "a database that is another shard is refused",
        "db.directory:claim_shard",
        "if found != mine:",
        "if False:",
        APART,
    ),
    Bug(
        "runs on shards that nobody names are not forgotten",
        "db.directory:open_directory",
        "if missing:",
        "if False:",
        APART,
    ),
    Bug(
        "a batch goes to the shard of its run",
        "of_run:intake_of_body",
        "return await intake_of_run(request, run_id, queued=queued)",
        "return home",
        JOINED,
    ),
    Bug(
        "a body that does not begin with its run is read as a whole",
        "of_run:intake_of_body",
        "if run_id is None:",
        "if False:",
        JOINED,
    ),
    Bug(
        "a list is of all databases",
        "over_databases:merged_page",
        "pages = [page_of(conn) for conn in conns]",
        "pages = [page_of(conn) for conn in conns[:2]]",
        LISTED,
    ),
    Bug(
        "a merged list goes on where its page ended",
        "over_databases:merged_page",
        'return found[:limit], encode_cursor(float(last[at]), str(last["id"]))',
        "return found[:limit], max(following for _, following in pages if following)",
        LISTED,
    ),
    Bug(
        "a cause on two shards is one",
        "cause_list:_merged",
        "one[name] += row[name]",
        "one[name] = row[name]",
        LISTED,
    ),
    Bug(
        "a run is asked for where it lies",
        "http.databases:_engine",
        'return shards.of_run(named["run_id"])',
        "return shards.home",
        LISTED,
    ),
    Bug(
        "families of /metrics stand once",
        "metrics:_merged",
        "families.setdefault(metric.name, metric)",
        "families.setdefault(str(id(metric)), metric)",
        LISTED,
    ),
    Bug(
        "the health of the collector is that of all its databases",
        "inbox_routes:collector_page",
        "collector_health.health(everywhere.conns, stats",
        "collector_health.health(everywhere.conns[:1], stats",
        LISTED,
    ),
    Bug(
        "a silence reaches each shard",
        "incident_actions:post_silence",
        "for engine in shards_of(request.app).answering():",
        "for engine in [shards_of(request.app).home]:",
        ALL,
    ),
    Bug(
        "what is done to a cause is done in each database",
        "incident_actions:_change_all",
        "for engine in shards.answering()]",
        "for engine in shards.answering()[:2]]",
        ALL,
    ),
    Bug(
        "each shard has a compactor with the limits of the collector",
        "station:Station.__init__",
        "Compactor(engine, policy_of(settings))",
        "Compactor(engine)",
        f"{S}::test_each_shard_is_compacted_and_pruned",
    ),
    Bug(
        "passwords of shards are secrets",
        "fp8watch_server.settings:Settings.secrets",
        "for url in self.shard_urls.values()]",
        "for url in ()]",
        f"{S}::test_a_password_of_a_shard_is_a_secret",
    ),
    Bug(
        "a shard that hangs is given up",
        "db.shards:Shards.named",
        "if shard is None or not shard.ready:",
        "if shard is None:",
        f"{AWAY}[freeze]",
    ),
    Bug(
        "new runs go where one answers",
        "db.shards:Shards.name_of_run",
        "key=lambda name: not self.others[name].ready",
        "key=order.index",
        f"{AWAY}[stop]",
    ),
    Bug(
        "what is not found may lie on a shard that is away",
        "db.shards:Shards.of_incident",
        "        if away:\n            raise ShardAway(away[0])\n",
        "",
        f"{AWAY}[stop]",
    ),
    Bug(
        "a shard that is there again is given the silences",
        "incidents.silences:copy_silences",
        "    if rows:\n",
        "    if False:\n",
        f"{AWAY}[stop]",
    ),
    Bug(
        "what a queue takes waits for its shard",
        "of_run:intake_of_run",
        "if found is None or not queued or found.committer.queue_ready is None:",
        "if True:",
        f"{QUEUED}::test_a_shard_that_is_away_holds_back_its_own_runs",
    ),
    Bug(
        "a worker leaves a shard alone that is away",
        "worker.crew:Crew.__init__",
        "return Worker(engine, queue, name, partial(shards.named, name))",
        "return Worker(engine, queue, name)",
        f"{QUEUED}::test_a_shard_that_is_away_holds_back_its_own_runs",
    ),
    Bug(
        "a shard has lanes of its own",
        "queue.subjects:lane_subject",
        "f'{shard}.' if shard else ''",
        "'*.' if shard else ''",
        f"{QUEUED}::test_lanes_of_shards_are_their_own",
    ),
    Bug(
        "nobody changes a run that is being moved",
        "moving.move:Move._copy",
        "        raise_fence(source, self._run_id)\n",
        "",
        f"{ENDED}[fenced]",
    ),
    Bug(
        "rows that were deleted while a run was copied are not copied",
        "moving.copying:StagedCopy._without_deleted",
        "if wanted != target",
        "if False and wanted != target",
        f"{M}::test_what_changes_while_it_is_copied_goes_too",
    ),
    Bug(
        "rows that changed while a run was copied are copied again",
        "moving.copying:StagedCopy._changed",
        "then = f",
        'then = "NOTHING" or f',
        f"{M}::test_what_changes_while_it_is_copied_goes_too",
    ),
    Bug(
        "a run that has moved is not made anew where it was",
        "store.registrations:register_run",
        "if to is not None:",
        "if False:",
        f"{M}::test_what_changes_while_it_is_copied_goes_too",
    ),
    Bug(
        "a move that arrived goes forward",
        "moving.move:Move._move",
        "elif self._lies_in(target):",
        "elif False:",
        f"{ENDED}[whole]",
    ),
    Bug(
        "the copy that was left is deleted by the next try",
        "moving.move:Move._move",
        "if row.moved_from is not None:",
        "if False:",
        f"{ENDED}[switched]",
    ),
    Bug(
        "a move that fails opens the fence",
        "moving.move:Move._move",
        "                take_down(source, self._run_id)\n",
        "",
        f"{M}::test_a_move_that_fails_leaves_the_run_where_it_is",
    ),
    Bug(
        "detectors pass over a run that is being moved",
        "detect_worker:DetectWorker._take",
        "if is_fenced(e):",
        "if False:",
        f"{M}::test_a_move_that_fails_leaves_the_run_where_it_is",
    ),
    Bug(
        "whoever detects hears of what another process committed",
        "group_commit:Committer._write_once",
        "            ring(conn, urgent)\n",
        "",
        "tests/cluster/test_bell.py::test_a_broken_batch_is_heard_and_a_healthy_one_is_not",
    ),
    Bug(
        "what was accepted for the old place of a run is not put aside",
        "worker.loop:Worker._put_aside",
        "if isinstance(why, RunHasMoved):",
        "if False:",
        f"{QUEUED}::test_what_was_accepted_for_the_old_place_is_passed_on",
    ),
]
