"""What is broken on purpose on the way of broken batches, and the test that sees it."""

from __future__ import annotations

from support.planted import Bug

W = "tests/cluster/test_urgent_way.py"
U = "tests/collector/test_urgent.py"
R = "tests/collector/test_relay.py::test_a_broken_batch_waits_for_no_other"
AT_ONCE = f"{W}::test_a_broken_batch_is_committed_at_once_and_counted_once"

URGENT = [
    Bug(
        "a broken batch is committed before a worker comes",
        "queue_front:QueueFront._write",
        "for n in at if is_urgent(items[n].batch)",
        "for n in at if False",
        AT_ONCE,
    ),
    Bug(
        "a broken batch that the database has is accepted without the queue",
        "queue_front:QueueFront._write",
        "if failed is None or n in committed:",
        "if failed is None:",
        AT_ONCE,
    ),
    Bug(
        "a storm of broken batches goes through the queue",
        "queue_front:QueueFront._commit_now",
        "if self._num_short_cuts >= MAX_SHORT_CUTS:",
        "if False:",
        f"{W}::test_a_storm_of_broken_batches_leaves_the_short_cut",
    ),
    Bug(
        "the short cut outlives a connection that died",
        "queue_front:QueueFront._commit_now",
        "if time.monotonic() > until:",
        "if True:",
        f"{W}::test_the_short_cut_is_tried_again_while_the_database_comes_back",
    ),
    Bug(
        "a worker's commit of broken batches waits for no healthy one",
        "worker.loop:Worker._commit",
        "self._committers[stream].hand_in",
        "self._committers[WORK[1]].hand_in",
        f"{W}::test_a_worker_commits_broken_batches_while_healthy_ones_take_long",
    ),
    Bug(
        "a lane that does not begin holds up no other",
        "worker.loop:Worker._serve",
        "except (QueueError, _LaneWaits) as e:",
        "except _LaneWaits as e:",
        f"{W}::test_a_lane_that_does_not_begin_holds_up_no_other",
    ),
    Bug(
        "a leader that says nothing is noticed",
        "jetstream:Reader.pull",
        "next_msg(timeout=SILENT_S)",
        "next_msg(timeout=wait_s + 1)",
        f"{W}::test_a_silent_queue_is_noticed_before_the_pull_would_end",
    ),
    Bug(
        "an idle lane says that it is there",
        "jetstream:Reader.pull",
        'ask["idle_heartbeat"] = int(HEARTBEAT_S * 1e9)',
        "pass",
        f"{W}::test_a_silent_queue_is_noticed_before_the_pull_would_end",
    ),
    Bug(
        "a worker ends though a database hangs",
        "worker.command:_run",
        "end.start()",
        "pass",
        f"{W}::test_a_worker_ends_though_its_database_hangs",
    ),
    Bug(
        "lanes that are given back are read no more",
        "worker.lanes:Lanes._hold",
        "return self._held.difference(self._surplus)",
        "return set(self._held)",
        "tests/cluster/test_queue.py::test_workers_share_the_lanes_and_take_over_those_of_one_that_hangs",
    ),
    Bug(
        "broken batches that nobody told of are looked for",
        "detect_worker:DetectWorker.drain",
        "self._look_through()",
        "pass",
        f"{U}::test_what_nobody_told_of_is_looked_for_however_much_waits_before_it",
    ),
    Bug(
        "which batches are broken is stored with them",
        "store.commit:_row",
        '"urgent": is_urgent(item.batch)',
        '"urgent": False',
        f"{U}::test_what_nobody_told_of_is_looked_for_however_much_waits_before_it",
    ),
    Bug(
        "broken batches are looked for while an engine is restored",
        "detect_worker:DetectWorker._take_urgent_of_others",
        "if self._unheard.is_set():",
        "if False:",
        f"{U}::test_who_listens_again_looks_for_it_while_engines_are_restored",
    ),
    Bug(
        "a run that is moving is not tried in each round",
        "detect_worker:DetectWorker._look_through",
        "if not self._is_fenced(run):",
        "if True:",
        f"{U}::test_a_run_that_is_moving_is_not_tried_again_in_each_round",
    ),
    Bug(
        "a broken batch does not wait for an engine that is restored",
        "detect_worker:DetectWorker._take_urgent_of_others",
        "if self._urgent:",
        "if False:",
        f"{U}::test_an_urgent_batch_does_not_wait_for_engines_that_are_restored",
    ),
    Bug(
        "the engine that is being restored is not used meanwhile",
        "run_engines:RunEngines.of",
        "self._restoring.add(key)",
        "pass",
        f"{U}::test_an_urgent_batch_does_not_wait_for_engines_that_are_restored",
    ),
    Bug(
        "who listens again looks for what it has missed",
        "bell:Bell._listen",
        "                    self._listens()\n",
        "",
        "tests/cluster/test_bell.py::test_who_listens_again_is_told",
    ),
    Bug(
        "a relay sends broken batches at once",
        "relay:Relay.post",
        "if urgent:",
        "if False:",
        R,
    ),
    Bug(
        "a relay that is started again sends broken batches first",
        "relay_express:Express.__init__",
        "            self._add(entry)\n",
        "            pass\n",
        R,
    ),
    Bug(
        "a move that nobody finishes is told",
        "observability.metrics:_moves",
        "if not move.at_work",
        "if move.at_work",
        "tests/cluster/test_move.py::test_a_move_that_nobody_finishes_is_told",
    ),
    Bug(
        "a move at which somebody works is not told",
        "moves_under_way",
        "(l.classid::bigint << 32) | l.objid::bigint",
        "l.objid::bigint",
        "tests/cluster/test_move.py::test_a_move_that_nobody_finishes_is_told",
    ),
    Bug(
        "what a relay takes goes before what an earlier one has left",
        "relay_express:Express._take",
        "for job in reversed(self._jobs):",
        "for job in self._jobs:",
        "tests/collector/test_relay_collectors.py::test_a_relay_that_starts_again_sends_the_newest_broken_batch_first",
    ),
]
