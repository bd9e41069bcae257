"""What is broken on purpose in the limits of connections and in the patience with a slow collector: a promise a line."""

from __future__ import annotations

from support.planted import Bug

S = "server/fp8watch_server"
SLOW = "tests/collector/test_slow_clients.py"
PATIENT = "tests/collector/test_slow_collector.py"
ENDLESS = f"{SLOW}::test_a_header_without_end_is_refused_at_its_limit"

CONNECTIONS = [
    Bug(
        "a database URL that cannot be used is refused without its password",
        "db.dialect:parse_url",
        "{shown[:40]!r}",
        "{text!r}",
        "tests/collector/test_settings.py::test_a_url_that_cannot_be_used_is_refused_without_its_password",
    ),
    Bug(
        "so is one of another setting",
        "server/fp8watch_server/settings/__init__.py",
        ' or "@" in given',
        "",
        "tests/collector/test_settings.py::test_a_url_that_cannot_be_used_is_refused_without_its_password",
    ),
    Bug(
        "a database is for its owner alone",
        "db.dialect:make_engine",
        "                make_private(file)\n",
        "                pass\n",
        "tests/collector/test_settings.py::test_a_database_and_its_backup_are_for_their_owner_alone",
    ),
    Bug(
        "a backup is for its owner alone",
        "store.backup:backup",
        "    make_private(part)\n",
        "",
        "tests/collector/test_settings.py::test_a_database_and_its_backup_are_for_their_owner_alone",
    ),
    Bug(
        "under root no folder is opened to everybody",
        "embedded:refuse_private",
        "if above.exists() and above.stat().st_mode & OPEN != OPEN:",
        "if False:",
        "tests/store/test_embedded.py::test_under_root_no_folder_is_opened_to_everybody",
    ),
    Bug(
        "TLS files that do not serve are said",
        "server/fp8watch_server/cli.py",
        "        check_tls(settings)\n",
        "",
        "tests/collector/test_serve.py::test_tls_files_that_do_not_serve_are_said",
    ),
    Bug(
        "a file that may not be read is said",
        "server/fp8watch_server/settings/values.py",
        '        path.open("rb").close()\n',
        "        path.is_file()\n",
        "tests/collector/test_serve.py::test_a_file_that_may_not_be_read_is_said",
    ),
    Bug(
        "a NUL in an address is refused",
        "plain_address:PlainAddress.__call__",
        ' or b"%00" in scope["query_string"]',
        "",
        "tests/collector/test_hostile.py::test_a_nul_in_an_address_is_refused",
    ),
    Bug(
        "joined bodies are counted before they are decoded",
        "agent/fp8watch_agent/joined.py",
        "min_length=1, max_length=MAX_JOINED",
        "min_length=1",
        "tests/collector/test_relay.py::test_the_number_of_joined_bodies_is_checked_before_they_are_decoded",
    ),
    Bug(
        "a load for nobody ends",
        "server/fp8watch_server/load/command.py",
        "        reach(url, token)\n",
        "",
        "tests/load/test_fleet.py::test_a_load_for_nobody_ends_and_says_so",
    ),
    Bug(
        "a replay reads the database of the collector's settings",
        "pipeline.replay:_replay",
        "opened(settings)",
        'opened(Settings("sqlite:///nowhere.db"))',
        "tests/collector/test_replay.py::test_the_command_takes_a_rules_file",
    ),
    Bug(
        "a query that outlives its client leaves no connection open",
        "db.pools:close",
        "pool.checkedout() and",
        "False and",
        "tests/collector/test_last_connections.py::test_a_query_that_outlives_its_client_leaves_no_connection_open",
    ),
    Bug(
        "a header has an end",
        "connections:Connection.data_received",
        "            if max(self._num_header_bytes, self._num_framing_bytes) >= self._limits.max_header_bytes:",
        "            if self._num_header_bytes < 0:",
        ENDLESS,
    ),
    Bug(
        "so has what surrounds a body",
        "connections:Connection.data_received",
        "max(self._num_header_bytes, self._num_framing_bytes) >=",
        "self._num_header_bytes >=",
        ENDLESS,
    ),
    Bug(
        "a header that is whole has a size",
        "connections:Connection._wrong",
        "if size > self._limits.max_header_bytes or",
        "if size < 0 or",
        f"{SLOW}::test_a_header_has_a_number_of_lines_and_one_host",
    ),
    Bug(
        "a header has a number of lines",
        "connections:Connection._wrong",
        "len(self.headers) > self._limits.max_headers:",
        "len(self.headers) < 0:",
        f"{SLOW}::test_a_header_has_a_number_of_lines_and_one_host",
    ),
    Bug(
        "a request names one host",
        "connections:Connection._wrong",
        "        if num_hosts != 1 and",
        "        if num_hosts < 0 and",
        f"{SLOW}::test_a_header_has_a_number_of_lines_and_one_host",
    ),
    Bug(
        "a header is complete in time",
        "connections:Connection.tick",
        "elif self._stage is Stage.NEW and self._waited_s > limits.header_s:",
        "elif self._stage is Stage.NEW and self._waited_s < 0:",
        f"{SLOW}::test_a_request_that_does_not_come_is_ended",
    ),
    Bug(
        "a body goes on",
        "connections:Connection._body_is_late",
        "return self._silent_s > self._limits.idle_s or self._waited_s > allowed_s",
        "return False",
        f"{SLOW}::test_a_request_that_does_not_come_is_ended",
    ),
    Bug(
        "a body has a least speed",
        "connections:Connection._body_is_late",
        " or self._waited_s > allowed_s",
        "",
        f"{SLOW}::test_a_body_that_trickles_is_ended_and_one_that_goes_on_is_not",
    ),
    Bug(
        "a body that goes on is waited for",
        "connections:Connection._body_is_late",
        "self._limits.idle_s + self._num_body_bytes / self._limits.min_body_bytes_per_s",
        "self._limits.idle_s",
        f"{SLOW}::test_a_body_that_trickles_is_ended_and_one_that_goes_on_is_not",
    ),
    Bug(
        "an answer may take its time",
        "connections:Connection.tick",
        "elif self._stage is Stage.IDLE and self._waited_s > limits.idle_s:",
        "elif self._waited_s > limits.idle_s:",
        f"{SLOW}::test_an_answer_may_take_its_time_but_must_be_read",
    ),
    Bug(
        "an answer must be read",
        "connections:Connection.tick",
        "if self._unread_s > limits.idle_s:",
        "if self._unread_s < 0:",
        f"{SLOW}::test_an_answer_may_take_its_time_but_must_be_read",
    ),
    Bug(
        "connections leave descriptors for the database",
        "server:limits_within",
        "max_connections=min(limits.max_connections, left)",
        "max_connections=limits.max_connections",
        f"{SLOW}::test_the_limits_are_those_that_are_promised"
        f" {SLOW}::test_half_open_requests_leave_descriptors_for_agents",
    ),
    Bug(
        "there is a place for one more",
        "server:Server._accept",
        "            if self._is_full() and not self._make_room():",
        "            if self._is_full():",
        f"{SLOW}::test_half_open_requests_leave_descriptors_for_agents",
    ),
    Bug(
        "a half open connection goes before an agent does",
        "connections:Connections.drop_one",
        "for stage in (Stage.REFUSED, Stage.NEW, Stage.IDLE, Stage.BODY):",
        "for stage in (Stage.IDLE, Stage.BODY, Stage.ANSWER, Stage.NEW):",
        f"{SLOW}::test_who_asks_for_nothing_makes_room_first",
    ),
    Bug(
        "a connection whose tls does not begin is counted",
        "server:Server._is_full",
        "return len(self.connections) + len(self._opening) >=",
        "return len(self.connections) >=",
        f"{SLOW}::test_with_tls_the_limits_are_the_same",
    ),
    Bug(
        "the limit of descriptors is raised",
        "server:raise_descriptor_limit",
        "    if soft != hard:",
        "    if soft > hard:",
        f"{SLOW}::test_a_collector_raises_its_own_limit_of_descriptors",
    ),
    Bug(
        "no descriptor is a 503",
        "errors:_on_bug",
        "cause.errno in OUT_OF_DESCRIPTORS:",
        "cause.errno < 0:",
        f"{SLOW}::test_a_request_that_finds_no_descriptor_is_a_503",
    ),
    Bug(
        "nothing is imported by the first batch",
        "app",
        "import numpy.ma  # noqa: F401  of np.unique\n",
        "",
        f"{SLOW}::test_nothing_is_imported_once_the_collector_serves",
    ),
    Bug(
        "a socket that accepts nothing leaves others their turn",
        "server:Server._accept",
        "                if e.errno != errno.ECONNABORTED:",
        "                if e.errno in OUT_OF_DESCRIPTORS:",
        f"{SLOW}::test_a_socket_that_accepts_nothing_leaves_others_their_turn",
    ),
    Bug(
        "a transport that fails leaves others their limits",
        "connections:Connections._tick",
        "                    connection.transport.abort()\n",
        "                    raise\n",
        f"{SLOW}::test_a_transport_that_fails_leaves_others_their_limits",
    ),
    Bug(
        "a clock of work counts one request",
        "db_timeout:WorkClock.read_s",
        "time.clock_gettime(self._clock) - self._before_s",
        "time.clock_gettime(self._clock)",
        f"{PATIENT}::test_a_thread_that_worked_for_others_has_done_nothing_yet",
    ),
    Bug(
        "a fact has a length",
        "registration:SessionBody",
        "facts: dict[Name, LongText | int",
        "facts: dict[Name, str | int",
        "tests/collector/test_ingest_answers.py::test_a_fact_has_a_length",
    ),
]

