"""The C library of the cpu backend: compiled at first use, kept in a per-user cache, checked before it is trusted.

Shapes:     one shared library a machine     Thread: any

A cached library belongs to its sources, its compiler, its flags and its processor: a cache folder may be shared by
machines that differ. A file there is `library, digest`: a truncated library would crash the process that maps it, so
it is read in full before it is loaded. Whatever goes wrong, the caller gets the reason in words.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from fp8watch.kernels.cpu_compiler import (
    COMPILE_TIMEOUT_S,
    SOURCES,
    CompilerHangs,
    Unavailable,
    compile_library,
    compiler_version,
    find_compiler,
    flag_choices,
    processor,
    row_header,
)
from fp8watch.kernels.cpu_width import fastest_width

_LOG = logging.getLogger("fp8watch.kernels")
_DIGEST_BYTES = 16
_CHECK_TIMEOUT_S = 60.0
_ABANDONED_S = 86400.0  # a build folder of that age belongs to a process that was killed
_CHECK = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).fp8watch_check())"

_lock = threading.Lock()
library: ctypes.CDLL | None = None
"""Where something has loaded it; nothing is compiled for what can do without."""
_reason: Unavailable | None = None


class _Broken(Unavailable):
    """A compiled library that cannot be loaded or computes something else."""


@functools.cache
def load() -> ctypes.CDLL:
    """Return the library. The first call compiles it, or finds it in the cache; a failure is remembered.

    Raises:
        Unavailable: with the reason.
    """
    with _lock:
        return _load()


def _load() -> ctypes.CDLL:
    global library, _reason
    if library is None and _reason is None:
        try:
            library = _obtain()
        except Unavailable as reason:
            _reason = reason
        except OSError as error:  # a full disk, no more processes
            _reason = Unavailable(f"the C library could not be made: {error}")
    if library is None:
        assert _reason is not None
        raise Unavailable(*_reason.args)
    return library


def _obtain() -> ctypes.CDLL:
    compiler = find_compiler()
    version = compiler_version(compiler)
    first: Unavailable | None = None
    for flags in flag_choices():
        for folder in _folders():
            try:
                return _from_folder(folder, compiler, version, flags)
            except CompilerHangs:
                raise
            except Unavailable as error:  # perhaps the folder is full, or forbids execution: another may not
                first = first or error
            except OSError as error:  # a full disk, a quota that is used up
                first = first or Unavailable(f"the C library could not be made: {error}")
    assert first is not None
    raise first


def _folders() -> Iterator[Path]:
    """The cache, and after it a folder that only this process has."""
    cache = cache_folder()
    if cache is not None:
        yield cache
    else:
        _LOG.info("no cache folder that is writable and ours alone: the C library is compiled for this process only")
    private = Path(tempfile.mkdtemp(prefix="fp8watch-"))
    try:
        yield private
    finally:
        shutil.rmtree(private, ignore_errors=True)  # what is loaded stays loaded


def cache_folder() -> Path | None:
    """The per-user cache, made if it is not there; None where it cannot be had or is not ours alone."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(root) if os.path.isabs(root) else Path.home() / ".cache"
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = base / "fp8watch"
        folder.mkdir(mode=0o700, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: no home
        return None
    return folder if _ours(folder, stat.S_ISDIR) and os.access(folder, os.W_OK | os.X_OK) else None


def _ours(path: Path, kind: object) -> bool:
    """Whether a path belongs to this user and nobody else can write to it: code is run from it."""
    try:
        info = path.lstat()
    except OSError:
        return False
    assert callable(kind)
    return bool(kind(info.st_mode)) and info.st_uid == os.geteuid() and not info.st_mode & 0o022


def _key(compiler: Sequence[str], version: str, flags: Sequence[str]) -> str:
    sources = [p.name + p.read_text(encoding="utf-8") for p in sorted(SOURCES.iterdir()) if p.suffix in (".c", ".h")]
    parts = [row_header(), *sources, *compiler, version, *flags, processor()]
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def _from_folder(folder: Path, compiler: Sequence[str], version: str, flags: Sequence[str]) -> ctypes.CDLL:
    """Load the library from a folder, compiled there if it is not there whole; compiled once more if it is wrong."""
    path = folder / f"cpu-{_key(compiler, version, flags)}.so"
    if _whole(path):
        with contextlib.suppress(_Broken):
            return _open(path)
        path.unlink(missing_ok=True)
    with _one_at_a_time(path):
        if not _whole(path):  # or another process has made it meanwhile
            _make(path, compiler, flags)
    return _open(path)


@contextlib.contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Let one process compile and the others wait. Where locks do not work all compile, which does no harm either."""
    handle = -1
    with contextlib.suppress(OSError):
        handle = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        until = time.monotonic() + COMPILE_TIMEOUT_S
        while time.monotonic() < until:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
    try:
        yield
    finally:
        if handle >= 0:
            os.close(handle)


def _make(path: Path, compiler: Sequence[str], flags: Sequence[str]) -> None:
    """Compile under a name of our own in the same folder, check it in a process of its own, and rename.

    Its vectors have the width that is fastest here: the file is what is kept of that measurement.
    """
    for old in path.parent.glob("build-*"):
        with contextlib.suppress(OSError):
            if time.time() - old.lstat().st_mtime > _ABANDONED_S:
                shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="build-", dir=path.parent, ignore_cleanup_errors=True) as work:
        trials = Path(work) / "trials"
        trials.mkdir()
        made = compile_library(compiler, [*flags, *fastest_width(compiler, flags, trials)], Path(work))
        made.chmod(0o700)
        _survives(made)
        body = made.read_bytes()
        made.write_bytes(body + hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest())
        os.replace(made, path)


def _survives(made: Path) -> None:
    """Run the check elsewhere first: an instruction that this processor lacks ends the process that meets it.

    Raises:
        _Broken: it does not survive, or gives wrong answers.
    """
    if not sys.executable:
        return
    try:
        status = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _CHECK, str(made)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=_CHECK_TIMEOUT_S,
        ).returncode  # fmt: skip
    except subprocess.TimeoutExpired:
        raise _Broken(f"the compiled library did not finish its check within {_CHECK_TIMEOUT_S:.0f} s") from None
    if status:
        raise _Broken(f"the compiled library failed its check (status {status})")


def _whole(path: Path) -> bool:
    """Whether the file is ours and is what was written, to the last byte."""
    if not _ours(path, stat.S_ISREG):
        return False
    try:
        data = path.read_bytes()
    except OSError:
        return False
    body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() == digest


def _open(path: Path) -> ctypes.CDLL:
    """Load and declare a library.

    Raises:
        _Broken: it cannot be loaded or gives wrong answers.
    """
    pointer, i64, i32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    try:
        library = ctypes.CDLL(str(path))
        library.fp8watch_quantize.argtypes = [ctypes.c_char_p]
        library.fp8watch_quantize_both.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
        library.fp8watch_operand.argtypes = [
            ctypes.c_char_p, i32, pointer, i64, *[pointer] * 9, i32, pointer, pointer, i32
        ]  # fmt: skip
        library.fp8watch_merge.argtypes = [pointer, pointer, i32]
        library.fp8watch_merge.restype = None
        library.fp8watch_magnitude.argtypes = [pointer, i64, i32]
        library.fp8watch_magnitude.restype = i32
        library.fp8watch_hash.argtypes = [pointer, i64, i32]
        library.fp8watch_hash.restype = i64
        library.fp8watch_glance.argtypes = [pointer, i64, pointer]
        library.fp8watch_glance.restype = i32
        library.fp8watch_row_jumps.argtypes = [
            pointer, i64, pointer, ctypes.c_float, ctypes.c_float, *[pointer] * 7
        ]  # fmt: skip
        library.fp8watch_row_jumps.restype = None
        library.fp8watch_batch.argtypes = [ctypes.c_char_p, i32, ctypes.c_char_p, i64, i32, i64, i32, pointer]
        library.fp8watch_scored.argtypes = [ctypes.c_char_p, i64, i32, pointer]
        library.fp8watch_shifts.argtypes = [ctypes.c_char_p, i64, i64, pointer]
        library.fp8watch_gather.argtypes = [pointer, i64, i64, pointer]
        library.fp8watch_gather.restype = None
        library.fp8watch_first_other.argtypes = [pointer, i64, i64, pointer]
        library.fp8watch_first_other.restype = i64
        library.fp8watch_look.argtypes = [pointer, i64, i32, i32, pointer, i32]
        library.fp8watch_dequantize.argtypes = [pointer, pointer, pointer, i64, i64, i64, i64, i32, i32]
        library.fp8watch_dequantize.restype = None
        library.fp8watch_rows_hold.argtypes = [
            pointer, i64, i32, *[i64] * 4, pointer, pointer, pointer, i64, i64, i32, *[ctypes.c_float] * 4
        ]  # fmt: skip
        library.fp8watch_product_holds.argtypes = [
            pointer, i64, i32, pointer, i64, i64, pointer, i64, i64, pointer, pointer, *[i64] * 5, ctypes.c_double
        ]  # fmt: skip
        wrong = library.fp8watch_check()
    except (OSError, AttributeError) as error:
        raise _Broken(f"the compiled library cannot be loaded: {error}") from None
    if wrong:
        raise _Broken(f"the compiled library failed its check (answer {wrong})")
    return library
