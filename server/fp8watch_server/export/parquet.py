"""Parquet files written a row group at a time, under their final names when they are whole.

Shapes:     tables of any number of rows -> row groups -> one file
Thread:     `fp8watch export`
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

ROWS_A_GROUP = 1 << 15
"""What is held in memory before it is written."""


class ExportError(RuntimeError):
    """Why there is no export: value, rule, remedy."""


@dataclass(frozen=True)
class Written:
    """A file."""

    name: str
    num_rows: int
    num_row_groups: int
    num_bytes: int


def write(path: Path, schema: pa.Schema, parts: Iterable[pa.Table]) -> Written:
    """Write a file; memory is bounded by the largest part and a row group."""
    # Extremes of floats leave NaN out, and a reader that skips row groups by them would skip the NaN that is looked for.
    indexed = [f.name for f in schema if pa.types.is_integer(f.type) or pa.types.is_string(f.type)]
    num_rows, held, waiting = 0, 0, list[pa.Table]()
    with pq.ParquetWriter(path, schema, compression="zstd", write_statistics=indexed) as writer:
        for part in parts:
            waiting.append(part)
            held += part.num_rows
            if held >= ROWS_A_GROUP:
                writer.write_table(pa.concat_tables(waiting), row_group_size=ROWS_A_GROUP)
                num_rows, held = num_rows + held, 0
                waiting.clear()
        if held:
            writer.write_table(pa.concat_tables(waiting), row_group_size=ROWS_A_GROUP)
    with path.open("rb") as f:
        os.fsync(f.fileno())
    return Written(path.name, num_rows + held, pq.ParquetFile(path).num_row_groups, path.stat().st_size)


@contextmanager
def whole_or_nothing(target: Path) -> Iterator[Path]:
    """A folder to write into. Its files become `target` when the block ends, and are gone when it raises.

    `target` is a folder that is not there or empty, or a file whose name ends in .parquet.

    Raises:
        ExportError: something is there, or it cannot be written.
    """
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ExportError(f"{str(target)!r} is there already; an export is never written over: choose another name")
    if not target.parent.is_dir():
        raise ExportError(f"folder {str(target.parent)!r} is not there; make it, or choose another")
    try:
        part = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent))
    except OSError as e:
        raise ExportError(f"folder {str(target.parent)!r} cannot be written ({e}); choose another") from e
    try:
        yield part
        if is_file(target):
            (part / target.name).replace(target)
        else:
            part.chmod(0o777 & ~_umask())
            part.replace(target)
    except OSError as e:
        raise ExportError(f"{str(target)!r} cannot be written ({e}); make room, or choose another place") from e
    finally:
        shutil.rmtree(part, ignore_errors=True)


def is_file(target: Path) -> bool:
    """Whether a name is that of one table's file."""
    return target.suffix == ".parquet"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
