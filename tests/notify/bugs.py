"""What is broken on purpose in incidents and messages, and the test that sees it: a promise a line."""

from __future__ import annotations

from notify.bugs_given import GIVEN
from notify.bugs_moving import MOVING
from notify.bugs_soon import SOON
from support.planted import Bug

S = "server/fp8watch_server"
I = "tests/incidents"  # noqa: E741
_STANDING = "tests/incidents/test_standing.py::test"
N = "tests/notify"

AT_LEAST_ONCE = [
    Bug(
        "a change of state and its message are one transaction",
        "messages:queue",
        "    name = conn.execute(sa.select(r.c.name).where(r.c.run_id == run_id, r.c.tenant == tenant)).scalar()\n",
        "    name = conn.execute(sa.select(r.c.name).where(r.c.run_id == run_id, r.c.tenant == tenant)).scalar()\n"
        '    conn.connection.driver_connection.execute("COMMIT")\n',
        f"{I}/test_fold.py::test_a_batch_whose_transaction_was_undone_leaves_nothing",
    ),
    Bug(
        "an incident that opens has its message",
        "fold:_write",
        "        reason = write_firing(conn, row, now, public_url)\n",
        "        reason = None\n",
        f"{I}/test_fold.py::test_a_batch_whose_transaction_was_undone_leaves_nothing",
    ),
    Bug(
        "a message is done when it was taken and not before",
        "outbox_lease:lease",
        'leased = {"state": "leased", "leased_by"',
        'leased = {"state": "sent", "leased_by"',
        f"{N}/test_promises.py::test_senders_that_are_killed_and_a_receiver_that_flaps_lose_nothing[3]",
    ),
    Bug(
        "what a dead sender held is sent within ten seconds",
        "outbox_lease:release_leases_of_the_dead",
        "    dead = [h for h in holders if h and _is_dead(h)]\n",
        "    dead: list[str] = []\n",
        f"{N}/test_outbox.py::test_a_killed_sender_loses_nothing_and_repeats_under_the_same_key",
    ),
    Bug(
        "a receiver that fails is asked again",
        "outbox:Dispatcher._attempt",
        "if answer.status >= 500 or answer.status in _RETRIED:",
        "if answer.status in _RETRIED:",
        f"{N}/test_outbox.py::test_5xx_and_lost_answers_are_tried_again_until_they_are_taken",
    ),
    Bug(
        "no answer is no delivery",
        "outbox:Dispatcher._attempt",
        '            return Outcome("pending", self._back_off_s(leased), str(e))\n',
        '            return Outcome("sent", error=str(e))\n',
        f"{N}/test_promises.py::test_senders_that_are_killed_and_a_receiver_that_flaps_lose_nothing[3]",
    ),
    Bug(
        "a receiver that recovers hears soon",
        "outbox:Dispatcher._back_off_s",
        "return random.uniform(0.05, min(limit,",
        "return random.uniform(60.0, 60.0 + min(limit,",
        f"{N}/test_outbox.py::test_5xx_and_lost_answers_are_tried_again_until_they_are_taken",
    ),
]

NOT_TWICE = [
    Bug(
        "a living lease is not taken over",
        "outbox_lease:due_again",
        'sa.and_(t.state == "leased", t.leased_until <= now),',
        't.state == "leased",',
        f"{N}/test_outbox.py::test_a_lease_that_ran_out_is_taken_over_and_a_living_one_is_not",
    ),
    Bug(
        "a repeat has the key of the first",
        "outbox_lease:lease",
        "        idempotency_key=row.idempotency_key,\n",
        '        idempotency_key=f"{row.idempotency_key}:{num_attempts}",\n',
        f"{N}/test_outbox.py::test_a_killed_sender_loses_nothing_and_repeats_under_the_same_key",
    ),
    Bug(
        "what was sent is over",
        "delivery_status:record_outcome",
        'values |= {"state": state, "next_attempt_at": now + wait_s,',
        'values |= {"state": "pending", "next_attempt_at": now + wait_s,',
        f"{N}/test_outbox.py::test_a_message_goes_to_every_channel_once",
    ),
    Bug(
        "a message is leased before it is sent",
        "outbox_lease:lease",
        "    _take(conn, row, {**made, **leased}, due_again(now) if again is not None else None)\n",
        "",
        f"{N}/test_outbox.py::test_two_dispatchers_send_each_message_once",
    ),
]

