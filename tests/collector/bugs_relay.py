"""What is broken on purpose in a relay with several collectors, and the test that sees it."""

from __future__ import annotations

from support.planted import Bug

T = "tests/collector/test_relay_collectors.py"
TURNS = f"{T}::test_a_broken_batch_goes_to_a_collector_that_answers"
FORESAW = f"{T}::test_an_error_that_nobody_foresaw_holds_back_one_session"
OTHERS = f"{T}::test_while_a_run_is_refused_the_others_go_on[run-0-503]"

RELAY = [
    Bug(
        "a relay turns to another collector",
        "relay_collectors:Collectors.order",
        "key=lambda i: (i in self._away, i)",
        "key=lambda i: i",
        f"{TURNS}[hangs]",
    ),
    Bug(
        "a broken batch does not wait for a collector that hangs",
        "relay_express:Express._take",
        "if now < begun + max(HEDGE_S, min(MAX_HEDGE_S, 2 * self._took_s)) * place:",
        "if True:",
        f"{TURNS}[hangs]",
    ),
    Bug(
        "a broken batch that is refused at once goes to another collector at once",
        "relay_express:Express._settle",
        "job.asked[at] = True",
        "pass",
        f"{T}::test_who_refuses_a_broken_batch_is_not_waited_for",
    ),
    Bug(
        "a collector that is there again is used again",
        "relay_collectors:Collectors._run",
        "                    self._returned(i)\n",
        "                    pass\n",
        f"{TURNS}[away]",
    ),
    Bug(
        "a session that is refused by one collector is tried at another",
        "relay_forward:Forwarder._round",
        "order = order[lane.rounds % len(order) :] + order[: lane.rounds % len(order)]",
        "pass",
        f"{T}::test_what_one_collector_refuses_another_one_takes",
    ),
    Bug(
        "nobody waits behind a run that is refused",
        "relay_forward:Forwarder._entries",
        "REQUEST_BYTES, but=self.holds)",
        "REQUEST_BYTES)",
        OTHERS,
    ),
    Bug(
        "who is held is tried again",
        "relay_holds:Holds.due",
        "if hold.until <= now",
        "if False",
        OTHERS,
    ),
    Bug(
        "a request that was not answered in time is smaller the next time",
        "relay_forward:Forwarder._round",
        "lane.most = max(MIN_JOINED, min(lane.most, len(entries)) // 2)",
        "pass",
        f"{T}::test_a_collector_that_is_slow_gets_smaller_requests",
    ),
    Bug(
        "a run whose database hangs is asked about once at a time",
        "relay_express:Express._take",
        " or at in of_run.busy",
        "",
        f"{T}::test_a_run_whose_database_hangs_leaves_a_way_to_the_others",
    ),
    Bug(
        "of an earlier relay's broken batches the newest goes first",
        "relay_express:Express.__init__",
        "self._jobs.reverse()",
        "pass",
        f"{T}::test_a_relay_that_starts_again_sends_the_newest_broken_batch_first",
    ),
    Bug(
        "sessions that are refused leave room to the others",
        "relay_journals:Journals.append",
        "room = int(self._max_bytes * ROOM_OF_HELD) if held else self._max_bytes",
        "room = self._max_bytes",
        f"{T}::test_who_is_refused_leaves_room_and_files_to_the_others",
    ),
    Bug(
        "the journal of a session that says nothing is closed",
        "relay_journals:Journals.tidy",
        "if self._of[session].close_drained():",
        "if False:",
        f"{T}::test_who_is_refused_leaves_room_and_files_to_the_others",
    ),
    Bug(
        "a file of which nothing waits is given up",
        "relay_journal:Journal.advance",
        "if not self._waiting and self._fd >= 0 and",
        "if False and",
        f"{T}::test_a_file_of_which_nothing_waits_is_given_up",
    ),
    Bug(
        "what is refused takes no more than its room",
        "relay_refused:Refused._has_room",
        "sum(sizes) + num_bytes <= MAX_BYTES",
        "num_bytes <= MAX_BYTES",
        f"{T}::test_what_is_refused_takes_no_more_than_its_room",
    ),
    Bug(
        "what is refused has no more than so many files",
        "relay_refused:Refused._has_room",
        "len(sizes) < MAX_FILES and ",
        "",
        f"{T}::test_a_session_of_somebody_else_is_refused_for_good",
    ),
    Bug(
        "a refusal is said once",
        "relay_refused:Refused.keep",
        "        if first:\n",
        "        if True:\n",
        f"{T}::test_a_session_of_somebody_else_is_refused_for_good",
    ),
    Bug(
        "a full disk keeps no file that is delivered",
        "relay_journal:Journal.advance",
        "            self._forget(self._waiting[0].file if self._waiting else self._file)\n",
        "            (self._directory / f'{POSITION}.new').write_text('')\n"
        "            self._forget(self._waiting[0].file if self._waiting else self._file)\n",
        f"{T}::test_on_a_full_disk_what_is_delivered_is_deleted",
    ),
    Bug(
        "a full disk sends no batch again",
        "relay_journal:Journal.advance",
        "with contextlib.suppress(OSError):",
        "with contextlib.suppress(LookupError):",
        f"{T}::test_on_a_full_disk_no_batch_is_sent_again",
    ),
    Bug(
        "a journal whose close fails is closed once",
        "relay_journal:Journal._close",
        "        fd, self._fd = self._fd, -1\n",
        "        fd = self._fd\n",
        f"{T}::test_a_journal_whose_close_fails_is_closed_once",
    ),
    Bug(
        "what is delivered takes away itself alone",
        "relay_journal:Journal.advance",
        "while self._waiting and (self._waiting[0].file, self._waiting[0].at) <= place:",
        "if self._waiting:",
        f"{T}::test_two_threads_that_take_from_one_session_lose_nothing",
    ),
    Bug(
        "what an earlier relay kept is sent",
        "relay_journals:Journals.__init__",
        "self._take_over(directory)",
        "pass",
        f"{T}::test_what_an_earlier_relay_kept_in_one_journal_is_sent",
    ),
    Bug(
        "a collector is named once",
        "relay_collectors:read_collectors",
        "if url in out:",
        "if False:",
        f"{T}::test_several_are_named_with_commas",
    ),
    Bug(
        "a thread of a relay ends when the relay does",
        "relay_forward:Forwarder._deliver",
        "            except Exception as e:  # noqa: BLE001 - said in _broke\n",
        "            except KeyError as e:\n",
        FORESAW,
    ),
    Bug(
        "a session whose batch ends in an error is held",
        "relay_forward:Forwarder._broke",
        "if len(lane.tried) == 1:",
        "if False:",
        FORESAW,
    ),
    Bug(
        "of batches that end in an error fewer go next",
        "relay_forward:Forwarder._broke",
        "        lane.most = 1\n",
        "",
        FORESAW,
    ),
    Bug(
        "an error of this relay is said once",
        "relay_forward:Forwarder._broke",
        "if time.monotonic() - self._said_at > SAY_EVERY_S:",
        "if True:",
        FORESAW,
    ),
    Bug(
        "an error on the fast way ends no thread",
        "relay_express:Express._run",
        "except Exception as e:",
        "except KeyError as e:",
        FORESAW,
    ),
]
