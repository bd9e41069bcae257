"""What is broken on purpose in the collector's defences, and the test that sees it: a promise a line."""

from __future__ import annotations

from support.planted import Bug

S = "server/fp8watch_server"
C = "tests/collector"
T = "tests/store"
TEXTS = f"{C}/test_hostile.py::test_texts_that_no_database_holds_stop_nobody"

BOMBS = [
    Bug(
        "a map has no more tiles than a body may",
        "wire_maps:decode_tile_maps",
        "if total > MAX_TILES:",
        "if False:",
        f"{C}/test_limits.py::test_a_bomb_is_refused_and_memory_stays_flat",
    ),
    Bug(
        "a column that is left out takes no memory",
        "wire_maps:decode_tile_maps",
        "np.broadcast_to(np.zeros(1, dtype), total)",
        "np.ones(total, dtype) * 0",
        f"{C}/test_limits.py::test_a_large_map_of_a_few_bytes_costs_little_and_is_shown_in_part",
    ),
    Bug(
        "of a large map a part is shown",
        "tile_maps:_window",
        "min(rows, MAX_SHOWN_TILES // max(shown, 1))",
        "rows",
        "tests/pages/test_large_tile_maps.py::test_of_a_map_that_is_too_large_the_rows_around_its_worst_tile_are_given",
    ),
    Bug(
        "a frame that declares a gigabyte is refused unread",
        "bounded_decompress:decompress",
        "        if size > max_bytes:\n            raise",
        "        if size < 0:\n            raise",
        f"{C}/test_limits.py::test_a_bomb_is_refused_and_memory_stays_flat",
    ),
    Bug(
        "a stream of gzip is counted before it is kept",
        "bounded_decompress:_gunzip",
        "        if sum(map(len, _pieces(body, max_bytes))) > max_bytes:",
        "        if len(b''.join([*_pieces(body, 4 * max_bytes)])) > max_bytes:",
        f"{C}/test_limits.py::test_a_bomb_is_refused_and_memory_stays_flat",
    ),
    Bug(
        "a window has a limit",
        "bounded_decompress:_unzstd",
        "max_window_size=MAX_WINDOW_BYTES",
        "max_window_size=1 << 30",
        f"{C}/test_limits.py::test_a_bomb_is_refused_and_memory_stays_flat",
    ),
    Bug(
        "maps stay closed until their size is known",
        "envelope:open_map",
        "    if count > MAX_COLUMNS:\n",
        "    if count < 0:\n",
        "tests/agent/test_wire.py::test_a_map_of_too_many_columns_is_refused_before_it_is_opened",
    ),
    Bug(
        "limits are those that are promised",
        "bounded_decompress",
        "MAX_INFLATED_BYTES = 64 << 20",
        "MAX_INFLATED_BYTES = 256 << 20",
        f"{C}/test_limits.py::test_limits_are_those_that_are_promised",
    ),
]