STORM = [
    Bug(
        "what follows from a cause opens nothing",
        "fold:fold",
        "        target = target_of(incidents, finding, window_steps, sites, after_clean_steps)\n",
        "        target = target_of([], finding, window_steps, sites)\n",
        f"{N}/test_promises.py::test_a_storm_is_one_firing_and_one_resolve",
    ),
    Bug(
        "a rank that comes late joins what is over",
        "fold:fold",
        "            if late := covering(as_bad, finding, window_steps, sites):",
        "            if late := covering([], finding, window_steps, sites):",
        f"{I}/test_fold.py::test_a_rank_that_comes_after_the_clean_steps_joins_the_incident_that_is_over",
    ),
    Bug(
        "one incident names all its ranks",
        "fold:_absorb",
        '        if finding.rank not in row["place"]["ranks"]:\n',
        "        if finding.rank < 0:\n",
        f"{N}/test_promises.py::test_a_storm_is_one_firing_and_one_resolve",
    ),
    Bug(
        "an end is told once",
        "auto_resolve:close_quiet",
        'values(status="resolved", resolved_at=now, updated_at=now)',
        "values(resolved_at=now, updated_at=now)",
        f"{N}/test_promises.py::test_a_storm_is_one_firing_and_one_resolve",
    ),
    Bug(
        "another expert was not here before",
        "incidents.stored:note_regression",
        '("module", "operand", "expert")',
        '("module", "operand")',
        "tests/incidents/test_roots.py::test_another_expert_was_not_here_before",
    ),
    Bug(
        "what a session goes on saying stays open",
        "auto_resolve:_stands",
        'row["mode"] != "recipe-mismatch"',
        "True",
        f"{_STANDING}_that_much_is_blind_stays_open_until_it_is_seen",
    ),
    Bug(
        "what is seen again is over",
        "auto_resolve:_stands",
        'said != "", ',
        "",
        f"{_STANDING}_that_much_is_blind_stays_open_until_it_is_seen",
    ),
    Bug(
        "a rank that begins again says what is blind now",
        "auto_resolve:_stands",
        ", ~newer.exists()",
        "",
        f"{_STANDING}_the_newest_session_of_each_rank_says_it",
    ),
    Bug(
        "a rank that goes on still says what is blind",
        "auto_resolve:_stands",
        "later.rank == s.rank, ",
        "",
        f"{_STANDING}_the_newest_session_of_each_rank_says_it",
    ),
    Bug(
        "a changed configuration is over when it is quiet",
        "auto_resolve:_stands",
        "_topic(conn, row) != UNOBSERVED",
        "False",
        f"{_STANDING}_another_configuration_is_over_when_it_is_quiet",
    ),
    Bug(
        "what else was seen of training does not stand",
        "auto_resolve:_topic",
        'root[0].get("topic", root[0].get("kind"))',
        'root[0].get("kind")',
        f"{_STANDING}_what_else_was_seen_of_training_is_over_when_it_is_quiet",
    ),
    Bug(
        "what an earlier version told stands",
        "auto_resolve:_topic",
        'root[0].get("topic", root[0].get("kind"))',
        'root[0].get("topic", "")',
        f"{_STANDING}_an_incident_of_an_earlier_version_stands_by_its_kind",
    ),
    Bug(
        "what is blind is no part of another incident",
        "match:_is_told",
        "other and UNOBSERVED in (i.topic, finding.topic)",
        "False",
        f"{_STANDING}_what_is_blind_is_an_incident_of_its_own_though_it_begins_with_another",
    ),
    Bug(
        "what is blind is told apart from what changed with it",
        "registered_facts:merge",
        "f.mode, f.topic == UNOBSERVED",
        "f.mode, False",
        "tests/detect/test_reports.py::test_what_is_silent_is_told_apart_from_what_changed_with_it",
    ),
    Bug(
        "flapping is held down",
        "messages",
        "FLAPPING_MESSAGES = 2\n",
        "FLAPPING_MESSAGES = 200\n",
        f"{I}/test_fold.py::test_flapping_sends_four_messages_however_often",
    ),
    Bug(
        "what was less grave holds back no warning",
        "messages:_fired_before",
        '            i.c.severity.in_(_SEVERITIES[_SEVERITIES.index(row["severity"]) :]),\n',
        "",
        f"{I}/test_fold.py::test_what_was_less_grave_holds_back_no_warning",
    ),
    Bug(
        "of logged scalars only the same one comes and goes",
        "messages:_of_its_matter",
        "mine is None or mine & told.get(other, unknown or set())",
        "True",
        f"{I}/test_fold.py::test_of_logged_scalars_only_the_same_one_comes_and_goes",
    ),
    Bug(
        "a logged scalar that comes and goes is held down",
        "messages:_of_its_matter",
        "mine is None or mine & told.get(other, unknown or set())",
        "mine is None",
        f"{I}/test_fold.py::test_of_logged_scalars_only_the_same_one_comes_and_goes",
    ),
    Bug(
        "notices of one run go together",
        "group:choose",
        "            together = tuple(sorted(group, key=lambda r: r.urgency))\n",
        "            together = tuple(sorted(group, key=lambda r: r.urgency))[:1]\n",
        f"{N}/test_group.py::test_notices_of_one_run_within_the_wait_are_one_message",
    ),
    Bug(
        "an hour has its limit",
        "group:choose",
        "    if pace.max_per_hour and _num_sent(",
        "    if pace.max_per_hour < 0 and _num_sent(",
        f"{N}/test_group.py::test_past_the_hours_limit_one_summary_tells_the_rest",
    ),
    Bug(
        "a warning waits while something worse is open at its place",
        "messages:write_firing",
        'state="inhibited" if by else "pending")',
        'state="pending")',
        f"{I}/test_inhibition.py::test_a_warning_waits_while_a_critical_incident_is_open_at_its_place",
    ),
    Bug(
        "an attempt that has ended holds back nothing of the next",
        "inhibit:inhibitor",
        '            t.attempt == incident.get("attempt"),',
        "            t.attempt >= 1,",
        f"{I}/test_inhibition.py::test_a_critical_incident_of_an_attempt_that_has_ended_holds_back_nothing_of_the_next",
    ),
    Bug(
        "what is let go is held by nothing of its own attempt",
        "inhibit:release",
        '"attempt": got.attempt, ',
        "",
        f"{I}/test_inhibition.py::test_a_critical_incident_of_an_attempt_that_has_ended_holds_back_nothing_of_the_next",
    ),
    Bug(
        "what was inhibited and is left is told",
        "messages:write_resolved",
        "    release(conn, row, now)\n",
        "",
        f"{I}/test_inhibition.py::test_it_is_told_after_all_when_it_is_what_is_left",
    ),
    Bug(
        "a silence is kept",
        "messages:_silenced_by",
        '    return str(found[0]["id"]) if found else None\n',
        "    return None\n",
        f"{I}/test_fold.py::test_a_silence_keeps_the_message_back_and_the_incident_on_the_pages",
    ),
    Bug(
        "a failure that was here before says so",
        "fold:fold",
        "            note_regression(conn, target)\n",
        "",
        f"{I}/test_roots.py::test_the_same_failure_again_says_that_it_was_here_before",
    ),
]

