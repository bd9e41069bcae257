"""Parquet files of a run, for DuckDB, polars and what else reads them."""