PATIENCE = [
    Bug(
        "work is progress",
        "db_timeout:ProgressTimeout.wait",
        "if now_s - before_s < WORKED_S or",
        "if before_s < WORKED_S + now_s or",
        f"{PATIENT}::test_work_on_a_registration_is_not_the_database"
        f" {PATIENT}::test_to_decode_a_batch_is_not_the_database",
    ),
    Bug(
        "decoders work as well",
        "group_commit:Committer._worked_s",
        "        return decoders_s + self._commit_clock.read_s()",
        "        return 0 * decoders_s + self._commit_clock.read_s()",
        f"{PATIENT}::test_to_decode_a_batch_is_not_the_database",
    ),
    Bug(
        "waiting is not work",
        "db_timeout",
        "WORKED_S = 0.01",
        "WORKED_S = -1.0",
        f"{PATIENT}::test_a_database_that_gets_nothing_done_is_not_waited_for",
    ),
    Bug(
        "each part of a registration is progress",
        "ingest.intake:Ingest.__init__",
        "SiteRegistry(self.engine, self.db_timeout.progress)",
        "SiteRegistry(self.engine, lambda: None)",
        f"{PATIENT}::test_a_slow_database_is_waited_for_while_it_gets_something_done",
    ),
    Bug(
        "a repeated registration is known",
        "ingest.sites:SiteRegistry.register",
        "        if known is not None:\n            return known\n",
        "",
        f"{PATIENT}::test_what_is_registered_is_known_without_a_look_at_it",
    ),
    Bug(
        "what others have changed is not known any more",
        "ingest.sites:SiteRegistry.register",
        "            if changed:\n",
        "            if not sites:\n",
        f"{PATIENT}::test_what_others_have_changed_is_registered_again",
    ),
    Bug(
        "a run that came again is another",
        "ingest.sites:SiteRegistry._known",
        "return self._bodies.find(run_id, created_at, digest)",
        "return self._bodies.find(run_id, max([c for _, c, _ in self._bodies._known], default=0), digest)",
        f"{PATIENT}::test_what_others_have_changed_is_registered_again",
    ),
]