POISON = [
    Bug(
        "every channel has a thread of its own",
        "outbox:Dispatcher.start",
        "        for channel in self._channels:\n            thread = threading.Thread(\n",
        "        one = threading.Lock()\n"
        "        alone = self._attempt\n\n"
        "        def together(channel: Channel, leased: Leased) -> Outcome:\n"
        "            with one:\n"
        "                return alone(channel, leased)\n\n"
        "        self._attempt = together  # type: ignore[method-assign]\n"
        "        for channel in self._channels:\n            thread = threading.Thread(\n",
        f"{N}/test_outbox.py::test_a_poison_receiver_among_five_keeps_nobody_waiting",
    ),
    Bug(
        "a refusal is not tried again",
        "outbox:Dispatcher",
        '        return Outcome("dead", error=error)\n\n    def _with_flight',
        '        return Outcome("pending", 0.05, error)\n\n    def _with_flight',
        f"{N}/test_outbox.py::test_a_refusal_is_dead_at_once_and_says_why",
    ),
    Bug(
        "a receiver that asks for patience gets it",
        "outbox:Dispatcher._attempt",
        'return Outcome("pending", wait, error, pause_channel=True)',
        'return Outcome("pending", 0.05, error)',
        f"{N}/test_outbox.py::test_429_is_obeyed_for_the_whole_channel",
    ),
    Bug(
        "dead letters say why",
        "log:_as_entry",
        '"state", "num_attempts", "last_error")',
        '"state", "num_attempts")',
        f"{N}/test_log.py::test_dead_letters_are_listed_with_the_reason",
    ),
    Bug(
        "dead letters can be sent again",
        "log:retry",
        'again = {"state": "pending", "num_attempts": 0,',
        'again = {"state": "dead", "num_attempts": 0,',
        f"{N}/test_log.py::test_a_dead_letter_is_sent_again_when_somebody_asks",
    ),
    Bug(
        "one notice that is refused harms no other",
        "outbox:Dispatcher._attempt",
        "        if answer.status in _TOGETHER_ONLY and leased.others:\n",
        "        if answer.status in _TOGETHER_ONLY and not leased.others:\n",
        f"{N}/test_group.py::test_one_notice_that_is_refused_harms_no_other_of_its_group",
    ),
    Bug(
        "one notice that cannot be made stops nobody",
        "outbox:Dispatcher._attempt",
        "        except Exception as e:  # noqa: BLE001  (a payload",
        "        except MemoryError as e:  # noqa: BLE001  (a payload",
        f"{N}/test_outbox.py::test_a_message_that_cannot_be_made_does_not_stop_those_behind_it",
    ),
]

