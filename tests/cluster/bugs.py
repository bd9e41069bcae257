"""What is broken on purpose in the queue, its workers and the leases, and the test that sees it."""

from __future__ import annotations

from support.planted import Bug

Q = "tests/cluster/test_queue.py"
T = "tests/cluster/test_takeover.py"
F = "tests/cluster/test_cluster_files.py"
ONCE = f"{Q}::test_what_was_accepted_is_committed_later_in_order_and_once"

BUGS = [
    Bug(
        "training behind the relay needs no token that deletes runs",
        "docker-compose.yml",
        "    secrets: [agent_token]\n",
        "    secrets: [token]\n",
        "tests/cluster/test_cluster_files.py::test_training_behind_the_relay_needs_no_token_that_deletes_runs",
    ),
    Bug(
        "links of collectors lead to no pod",
        "deploy/kubernetes/collector.yaml",
        '            - {name: FP8WATCH_PUBLIC_URL, value: "http://collector.fp8watch:8420"}\n',
        "",
        "tests/cluster/test_cluster_files.py::test_links_of_collectors_lead_to_no_pod",
    ),
    Bug(
        "a batch is acknowledged when the stream has it",
        "jetstream:JetStream.publish",
        "return [e if isinstance(e, Exception) else None for e in done]",
        "return [None for e in done]",
        f"{Q}::test_a_full_queue_refuses_healthy_batches_and_takes_broken_ones",
    ),
    Bug(
        "broken batches have a stream of their own",
        "queue_front:_message",
        "URGENT if is_urgent(item.batch) else HEALTHY",
        "HEALTHY",
        f"{Q}::test_a_full_queue_refuses_healthy_batches_and_takes_broken_ones",
    ),
    Bug(
        "nothing is acknowledged to the queue before its commit",
        "worker.loop:Worker._commit",
        "                raise outcome\n",
        "                pass\n",
        f"{Q}::test_while_the_database_is_away_batches_are_accepted_and_wait",
    ),
    Bug(
        "another body under a key is refused",
        "queue_front:QueueFront._reused",
        "return None if before == item.sha256 else KeyReused()",
        "return None",
        f"{Q}::test_what_is_wrong_is_refused_before_it_is_accepted",
    ),
    Bug(
        "a session shows its key before a batch is accepted",
        "ingest.registered:Registered._wrong",
        "if not key_fits(key_sha256, item.key_sha256):",
        "if False:",
        f"{Q}::test_what_is_wrong_is_refused_before_it_is_accepted",
    ),
    Bug(
        "a batch that no database takes is kept aside",
        "worker.loop:Worker._put_aside",
        "            (failed,) = await self._queue.publish([Message(REFUSED, subject, msg.data, kept)])\n",
        "            failed = None\n",
        f"{Q}::test_a_batch_that_no_database_takes_is_kept_aside_and_blocks_nobody",
    ),
    Bug(
        "what a database says of itself puts no batch aside",
        "worker.loop:_is_refusal",
        "isinstance(outcome, OF_THE_VALUES) and",
        "isinstance(outcome, DBAPIError) and",
        f"{Q}::test_a_batch_is_put_aside_for_its_values_alone",
    ),
    Bug(
        "a server that takes no changes is left",
        "dialect:_takes_no_changes",
        "context.is_disconnect = True",
        "pass",
        f"{Q}::test_while_the_database_takes_no_changes_nothing_is_put_aside",
    ),
    Bug(
        "why a worker waits is said once",
        "worker.loop:Worker._say",
        "if why != self._said or again:",
        "if True:",
        f"{Q}::test_while_the_database_takes_no_changes_nothing_is_put_aside",
    ),
    Bug(
        "a lane has one reader",
        "worker.lanes:Lanes._hold",
        'if lane not in self._held and conn.execute(_TRY, {"of": CLASS, "lane": lane}).scalar_one():',
        "if lane not in self._held:",
        f"{Q}::test_workers_share_the_lanes_and_take_over_those_of_one_that_hangs",
    ),
    Bug(
        "lanes are shared evenly",
        "worker.lanes:Lanes._hold",
        "share = -(-self._num_lanes // num_workers)",
        "share = self._num_lanes",
        f"{Q}::test_workers_share_the_lanes_and_take_over_those_of_one_that_hangs",
    ),
    Bug(
        "locks of a worker that hangs are given away",
        "db.lease:lease_session",
        "int(LEASE_S * 1000)",
        "0",
        f"{Q}::test_workers_share_the_lanes_and_take_over_those_of_one_that_hangs",
    ),
    Bug(
        "another collector detects where one hangs",
        "leader:Leader._held",
        "                lease_session(conn)\n",
        "",
        f"{Q}::test_leadership_ends_with_a_process_that_hangs_and_not_with_a_round_that_takes_long",
    ),
    Bug(
        "a round that takes long keeps its leadership",
        "leader:Leader._beat",
        'conn.execute(sa.text("SELECT 1"))',
        "pass",
        f"{Q}::test_leadership_ends_with_a_process_that_hangs_and_not_with_a_round_that_takes_long",
    ),
    Bug(
        "no client of the queue without a queue",
        "ingest.committer_of:committer_of",
        "    if not settings.queue:\n",
        "    import fp8watch_server.ingest.queue_front\n    if not settings.queue:\n",
        f"{Q}::test_without_a_queue_its_client_is_not_imported",
    ),
    Bug(
        "manifests are held to the schemas of Kubernetes",
        "deploy/kubernetes/nats.yaml",
        "podManagementPolicy: Parallel",
        "podManagementPolicies: Parallel",
        f"{F}::test_every_manifest_has_the_schema_of_its_kind",
    ),
    Bug(
        "collectors know every server of the queue",
        "deploy/kubernetes/nats.yaml",
        "replicas: 3",
        "replicas: 5",
        f"{F}::test_settings_in_the_manifests_are_taken",
    ),
    Bug(
        "a Service sets no variables of collectors",
        "deploy/kubernetes/worker.yaml",
        "enableServiceLinks: false",
        "enableServiceLinks: true",
        f"{F}::test_containers_are_users_on_a_read_only_system_with_probes_and_known_variables",
    ),
    Bug(
        "servers of the queue take the largest batch",
        "deploy/kubernetes/nats.conf",
        "max_payload: 9MB",
        "max_payload: 8MB",
        f"{F}::test_the_queue_servers_take_their_configuration",
    ),
    Bug(
        "a collector that migrates is not ended before it is done",
        "deploy/kubernetes/collector.yaml",
        "failureThreshold: 120",
        "failureThreshold: 6",
        f"{F}::test_a_collector_or_worker_that_migrates_is_not_ended_before_it_is_done",
    ),
]
