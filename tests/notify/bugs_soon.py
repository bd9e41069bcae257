"""What is broken on purpose on the way from a non-finite batch to its message, so that it comes late."""

from __future__ import annotations

from support.planted import Bug

S = "server/fp8watch_server"
N = "tests/notify"
C = "tests/collector"

SOON = [
    Bug(
        "what was written while the dispatcher looked waits for company",
        "group:_left",
        "now - since < -AHEAD_S",
        "now < since",
        f"{N}/test_group.py::test_a_notice_that_was_written_while_the_dispatcher_looked_waits_for_company_too",
    ),
    Bug(
        "a clock that was set back delays nothing",
        "group:_left",
        "since is None or now - since < -AHEAD_S",
        "since is None",
        f"{N}/test_group.py::test_a_notice_of_a_clock_that_was_set_back_delays_nothing",
    ),
    Bug(
        "a message leaves within two seconds",
        "outbox",
        "POLL_S = 0.5\n",
        "POLL_S = 6.0\n",
        f"{N}/test_outbox.py::test_an_incident_is_told_within_two_seconds_of_its_batch",
    ),
    Bug(
        "what is broken is told to the detectors when it is committed",
        "group_commit:Committer._tell",
        "                if outcome.stored and is_urgent(item.batch):\n",
        "                if False:\n",
        f"{N}/test_woken.py::test_a_non_finite_batch_wakes_everyone_on_its_way",
    ),
    Bug(
        "what is broken ends the pause of the detectors",
        "leader_loop:LeaderLoop.wake_now",
        "        self._now.set()\n",
        "",
        f"{N}/test_woken.py::test_a_non_finite_batch_wakes_everyone_on_its_way",
    ),
    Bug(
        "an incident wakes the dispatcher",
        "station:Station.wake_sender",
        "            self._sender.wake()\n",
        "            pass\n",
        f"{N}/test_woken.py::test_a_non_finite_batch_wakes_everyone_on_its_way",
    ),
    Bug(
        "what waits for company waits no longer",
        "outbox:Dispatcher.deliver_one",
        "                self._wait_s[channel.name] = _wait_s(conn, channel, self._clock())\n            return False\n",
        "                pass\n            return False\n",
        f"{N}/test_woken.py::test_what_waits_for_company_waits_no_longer",
    ),
    Bug(
        "the next message of a channel leaves when it may",
        "outbox:Dispatcher.deliver_one",
        "            self._wait_s[channel.name] = left_s\n",
        "",
        f"{N}/test_woken.py::test_the_next_message_of_a_channel_leaves_when_it_may",
    ),
    Bug(
        "what is broken is looked at before what has waited",
        "detect_worker:DetectWorker._judge",
        "                if num and give_way and self._urgent:\n",
        "                if False:\n",
        f"{C}/test_urgent.py::test_an_urgent_batch_goes_before_those_that_have_waited",
    ),
    Bug(
        "what was taken out of turn is not taken again",
        "detect_worker:DetectWorker.drain",
        "row.arrival > self._taken_to.get(key, 0)",
        "row.arrival > 0",
        f"{C}/test_urgent.py::test_of_its_own_run_nothing_is_passed_over_and_nothing_seen_twice",
    ),
    Bug(
        "a run that stays broken keeps nobody waiting",
        "priority:PriorityLane.add",
        "            if taken_at is not None and self._clock() - taken_at < AGAIN_S:\n",
        "            if False:\n",
        f"{C}/test_urgent.py::test_a_run_that_stays_broken_is_taken_out_of_turn_now_and_then",
    ),
    Bug(
        "a critical incident waits for no interval",
        "group:choose",
        "        if not any(row.is_critical for row in group):\n",
        "        if True:\n",
        f"{N}/test_group.py::test_the_next_message_about_a_run_waits_for_the_interval_and_a_critical_one_does_not",
    ),
    Bug(
        "what was taken in before a crash is looked at after it",
        "detect_worker:DetectWorker.drain",
        "if not self._is_fenced((row.run_id, row.tenant))]",
        "if (row.run_id, row.tenant) in dict(self._engines.items())]",
        "tests/collector/test_worker.py::test_a_restart_rebuilds_the_engine_silently_and_takes_what_was_pending",
    ),
    Bug(
        "a message never fails for its picture",
        "outbox:Dispatcher._with_flight",
        "except Exception as e:",
        "except ValueError as e:",
        f"{N}/test_flight_text.py::test_a_message_never_fails_for_its_picture",
    ),
]
