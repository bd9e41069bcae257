"""Parquet files put into a bucket: written here whole, then uploaded, so that none is there in part.

Shapes:     s3://bucket/prefix -> a folder to write into, whose files become objects
Thread:     `fp8watch export`

Arrow's own client of S3. Credentials and region come from where AWS's tools have them (`AWS_ACCESS_KEY_ID`, `AWS_PROFILE`, the
machine's role); another service than Amazon's is named in the URL: `?endpoint_override=host:9000&scheme=http`.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from pyarrow import fs

from fp8watch_server.export.parquet import ExportError

SCHEME = "s3://"
PIECE_BYTES = 8 << 20


def is_url(target: str) -> bool:
    """Whether a target is in a bucket."""
    return "://" in target


def place_of(url: str) -> str:
    """The same for people: without the options of its query."""
    return url.partition("?")[0].rstrip("/")


def opened(url: str) -> tuple[fs.FileSystem, str]:
    """The store of a URL, and the path in it.

    Raises:
        ExportError: not s3://bucket/prefix, with credentials in it, or a store that cannot be had.
    """
    parts = urlsplit(url)
    if not url.startswith(SCHEME) or not parts.hostname or not parts.path.strip("/"):
        raise ExportError(
            f"{place_of(url)!r} is no place of an export; give s3://BUCKET/PREFIX, a folder or a .parquet file"
        )
    if parts.username or parts.password:
        raise ExportError(
            "the URL holds credentials, which others may read; put them into AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    try:
        store, path = fs.FileSystem.from_uri(url)
    except (OSError, ValueError) as e:
        raise ExportError(f"{place_of(url)!r} cannot be used ({e}); see docs/export.md for what a URL may hold") from e
    return store, path.strip("/")


@contextmanager
def whole_or_nothing(url: str) -> Iterator[Path]:
    """A folder to write into. When the block ends its files are objects below `url`, and none of them when it raises.

    A URL that ends in .parquet is the object of its one file.

    Raises:
        ExportError: something is there, or it cannot be written.
    """
    store, path = opened(url)
    one = path.endswith(".parquet")
    try:
        infos = store.get_file_info(fs.FileSelector(path, recursive=True, allow_not_found=True))
        taken = bool(infos) or store.get_file_info(path).type != fs.FileType.NotFound
    except OSError as e:
        raise ExportError(f"{place_of(url)!r} cannot be read ({e}); check bucket, credentials and endpoint") from e
    if taken:
        raise ExportError(f"{place_of(url)!r} is there already; an export is never written over: choose another name")
    with tempfile.TemporaryDirectory(prefix="fp8watch-export-") as folder:
        yield Path(folder)
        done: list[str] = []
        try:
            for file in sorted(Path(folder).iterdir()):
                name = path if one else f"{path}/{file.name}"
                done.append(name)
                _upload(store, file, name)
        except BaseException as e:
            for name in done:
                with suppress(OSError):
                    store.delete_file(name)
            if isinstance(e, OSError):
                raise ExportError(
                    f"{place_of(url)!r} cannot be written ({e}); nothing was left there: check bucket and credentials"
                ) from e
            raise


def _upload(store: fs.FileSystem, file: Path, name: str) -> None:
    """Upload a file.

    Raises:
        OSError: it is not there as it is here.
    """
    with file.open("rb") as source, store.open_output_stream(name) as sink:
        shutil.copyfileobj(source, sink, PIECE_BYTES)
    size = store.get_file_info(name).size
    if size != file.stat().st_size:
        raise OSError(f"{name} has {size} bytes there and {file.stat().st_size} here")