SILENCE = [
    Bug(
        "silence of a run is told",
        "stale_run:StalledWatch.look",
        "        new = [key for key in silent if key not in ever]  # of one silence is told once\n",
        "        new: list[str] = []\n",
        f"{N}/test_stalled.py::test_three_missing_heartbeats_are_told_once_and_so_is_the_return",
    ),
    Bug(
        "silence is told once",
        "stale_run:StalledWatch._silent",
        ":{run['last_seen_at']:.3f}\"",
        ':{now:.3f}"',
        f"{N}/test_stalled.py::test_three_missing_heartbeats_are_told_once_and_so_is_the_return",
    ),
    Bug(
        "a run that ended is not silent",
        "stale_run:StalledWatch._silent",
        'for run in runs if run["status"] == "stalled"}',
        "for run in runs}",
        f"{N}/test_stalled.py::test_a_run_that_said_that_it_ends_is_not_silent",
    ),
    Bug(
        "the absence of the collector is not held against a run",
        "stale_run:StalledWatch.look",
        "0 <= now - self._began < self._after_s",
        "False",
        f"{N}/test_stalled.py::test_the_collectors_own_absence_is_not_held_against_a_run",
    ),
    Bug(
        "a restart ends no silence",
        "stale_run:StalledWatch.look",
        "            return 0\n        with self._engine.connect() as conn:\n            silent = self._silent(conn, now)\n",
        "            silent = {}\n        with self._engine.connect() as conn:\n"
        "            silent = {} if now - self._began < self._after_s else self._silent(conn, now)\n",
        f"{N}/test_stalled.py::test_a_restart_ends_no_silence_and_tells_none_again",
    ),
    Bug(
        "a silence is told once",
        "stale_run:_ever_told",
        "return set(",
        "return set() and set(",
        f"{N}/test_stalled.py::test_a_silence_that_was_over_is_not_told_twice",
    ),
    Bug(
        "a notice that a channel has holds up no other",
        "fanout:fan_out",
        "        except IntegrityError:\n",
        "        except ZeroDivisionError:\n",
        f"{N}/test_fanout.py::test_a_notice_that_a_channel_has_already_is_dead_and_holds_up_no_other",
    ),
    Bug(
        "a resolve waits for whoever has its firing",
        "fanout:fan_out",
        'if row["kind"] != "firing" and _is_fanned_out_elsewhere(conn, row):',
        "if False:",
        f"{N}/test_fanout.py::test_a_resolve_waits_while_somebody_else_sends_its_firing_on_its_ways",
    ),
]