LOGS = [
    Bug(
        "libraries do not log what they send",
        "logs:set_up",
        "root.setLevel(max(level, logging.WARNING))",
        "root.setLevel(level)",
        "tests/notify/test_secrets_in_log.py::test_no_address_is_in_the_log_of_a_collector_that_says_all",
    ),
    Bug(
        "tables that grow at once are analysed",
        "db.planner_statistics:PlannerStatistics.renew",
        "        for name in grew:\n",
        "        for name in ():\n",
        "tests/store/test_planner_statistics.py::test_a_table_that_has_grown_fourfold_is_analysed_once",
    ),
    Bug(
        "of many sessions only a new one is read",
        "run_engines:RunEngines._look",
        "self._sessions(conn, key, running, fresh)",
        "self._sessions(conn, key, running, None)",
        "tests/store/test_planner_statistics.py::test_of_many_sessions_only_a_new_one_is_read",
    ),
    Bug(
        "the ranks of a host say of their sites again when the run was deleted",
        "uploader:Uploader.forget",
        "        self._told.sites.pop(session.run_id, None)\n",
        "        pass\n",
        "tests/load/test_fleet.py::test_ranks_of_a_host_say_of_their_run_and_sites_once_and_again_when_it_was_deleted",
    ),
    Bug(
        "an address is masked in parts",
        "logs:_ways_to_write",
        "    if not parts.netloc:\n",
        "    if parts.netloc:\n",
        "tests/notify/test_secrets_in_log.py::test_an_address_is_masked_in_parts_too",
    ),
]

EDGE = [*CONNECTIONS, *PATIENCE, *LOGS]
