"""What is broken on purpose in what is kept of a run, for how long, and in copies of it."""

from __future__ import annotations

from support.planted import Bug

T = "tests/store"

KEPT = [
    Bug(
        "a backup ends while others commit",
        "store.backup:_sqlite",
        "from_.backup(into)",
        "from_.backup(into, pages=4096)",
        f"{T}/test_commands.py::test_a_backup_ends_though_others_commit_all_the_while",
    ),
    Bug(
        "a host that falls silent is noticed",
        "db.dialect:_postgresql",
        "        _impatient(url),",
        "        url,",
        "tests/collector/test_database_away.py::test_no_connection_waits_for_a_host_that_fell_silent",
    ),
]
