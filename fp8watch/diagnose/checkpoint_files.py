"""Tensors of a checkpoint by name, whatever wrote it: safetensors, torch.distributed.checkpoint, torch.save.

Shapes:     a file or folder -> names with dtype and shape, tensors on the CPU when they are asked for
Thread:     the caller's

Nothing in a checkpoint is executed: torch.save's files are read with `weights_only`, and of the metadata of
torch.distributed.checkpoint, which is a pickle, only the classes that it is made of are taken.
"""

from __future__ import annotations

import io
import json
import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

SAFETENSORS, DCP, TORCH_SAVE = "safetensors", "DCP", "torch.save"
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
INDEX = ".safetensors.index.json"
CONTENTS = frozenset({"version", "fingerprint", "weights"})
"""Keys by which the fingerprint that a watch saves is known."""


class Unreadable(Exception):
    """A path that is no checkpoint, or one that cannot be read: with the reason and the remedy."""


class Source(Protocol):
    """Tensors of one file, or of one folder of torch.distributed.checkpoint."""

    kind: str
    path: Path
    forms: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    """Name -> dtype and shape."""
    contents: list[Mapping[str, Any]]
    """Fingerprints that a watch has saved with it."""

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """These tensors, on the CPU."""


class Checkpoint:
    """What lies at a path: the tensors of all its files. Where two files have a name, the later one's begins with the
    file's name.

    Args:
        path: of it all.
        sources: its files.
    """

    def __init__(self, path: Path, sources: Sequence[Source]) -> None:
        self.path, self.kinds = path, sorted({source.kind for source in sources})
        self.missing: list[str] = []
        """Names that an index lists, and that no file has."""
        self.contents = [contents for source in sources for contents in source.contents]
        self.forms: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self._at: dict[str, tuple[Source, str]] = {}
        for source in sources:
            for name, form in source.forms.items():
                shown = name if name not in self.forms else f"{source.path.name}:{name}"
                self.forms[shown], self._at[shown] = form, (source, name)

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """These tensors, on the CPU."""
        made = {}
        for shown in names:
            source, name = self._at[shown]
            made[shown] = source.read([name])[name]
        return made


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Find out what lies there.

    Raises:
        Unreadable: nothing that can be read.
    """
    where = Path(path)
    if where.is_file():
        return Checkpoint(where, [_file(where)])
    if not where.is_dir():
        raise Unreadable(f"{where}: there is no such file or folder")
    if (where / ".metadata").is_file():
        return Checkpoint(where, [DistributedFiles(where)])
    try:
        inside = sorted(where.iterdir())
    except OSError as e:
        raise Unreadable(f"{where}: cannot be read ({first_line(e)})") from e
    files = [p for p in inside if p.is_file() and p.suffix in (".safetensors", *TORCH_SUFFIXES)]
    sources = [_file(p) for p in files if not p.name.startswith(("training_args", "rng_state", "scheduler"))]
    sources += [DistributedFiles(p) for p in inside if (p / ".metadata").is_file()]
    if not sources:
        raise Unreadable(f"{where}: no checkpoint; *.safetensors, a .metadata of DCP, or {' '.join(TORCH_SUFFIXES)}")
    found = Checkpoint(where, sources)
    found.missing = sorted({name for p in where.glob(f"*{INDEX}") for name in _indexed(p)} - set(found.forms))
    return found


def _indexed(path: Path) -> list[str]:
    try:
        return list(json.loads(path.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError, OSError) as e:
        raise Unreadable(f"{path}: no index of safetensors ({type(e).__name__}: {e})") from e


def _file(path: Path) -> Source:
    return SafetensorsFile(path) if path.suffix == ".safetensors" else TorchFile(path)


class SafetensorsFile:
    """One file of safetensors."""

    kind = SAFETENSORS

    def __init__(self, path: Path) -> None:
        try:
            from safetensors import safe_open
        except ModuleNotFoundError as e:
            raise Unreadable(f"{path}: needs safetensors: pip install 'fp8watch[checkpoints]'") from e
        self.path = path
        self.contents: list[Mapping[str, Any]] = []
        try:
            self._open = safe_open(str(path), framework="pt", device="cpu")
            with self._open as f:
                self.forms = {name: _form(f.get_slice(name)) for name in f.keys()}  # noqa: SIM118  it is no mapping
        except Exception as e:
            raise Unreadable(f"{path}: cannot be read ({e}); it is cut off, or something else") from e

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """These tensors, on the CPU."""
        from safetensors import safe_open

        with safe_open(str(self.path), framework="pt", device="cpu") as f:
            return {name: f.get_tensor(name) for name in names}


_OF_SAFETENSORS = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def _form(part: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    return _OF_SAFETENSORS.get(str(part.get_dtype()), torch.uint8), tuple(part.get_shape())


class TorchFile:
    """One file of torch.save: every tensor in it, mappings and lists joined by dots."""

    kind = TORCH_SAVE

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tensors: dict[str, Tensor] = {}
        self.contents: list[Mapping[str, Any]] = []
        for name, value in _leaves(_loaded(path), ""):
            if isinstance(value, Tensor):
                self._tensors[name] = value
            else:
                self.contents.append(value)
        self.forms = {name: (x.dtype, tuple(x.shape)) for name, x in self._tensors.items()}

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """These tensors, on the CPU."""
        return {name: _plain(self._tensors[name]) for name in names}


def _loaded(path: Path) -> Any:
    try:
        try:
            return torch.load(path, weights_only=True, map_location="cpu", mmap=True)
        except (RuntimeError, ValueError):  # of an older format, which cannot be mapped
            return torch.load(path, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as e:
        why = f"it holds more than tensors and plain values: {first_line(e)}"
        raise Unreadable(f"{path}: {why}; save tensors alone, or check another file of it") from e
    except Exception as e:
        raise Unreadable(f"{path}: cannot be read ({first_line(e)})") from e


def first_line(error: BaseException) -> str:
    """First line of an error, which may have none: then its kind."""
    first = str(error).strip().partition("\n")[0][:300]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Tensors, and the fingerprints of watches."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        if set(value) >= CONTENTS:
            yield name, value
            return
        for key, part in value.items():
            yield from _leaves(part, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for i, part in enumerate(value):
            yield from _leaves(part, f"{name}.{i}" if name else str(i))


def _plain(x: Tensor) -> Tensor:
    local = getattr(x, "_local_tensor", x)  # of a DTensor
    return local if isinstance(local, Tensor) else x


class _OnlyTorch(pickle.Unpickler):
    """Takes the classes of which metadata are made, and nothing that could run: functions of the same package read pickles
    and write files."""

    def find_class(self, module: str, name: str) -> Any:
        """The class, where it is one of those."""
        if (module, name) not in _OF_METADATA:
            raise pickle.UnpicklingError(f"{module}.{name} does not belong into the metadata of a checkpoint")
        return super().find_class(module, name)


_CLASSES = (
    "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
    "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
)  # fmt: skip
_OF_METADATA = {
    *(("torch.distributed.checkpoint.metadata", name) for name in _CLASSES),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch", "Size"),
    ("torch.serialization", "_get_layout"), ("collections", "OrderedDict"), ("collections", "defaultdict"),
    ("builtins", "set"), ("builtins", "frozenset"), ("builtins", "list"),
    ("pathlib", "PosixPath"), ("pathlib", "PurePosixPath"), ("pathlib", "Path"), ("pathlib._local", "PosixPath"),
    *(("torch", name) for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)),
}  # fmt: skip


class DistributedFiles:
    """A folder of torch.distributed.checkpoint. Sharded tensors are put together."""

    kind = DCP

    def __init__(self, path: Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        try:
            metadata = _OnlyTorch(io.BytesIO((path / ".metadata").read_bytes())).load()
            found: dict[str, Any] = metadata.state_dict_metadata
        except Exception as e:
            raise Unreadable(f"{path / '.metadata'}: cannot be read ({type(e).__name__}: {e})") from e

        class Reader(FileSystemReader):
            """Reads with the metadata that was looked through."""

            def read_metadata(self, *_: Any, **__: Any) -> Any:
                """The one above."""
                return metadata

        self.path, self._reader = path, Reader(path)
        self.contents: list[Mapping[str, Any]] = []
        tensors = {n: m for n, m in found.items() if isinstance(m, TensorStorageMetadata)}
        self.forms = {name: (m.properties.dtype, tuple(m.size)) for name, m in tensors.items()}

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """These tensors, on the CPU.

        Raises:
            Unreadable: a file is not there, or not whole.
        """
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_loader import load

        made = {name: torch.empty(self.forms[name][1], dtype=self.forms[name][0]) for name in names}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that torch.distributed is not on is meant
                load(made, storage_reader=self._reader, no_dist=True)
        except (Exception, CheckpointException) as e:  # the latter is no Exception
            text = str(e).strip().splitlines() or [""]
            raise Unreadable(f"{', '.join(names)}: cannot be read ({type(e).__name__}: {text[-1][:300]})") from e
        return made
