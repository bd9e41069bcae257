"""What is broken on purpose in what is kept of a run, for how long, and in copies of it."""

from __future__ import annotations

from support.planted import Bug

T = "tests/store"
BYTES = f"{T}/test_retention.py::test_the_bytes_of_a_cell_are_those_that_are_there"

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
    Bug(
        "sheets that are written anew are counted once",
        "store.rollup:roll_up",
        "shown_rank=shown[1], num_bytes=num_bytes)",
        "shown_rank=shown[1], num_bytes=cell.num_bytes + num_bytes)",
        BYTES,
    ),
    Bug(
        "what goes of a cell is counted no more",
        "store.retention:_drop",
        "num_bytes = max(0, num_bytes - size)",
        "num_bytes = max(size, num_bytes)",
        BYTES,
    ),
]