SECRETS = [
    Bug(
        "no message goes inside",
        "safe_http:refusal",
        "    if not ip.is_global or ip.is_multicast:\n",
        "    if ip.is_multicast:\n",
        f"{N}/test_target.py::test_what_is_neither_global_nor_loopback_is_refused_for_everyone",
    ),
    Bug(
        "loopback in other clothes is loopback",
        "safe_http:refusal",
        "        ip = ip.ipv4_mapped  # ::ffff:127.0.0.1 is 127.0.0.1\n",
        "        return None\n",
        f"{N}/test_target.py::test_what_is_neither_global_nor_loopback_is_refused_for_everyone",
    ),
    Bug(
        "every address of a name is checked",
        "safe_http:Target._checked_address",
        "        for text in addresses:\n",
        "        for text in addresses[:1]:\n",
        f"{N}/test_target.py::test_a_name_with_one_bad_address_among_good_ones_is_refused",
    ),
    Bug(
        "the address that was checked is connected to",
        "safe_http:Target.post",
        "            pool = urllib3.HTTPConnectionPool(address, port,",
        "            pool = urllib3.HTTPConnectionPool(host, port,",
        f"{N}/test_target.py::test_the_checked_address_is_the_one_that_is_connected_to",
    ),
    Bug(
        "no redirect is followed",
        "safe_http:Target.post",
        "                redirect=False,\n                preload_content=False,",
        "                redirect=True,\n                retries=urllib3.Retry(2),\n                preload_content=False,",
        f"{N}/test_target.py::test_redirects_are_not_followed",
    ),
    Bug(
        "a receiver that drips is left",
        "safe_http:Target.post",
        "            ending.after(min(TOTAL_S, 2 * timeout_s))\n",
        "            ending.after(60.0)\n",
        f"{N}/test_target.py::test_a_receiver_that_drips_is_left_in_time",
    ),
    Bug(
        "a signature is of time and body",
        "webhook:signature",
        'signed = str(timestamp).encode() + b"." + body',
        "signed = body",
        f"{N}/test_messages.py::test_a_signed_webhook_can_be_checked",
    ),
    Bug(
        "names stay text in Slack",
        "slack:escape",
        'return visible(str(text)).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")',
        'return visible(str(text)).replace("&", "&amp;")',
        f"{N}/test_messages.py::test_hostile_names_stay_text",
    ),
    Bug(
        "an error shows no secret",
        "safe_http:Target.post",
        '            raise Unreachable(f"{self.masked}: {type(e).__name__}") from None',
        '            raise Unreachable(f"{self.url}: {type(e).__name__}") from None',
        f"{N}/test_target.py::test_nobody_there_is_unreachable_and_the_url_stays_secret",
    ),
]

APPRISE = [
    Bug(
        "a service of apprise goes nowhere inside",
        "egress:EgressWatch.opens",
        "                reason = refusal(str(address[0]), from_operator=True)\n",
        "                reason = None\n",
        f"{N}/test_apprise.py::test_it_is_not_led_inside",
    ),
    Bug(
        "a service of apprise follows no redirect",
        "apprise:_service",
        "    made.redirects = False\n",
        "",
        f"{N}/test_apprise.py::test_no_redirect_is_followed",
    ),
    Bug(
        "a service of apprise has its time",
        "egress:watched",
        "    timer.start()\n",
        "",
        f"{N}/test_apprise.py::test_a_receiver_that_never_ends_is_left",
    ),
    Bug(
        "an address of apprise is not shown",
        "apprise:_service",
        "quiet.level, logging.CRITICAL + 1",
        "quiet.level, logging.DEBUG",
        f"{N}/test_apprise.py::test_an_address_that_cannot_be_used_is_refused_and_not_shown",
    ),
]

BUGS = [*APPRISE, *MOVING, *AT_LEAST_ONCE, *NOT_TWICE, *STORM, *GIVEN, *SOON, *POISON, *SILENCE, *SECRETS]
