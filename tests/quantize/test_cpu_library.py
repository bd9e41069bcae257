"""The C library is compiled once, never half, never for another processor, and its absence is told, not raised."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quantize.backends import USABLE

from fp8watch.kernels import available, cpu_compiler, cpu_library, registry, resolve

pytestmark = pytest.mark.skipif("cpu" not in USABLE, reason="no C compiler here: set CC")
NEXT = USABLE[-1] if "cpu" not in USABLE else USABLE[USABLE.index("cpu") + 1]  # what AUTO takes without a compiler

_TRY = """
import json, logging, sys, torch
logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
from fp8watch.kernels import resolve, cpu_library
from fp8watch.numerics.formats import E4M3
from fp8watch.numerics.quantize_job import QuantizeJob
a, b = resolve(None, "cpu"), resolve(None, "cpu")
out = b.quantize_dequantize(torch.ones(2, 128), QuantizeJob((1, 128), E4M3))[0]
print(json.dumps({"backend": a.NAME, "ones": bool((out == 1).all()), "reason": cpu_library._reason and str(cpu_library._reason)}))
"""


def start(cache: Path, **environ: str | None) -> subprocess.Popen[str]:
    """A process that takes the fastest backend, with a cache and a compiler of its own."""
    env = {
        **os.environ,
        "XDG_CACHE_HOME": str(cache),
        "OMP_NUM_THREADS": "1",
        **{k: v for k, v in environ.items() if v is not None},
    }
    for name in [k for k, v in environ.items() if v is None]:
        env.pop(name, None)
    return subprocess.Popen(
        [sys.executable, "-c", _TRY],
        env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=Path(__file__).parents[2],
    )  # fmt: skip


def result(process: subprocess.Popen[str]) -> tuple[dict[str, Any], str]:
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    got: dict[str, Any] = json.loads(out)
    return got, err


def script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


COPY = 'while [ "$1" != -o ]; do shift; done; cp {library} "$2"'
"""What stands for compiling where only the keeping is in question."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the library in it, made by three processes at the same time."""
    cache = tmp_path_factory.mktemp("cache")
    counter = cache / "calls"
    real = cpu_compiler.find_compiler()[0]
    body = f'case "$*" in *quantize.c*) echo x >> {counter};; esac\nexec {real} $(echo "$@" | sed "s/-O3/-O0/")'
    cc = script(cache / "cc", body)
    for got, err in [result(p) for p in [start(cache, CC=cc) for _ in range(3)]]:
        assert got == {"backend": "cpu", "ones": True, "reason": None}
        assert err == ""
    assert counter.read_text().split() == ["x"]  # one compiled, two waited
    files = sorted(p.suffix for p in (cache / "fp8watch").iterdir())
    assert files == [".lock", ".so"]
    return cache


def library_in(cache: Path) -> Path:
    (found,) = (cache / "fp8watch").glob("*.so")
    return found