SECURITY = [
    Bug(
        "a foreign name is refused",
        "tokens:Auth._refusal",
        "            return self._misdirected(headers)\n",
        "            return None\n",
        f"{C}/test_auth.py::test_a_name_that_was_made_to_point_here_is_refused",
    ),
    Bug(
        "scopes are asked for",
        "tokens:Auth._refusal",
        "        if needed not in grant.scopes:",
        "        if not grant.scopes:",
        f"{C}/test_auth.py::test_every_route_lets_in_who_has_its_scope",
    ),
    Bug(
        "changing anything needs admin",
        "tokens:needed_scope",
        'return "read" if method in ("GET", "HEAD", "OPTIONS") else "admin"',
        'return "read"',
        f"{C}/test_auth.py::test_every_route_lets_in_who_has_its_scope",
    ),
    Bug(
        "a revoked token opens nothing",
        "tokens:read_tokens",
        "        if row.revoked_at is None\n",
        "        if row is not None\n",
        f"{C}/test_auth.py::test_every_route_lets_in_who_has_its_scope",
    ),
    Bug(
        "a new route has a line in the table",
        "app:create_app",
        "    app.add_middleware(IngestFastPath)\n",
        '    app.add_api_route("/new", _metrics, methods=["GET"])\n    app.add_middleware(IngestFastPath)\n',
        f"{C}/test_auth.py::test_every_route_is_in_the_table",
    ),
    Bug(
        "listening for others needs a token",
        "tokens:check_exposure",
        "    if settings.loopback or settings.insecure or guarded:",
        "    if settings.host:",
        f"{C}/test_auth.py::test_beyond_loopback_a_token_is_needed",
    ),
    Bug(
        "a proxy in front needs a token",
        "server/fp8watch_server/settings/__init__.py",
        " and (public is None or _is_loopback(public))",
        "",
        f"{C}/test_auth.py::test_beyond_loopback_a_token_is_needed",
    ),
    Bug(
        "a page of another site may not write",
        "tokens:Auth._refusal",
        'if needed != "read" and self._of_another_site(headers):',
        'if needed == "nothing" and self._of_another_site(headers):',
        f"{C}/test_auth.py::test_a_page_of_somebody_else_cannot_write",
    ),
    Bug(
        "a browser that cannot say whose page it is may not write",
        "tokens:Auth._of_another_site",
        'return headers.get("user-agent", "").startswith("Mozilla/")',
        "return False",
        f"{C}/test_auth.py::test_a_page_of_somebody_else_cannot_write",
    ),
    Bug(
        "names do not turn text around",
        "bidi:visible",
        "if not isinstance(value, str) or not _TURNING.search(value):",
        "if value is not None:",
        f"{C}/test_auth.py::test_names_from_outside_do_not_turn_text_around",
    ),
    Bug(
        "nor in what Slack shows",
        "slack:escape",
        "return visible(str(text)).replace(",
        "return str(text).replace(",
        "tests/notify/test_messages.py::test_names_do_not_turn_the_text_of_a_message_around",
    ),
    Bug(
        "a token is kept as its hash",
        "tokens:install_token",
        '{"token_sha256": token_sha256(settings.token), "tenant"',
        '{"token_sha256": settings.token, "tenant"',
        f"{C}/test_auth.py::test_a_token_is_kept_as_its_hash_only",
    ),
    Bug(
        "a collector without a token takes that of another from nobody",
        "tokens:install_token",
        "        if others is not None:",
        "        with writing(engine) as conn:\n"
        "            conn.execute(sa.delete(t.token).where(c.name == SETTINGS_NAME))\n"
        "        if others is not None:",
        f"{C}/test_auth.py::test_a_collector_without_a_token_takes_that_of_another_from_nobody",
    ),
    Bug(
        "the collector's own PostgreSQL ends with it at SIGTERM",
        "server/fp8watch_server/cli.py",
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))",
        "pass",
        f"{C}/test_serve.py::test_it_starts_a_postgresql_of_its_own",
    ),
    Bug(
        "and after one that was killed",
        "embedded:start",
        "        _forget_the_dead(folder / USERS)\n",
        "",
        f"{C}/test_serve.py::test_it_starts_a_postgresql_of_its_own",
    ),
    Bug(
        "the demo's collector has no settings of a team's",
        "demo.collector:running_collector",
        ' if not name.startswith("FP8WATCH_")',
        "",
        "tests/integration/test_demo.py::test_settings_of_a_teams_collector_are_not_those_of_the_demos",
    ),
    Bug(
        "commands find the collector's own PostgreSQL",
        "server/fp8watch_server/settings/__init__.py",
        '        if values["pg"]:\n            values',
        "        if False:\n            values",
        f"{C}/test_settings.py::"
        "test_where_the_collector_has_a_postgresql_of_its_own_no_command_makes_or_reads_another_database",
    ),
    Bug(
        "logs hold no secret",
        "logs:Redacted.clean",
        'return _BEARER.sub("fp8w_***", text)[:MAX_CHARS]',
        "return text[:MAX_CHARS]",
        f"{C}/test_limits.py::test_a_line_of_the_log_holds_no_secret_and_is_one_line",
    ),
    Bug(
        "words of an address stay in the log",
        "logs:_ways_to_write",
        "            if any(token in text for token in tokens):\n",
        "            if len(text) > 4:\n",
        "tests/notify/test_secrets_in_log.py::test_words_of_an_address_stay_in_other_lines",
    ),
    Bug(
        "a password in an address is masked by itself",
        "logs:_ways_to_write",
        "    if parts.password:\n",
        "    if parts.password == '':\n",
        "tests/notify/test_secrets_in_log.py::test_short_tokens_and_passwords_of_an_address_are_masked",
    ),
    Bug(
        "a table holds no formula",
        "csv_answers:cell",
        "value.startswith(_FORMULA)",
        "value.startswith(chr(0))",
        f"{T}/test_api.py::test_csv_holds_every_value_and_no_formula",
    ),
    Bug(
        "the role of the dashboards reads views only",
        "sql_views:grant_reader",
        "GRANT SELECT ON ALL TABLES IN SCHEMA {SCHEMA} TO",
        "GRANT SELECT ON ALL TABLES IN SCHEMA {SCHEMA}, public TO",
        f"{T}/test_views.py::test_the_role_of_the_dashboards_reads_the_views_and_nothing_else",
    ),
    Bug(
        "a tenant's reader sees the runs of its tenant alone",
        "db.row_security:renew",
        "USING (run_id = ANY (ARRAY(SELECT {TENANCY}.visible_runs())))",
        "USING (true)",
        "tests/store/test_row_security.py::test_a_reader_sees_no_run_of_another_tenant_in_any_view_or_table",
    ),
    Bug(
        "views ask with the rights of the reader",
        "db.row_security:renew",
        "SET (security_invoker = true)",
        "RESET (security_invoker)",
        "tests/store/test_row_security.py::test_a_reader_sees_no_run_of_another_tenant_in_any_view_or_table",
    ),
]

