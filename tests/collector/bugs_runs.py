"""What is broken on purpose in whose runs and sessions they are, and the test that sees it: a promise a line."""

from __future__ import annotations

from support.planted import Bug

WHOSE = "tests/collector/test_whose_run_it_is.py"
TOKEN = f"{WHOSE}::test_a_token_is_worth_the_runs_that_it_names"
SESSION = f"{WHOSE}::test_a_session_belongs_to_whoever_registered_it"

RUNS = [
    Bug(
        "what was not reproduced decides nothing",
        "api.bisection:post_bisection",
        'got.verdict if got.verdict != "not-reproduced" else None',
        '"shared"',
        "tests/collector/test_bisection.py::test_it_is_kept_and_an_unknown_verdict_takes_it",
    ),
    Bug(
        "a token registers the runs that it names",
        "ingest.routes:_register",
        "    sender_of(request).grant.require(run_id)\n",
        "",
        TOKEN,
    ),
    Bug(
        "a token sends batches of the runs that it names",
        "group_commit:Committer._open",
        "            waiting.sender.grant.require(batch.header.run)\n",
        "",
        TOKEN,
    ),
    Bug(
        "a token sends tile maps of the runs that it names",
        "ingest.routes:post_tile_maps",
        "        sender.grant.require(maps.run)\n",
        "",
        TOKEN,
    ),
    Bug(
        "a token ends when it says",
        "tokens:Auth._refusal",
        "        if grant is None or grant.expired:\n",
        "        if grant is None:\n",
        f"{WHOSE}::test_a_token_ends_when_it_says",
    ),
    Bug(
        "a batch shows the key of its session",
        "commit:_commit_run",
        "        if not key_fits(session.key_sha256, item.key_sha256):\n",
        "        if not item.sha256:\n",
        f"{WHOSE}::test_of_a_real_agent_nobody_takes_a_sequence_number {SESSION}",
    ),
    Bug(
        "tile maps show the key of their session",
        "registrations:require_session",
        "    if not key_fits(row.key_sha256, key_sha256):\n        raise WrongKey\n",
        "",
        SESSION,
    ),
    Bug(
        "sites show the key of their session",
        "registrations:require_registered",
        "    if not key_fits(row.key_sha256, key_sha256):\n        raise WrongKey\n",
        "",
        SESSION,
    ),
    Bug(
        "a session is registered again by its own agent",
        "registrations:register_session",
        "    if known is not None and not key_fits(known.key_sha256, key_sha256):\n        raise WrongKey\n",
        "",
        SESSION,
    ),
    Bug(
        "a session that has no key is not taken by giving it one",
        "registrations:register_session",
        '"registered_at", "key_sha256"}',
        '"registered_at"}',
        SESSION,
    ),
    Bug(
        "one session that is refused does not hold up the others of a spool",
        "sync:Sync._send_all",
        "                if session_of(path) not in self._forbidden:\n",
        "                if session_of(path):\n",
        f"{WHOSE}::test_what_a_spool_holds_is_sent_with_its_key",
    ),
    Bug(
        "a batch whose key was taken is no silent loss",
        "uploader:Uploader.send",
        "            if verdict is ResponseMeaning.REFUSED and answer.status == 409 and rekey:\n",
        "            if verdict is ResponseMeaning.REFUSED and answer.status == 0 and rekey:\n",
        "tests/agent/test_delivery.py::test_a_batch_whose_key_was_taken_goes_under_another_one_and_twice_is_counted",
    ),
    Bug(
        "bytes mean what the page of the wire says",
        "column_words:expected_scale_inv",
        "np.uint32(0x600000)",
        "np.uint32(0x500000)",
        "tests/collector/test_wire_page.py::test_every_value_is_read_as_it_was_meant",
    ),
    Bug(
        "the tables of the wire are those of the code",
        "docs/wire.md",
        "| `worst_tile` | `<i4` | 2 | -1 |",
        "| `worst_tile` | `<i4` | 2 | 0 |",
        "tests/house/test_wire_page.py::test_the_page_has_what_the_code_has"
        " tests/collector/test_wire_page.py::test_every_value_is_read_as_it_was_meant",
    ),
    Bug(
        "a health check speaks TLS where it is on",
        "http.probe:connection",
        '    if environ.get("FP8WATCH_TLS_CERT"):\n',
        '    if environ.get("FP8WATCH_TLS"):\n',
        "tests/collector/test_serve.py::test_a_health_check_asks_the_port_that_is_set_and_speaks_tls_where_it_is_on",
    ),
    Bug(
        "serve --pg starts a PostgreSQL",
        "fp8watch_server.cli:main",
        "        if settings.pg:\n",
        "        if settings.pg is None:\n",
        "tests/collector/test_serve.py::test_it_starts_a_postgresql_of_its_own",
    ),
    Bug(
        "records behind halves are newer than theirs",
        "hot_batches:parts_of",
        "parent_seq(row.seq)",
        "row.seq",
        "tests/store/test_halves.py::test_of_steps_that_came_again_behind_halves_the_later_ones_count",
    ),
    Bug(
        "the loss behind halves is newer than theirs",
        "store.commit:_scalars",
        '"seq": h.parent_seq',
        '"seq": h.seq',
        "tests/store/test_halves.py::test_of_steps_that_came_again_behind_halves_the_later_ones_count",
    ),
    Bug(
        "what is logged behind halves is newer than theirs",
        "store.commit:_logs",
        '"seq": h.parent_seq',
        '"seq": h.seq',
        "tests/store/test_halves.py::test_of_steps_that_came_again_behind_halves_the_later_ones_count",
    ),
    Bug(
        "a session's health goes on behind halves",
        "store.commit:_commit_run",
        "health = (h.parent_seq, h.health) if h.health and h.parent_seq > before[0]",
        "health = (h.seq, h.health) if h.health and h.seq > before[0]",
        "tests/store/test_halves.py::test_of_steps_that_came_again_behind_halves_the_later_ones_count",
    ),
]