@pytest.fixture
def cache(compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own, with a compiler that copies and keeps count in `calls`."""
    copy = COPY.format(library=library_in(compiled))
    body = f'case "$*" in *--version*) echo 1;; *quantize.c*) echo x >> {tmp_path / "calls"}; {copy};; *) exit 1;; esac'
    monkeypatch.setenv("CC", script(tmp_path / "cc", body))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def num_compiled(cache: Path) -> int:
    return len((cache / "calls").read_text().split()) if (cache / "calls").exists() else 0


@pytest.mark.parametrize("source", ["trial.c", "quantize.c"])
def test_each_source_compiles_by_itself(source: str, tmp_path: Path) -> None:
    """The product goes on without the trial, with a width that nobody measured: it says so to nobody."""
    flags = ("-std=gnu11", "-O0", "-fPIC", "-shared", "-pthread", "-w")
    assert cpu_compiler.compile_library(cpu_compiler.find_compiler(), flags, tmp_path, source).exists()


@pytest.mark.heavy(4, "fp8watch/kernels", first=True)
@pytest.mark.parametrize(
    "damage",
    [
        lambda p: p.write_bytes(p.read_bytes()[:5000]),
        lambda p: p.write_bytes(b""),
        lambda p: p.write_bytes(p.read_bytes()[:-2000] + bytes(2000)),
        lambda p: p.chmod(0o722),
    ],
    ids=["truncated", "empty", "zeroed", "writable by others"],
)
def test_a_damaged_library_is_compiled_again(cache: Path, damage: Callable[[Path], None]) -> None:
    cpu_library._obtain()
    cpu_library._obtain()
    assert num_compiled(cache) == 1
    whole = library_in(cache).read_bytes()
    # a library that is mapped stays as it is on disk; the damage goes to a copy under its name
    library_in(cache).with_suffix(".new").write_bytes(whole)
    path = library_in(cache)
    os.replace(path.with_suffix(".new"), path)
    path.chmod(0o700)
    damage(path)
    cpu_library._obtain()
    assert num_compiled(cache) == 2
    assert len(library_in(cache).read_bytes()) == len(whole)
    assert path.stat().st_mode & 0o777 == 0o700


def test_the_key_knows_source_compiler_flags_and_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keys = [cpu_library._key(["cc"], "12", ["-O3"])]
    keys.append(cpu_library._key(["gcc"], "12", ["-O3"]))
    keys.append(cpu_library._key(["cc"], "13", ["-O3"]))
    keys.append(cpu_library._key(["cc"], "12", ["-O2"]))
    monkeypatch.setattr(cpu_library, "processor", lambda: "another")
    keys.append(cpu_library._key(["cc"], "12", ["-O3"]))
    shutil.copytree(cpu_library.SOURCES, tmp_path / "source")
    monkeypatch.setattr(cpu_library, "SOURCES", tmp_path / "source")
    assert cpu_library._key(["cc"], "12", ["-O3"]) == keys[-1]
    (tmp_path / "source" / "job.h").write_text("/* other */")
    keys.append(cpu_library._key(["cc"], "12", ["-O3"]))
    assert len(set(keys)) == len(keys)
    assert "flags" in cpu_compiler.processor() or "Features" in cpu_compiler.processor()


def test_a_missing_compiler_is_told_once_and_the_next_backend_serves(tmp_path: Path) -> None:
    got, err = result(start(tmp_path, CC=None, PATH=str(tmp_path)))
    assert (got["backend"], got["ones"]) == (NEXT, True)
    assert err.splitlines() == [
        "backend 'cpu' passed over for cpu tensors: no C compiler (cc, gcc or clang) on PATH; install one, or set CC"
    ]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("echo 'cc: out of order' >&2; exit 1", "failed with status 1: cc: out of order"),
        ('case "$*" in *--version*) echo 1;; *) echo "bad code" >&2; exit 3;; esac', "failed with status 3: bad code"),
        ("exit 0", "reported success and wrote no library"),
        (
            'case "$*" in *--version*) echo 1;; *) while [ "$1" != -o ]; do shift; done; echo junk > "$2";; esac',
            "failed its check",
        ),
    ],
    ids=["dead", "refusing", "empty-handed", "writing junk"],
)
def test_a_broken_compiler_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, words: str) -> None:
    monkeypatch.setenv("CC", script(tmp_path / "broken", body))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(cpu_compiler.Unavailable, match=words):
        cpu_library._obtain()
    assert not list((tmp_path / "fp8watch").glob("*.so"))
    assert not list((tmp_path / "fp8watch").glob("build-*"))


def test_a_compiler_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "pid"
    monkeypatch.setenv(
        "CC", script(tmp_path / "slow", f'case "$*" in *--version*) echo 1;; *) echo $$ > {mark}; sleep 600;; esac')
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu_compiler, "COMPILE_TIMEOUT_S", 0.5)
    with pytest.raises(cpu_compiler.Unavailable, match="slow did not finish within 0 s"):
        cpu_library._obtain()
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


def test_an_explicit_choice_raises_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -O9")
    monkeypatch.setattr(cpu_library, "load", cpu_library.load.__wrapped__)
    monkeypatch.setattr(cpu_library, "library", None)
    monkeypatch.setattr(cpu_library, "_reason", None)
    with pytest.raises(
        ValueError, match="backend='cpu' cannot be used: CC='no-such-compiler -O9' is not a program on PATH"
    ):
        resolve("cpu", "cpu")
    assert "CC=" in str(available("cpu")["cpu"])
    monkeypatch.setattr(registry, "_said", {("cpu", "cpu")})
    assert resolve(None, "cpu") is resolve(NEXT, "cpu")


@pytest.mark.heavy(3, "fp8watch/kernels", first=True)
@pytest.mark.parametrize("how", ["read-only", "a file", "nobody's", "loose"])
def test_without_a_cache_of_its_own_a_process_compiles_for_itself(
    cache: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cache / "fp8watch"
    if how == "a file":
        folder.write_text("")
    else:
        folder.mkdir(mode=0o700)
    if how == "read-only":
        folder.chmod(0o500)
        if os.geteuid() == 0:  # the administrator may write everywhere
            monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder)
    if how == "loose":
        folder.chmod(0o777)
    if how == "nobody's":
        real = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: real + 1)
    assert cpu_library.cache_folder() is None
    if how == "a file":
        (temporary := cache / "temporary").mkdir()  # of this test alone: others make such folders as well
        monkeypatch.setattr(tempfile, "tempdir", str(temporary))
        assert cpu_library._obtain().fp8watch_check() == 0
        assert list(temporary.iterdir()) == []


def test_a_cache_folder_is_for_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
    before = os.umask(0)
    try:
        folder = cpu_library.cache_folder()
    finally:
        os.umask(before)
    assert folder == tmp_path / "new" / "fp8watch"
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cpu_library.cache_folder() == tmp_path / "home" / ".cache" / "fp8watch"


@pytest.mark.parametrize(
    "failed",
    [OSError(errno.EDQUOT, "Disk quota exceeded"), cpu_compiler.Unavailable("cc: No space left on device")],
    ids=["here", "in the compiler"],
)
def test_a_cache_without_room_is_passed_over(
    failed: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quota of a home folder that is used up."""
    tried: list[Path] = []

    def from_folder(folder: Path, *_: Any) -> str:
        tried.append(folder)
        if folder == tmp_path / "fp8watch":
            raise failed
        return "the library"

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu_library, "_from_folder", from_folder)
    assert cpu_library._obtain() == "the library"
    assert tried[0] == tmp_path / "fp8watch"
    assert len(tried) == 2


@pytest.mark.heavy(5, "fp8watch/kernels", first=True)
def test_a_library_with_wrong_answers_is_not_used(
    compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(cpu_library.SOURCES, tmp_path / "source")
    table = tmp_path / "source" / "rounding.h"
    assert "0.015625f" in table.read_text()
    table.write_text(table.read_text().replace("0.015625f", "0.03125f"))
    for module in (cpu_library, cpu_compiler):
        monkeypatch.setattr(module, "SOURCES", tmp_path / "source")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", str(compiled / "cc"))
    monkeypatch.setattr(
        cpu_library, "flag_choices", lambda: [("-std=gnu11", "-O0", "-fPIC", "-shared", "-pthread", "-w")]
    )
    with pytest.raises(cpu_compiler.Unavailable, match="the compiled library failed its check"):
        cpu_library._obtain()