PARSERS = [
    Bug(
        "names are as every database holds them",
        "wire:_storable",
        'kept.setdefault(name.replace("\\0", "\\ufffd")[:MAX_NAME_CHARS], value)',
        "kept.setdefault(name[:MAX_NAME_CHARS], value)",
        TEXTS,
    ),
    Bug(
        "a name is no longer than an index takes",
        "wire:_storable",
        "[:MAX_NAME_CHARS]",
        "",
        TEXTS,
    ),
    Bug(
        "what a database does not take of one batch stops no other",
        "detect_worker:DetectWorker._take",
        "if isinstance(e, DBAPIError) and (e.connection_invalidated or not isinstance(e, OF_THE_VALUES)):",
        "if isinstance(e, DBAPIError):",
        f"{C}/test_worker.py::test_an_incident_that_no_database_takes_stops_no_other_batch",
    ),
    Bug(
        "what a database says of itself marks no batch",
        "detect_worker:DetectWorker._take",
        " or not isinstance(e, OF_THE_VALUES)):",
        "):",
        f"{C}/test_worker.py::test_what_a_database_says_of_itself_marks_no_batch",
    ),
    Bug(
        "a key that was taken meanwhile is tried again",
        "detect_worker:DetectWorker._take",
        "if isinstance(e, IntegrityError) and len(rows) == 1 and not again:",
        "if False:",
        f"{C}/test_worker.py::test_a_unique_key_that_was_taken_meanwhile_is_no_batch_s_fault",
    ),
    Bug(
        "what a diagnosis says is text",
        "bodies:checked",
        '        if b"\\\\u0000" in body or b"\\0" in body:\n',
        "        if False:\n",
        f"{C}/test_bisection.py::test_what_is_no_bisection_is_refused_and_nothing_is_kept",
    ),
    Bug(
        "whatever a body holds the answer is below 500",
        "envelope:decode_header",
        " or header.seq >= 1 << 63:",
        " or header.seq < 0:",
        f"{C}/test_hostile.py::test_mutated_bodies_never_get_a_5xx_and_leave_a_readable_run[sqlite]",
    ),
    Bug(
        "whatever a query holds the answer is below 500",
        "app:create_app",
        "    app.add_exception_handler(FieldError, _on_asked_wrongly)\n",
        "",
        f"{C}/test_hostile.py::test_queries_bear_hostile_parameters"
        f" {C}/test_queries.py::test_a_question_that_makes_no_sense_is_a_422_problem",
    ),
    Bug(
        "what the description allows is answered",
        "app:create_app",
        "    app.add_exception_handler(CursorError, _on_asked_wrongly)\n",
        "",
        f"{C}/test_openapi.py::test_whatever_the_description_allows_and_forbids_is_answered"
        f" {C}/test_hostile.py::test_queries_bear_hostile_parameters",
    ),
    Bug(
        "nothing that executes what it reads",
        "engine_restore",
        "from __future__ import annotations\n",
        "from __future__ import annotations\n\nimport pickle\n",
        f"{C}/test_parsers.py::test_nothing_is_imported_that_executes_what_it_reads",
    ),
    Bug(
        "sql is bound",
        "db_timeout:DbTimeoutMiddleware._ask",
        'sa.text("SELECT 1")',
        'sa.text(f"SELECT {1}")',
        f"{C}/test_parsers.py::test_sql_is_bound_or_built_and_never_put_together",
    ),
    Bug(
        "a token has 256 bits",
        "tokens:new_token",
        "secrets.token_urlsafe(32)",
        "secrets.token_urlsafe(16)",
        f"{C}/test_tokens.py::test_a_token_is_256_random_bits_with_a_prefix_and_shown_once",
    ),
    Bug(
        "a page loads no script of others",
        "security_headers",
        "script-src 'self';",
        "script-src 'self' 'unsafe-inline';",
        f"{C}/test_auth.py::test_names_from_outside_are_not_markup_and_not_lines",
    ),
    Bug(
        "containers run as a user",
        "Dockerfile",
        "USER 10001\n",
        "",
        "tests/house/test_operations.py::test_the_image_runs_as_a_user_and_is_checked",
    ),
]

DEFENCES = [*BOMBS, *SECURITY, *PARSERS]
