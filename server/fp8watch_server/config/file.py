"""A TOML or JSON file that people wrote: read within bounds, and refused with every problem at once."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

MAX_FILE_BYTES = 1 << 20


class FileError(ValueError):
    """A file that cannot be used. `problems` holds every line of what is wrong with it."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def read_file(path: Path, error: type[FileError]) -> Any:
    """What a file holds: TOML, or JSON where its name ends in .json.

    Raises:
        FileError: of the type `error`: too large, or neither.
        OSError: it cannot be read.
    """
    raw = path.read_bytes()
    if len(raw) > MAX_FILE_BYTES:
        raise error([f"{path.name} of {len(raw)} bytes: at most {MAX_FILE_BYTES}; split it"])
    kind = "JSON" if path.suffix == ".json" else "TOML"
    try:
        text = raw.decode("utf-8")
        return json.loads(text) if kind == "JSON" else _toml(text, error)
    except (ValueError, RecursionError) as e:
        if isinstance(e, FileError):
            raise
        raise error([f"{path.name}: not {kind} ({e}); correct it at that place"]) from e


def _toml(text: str, error: type[FileError]) -> Any:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ImportError:
            raise error(["TOML needs Python 3.11, or the package tomli: install it, or write JSON"]) from None
    return tomllib.loads(text)
