"""What is broken on purpose in the export to Parquet, and the test that sees it."""

from __future__ import annotations

from support.planted import Bug

T = "tests/store/test_export.py"

EXPORT = [
    Bug(
        "a reader of an export finds NaN",
        "export.parquet:write",
        "write_statistics=indexed",
        "write_statistics=True",
        f"{T}::test_duckdb_reads_it_and_finds_what_is_not_finite",
    ),
    Bug(
        "what was not measured is null in an export",
        "export.tables:_series_table",
        "arrays.append(pa.array(values, column.type, mask=~present))",
        "arrays.append(pa.array(values, column.type))",
        f"{T}::test_every_number_is_that_of_the_api[sqlite]",
    ),
    Bug(
        "an export is of one moment",
        "export.command:_export",
        "done.append(write(path, schema_of(name, facts), MAKERS[name](conn, asked)))",
        "done.append(write(path, schema_of(name, facts), MAKERS[name](engine.connect(), asked)))",
        f"{T}::test_a_run_that_is_still_written_is_exported_as_it_was_at_one_moment",
    ),
    Bug(
        "an export of a long run takes bounded memory",
        "export.parquet:write",
        "if held >= ROWS_A_GROUP:",
        "if False:",
        f"{T}::test_a_long_run_is_written_in_row_groups_that_fit_into_memory",
    ),
    Bug(
        "few batches are decoded at a time",
        "export.tables:_steps_at_once",
        "    if not found.hot:\n",
        "    if found.hot:\n",
        f"{T}::test_a_long_run_is_written_in_row_groups_that_fit_into_memory",
    ),
    Bug(
        "an export that fails leaves nothing behind",
        "export.parquet:whole_or_nothing",
        "        shutil.rmtree(part, ignore_errors=True)\n",
        "        pass\n",
        f"{T}::test_there_is_a_whole_export_or_none",
    ),
]
