"""The width of vectors is chosen by measurement, once a machine, and no width changes a bit."""

from __future__ import annotations

import ctypes
import logging
import shlex
from pathlib import Path

import pytest
import torch
from quantize.backends import USABLE
from quantize.operands import DTYPES, KINDS, TILES, operand
from quantize.same_result import assert_same

from fp8watch.kernels import cpu_compiler, cpu_library, cpu_width, reference, resolve
from fp8watch.numerics.formats import FORMATS
from fp8watch.numerics.quantize_job import QuantizeJob

pytestmark = [
    pytest.mark.skipif("cpu" not in USABLE, reason="no C compiler here: set CC"),
    pytest.mark.heavy(3, "fp8watch/kernels", first=True),
]
_QUICK = ("-std=gnu11", "-O0", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-w")
NATIVE = (*_QUICK, cpu_compiler.flag_choices()[0][-1])


@pytest.fixture(scope="module")
def compiler() -> list[str]:
    return cpu_compiler.find_compiler()


@pytest.fixture(scope="module")
def widths(compiler: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """Those that this machine has instructions for."""
    return cpu_width.machine_widths(compiler, NATIVE, tmp_path_factory.mktemp("widths"))


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own, and a compiler that is quick and writes down what it compiles."""
    real = cpu_compiler.find_compiler()
    compiler = tmp_path / "cc"
    compiler.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >> {tmp_path / "calls"}\nexec {shlex.join(real)} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu_library, "flag_choices", lambda: [NATIVE])
    return tmp_path


def compiled(folder: Path, source: str) -> list[str]:
    return [line for line in (folder / "calls").read_text().splitlines() if source in line]


def width_of(library: ctypes.CDLL) -> int:
    return int(library.fp8watch_abi(2))


@pytest.mark.parametrize("width", cpu_width.WIDTHS)
def test_every_width_of_this_machine_gives_the_same_bits(
    width: int, width_libraries: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    if width not in width_libraries:
        pytest.skip(f"no vectors of {width} bytes here")
    library = cpu_library._open(width_libraries[width])
    monkeypatch.setattr(cpu_library, "load", lambda: library)
    assert width_of(cpu_library.load()) == width
    cpu = resolve("cpu", "cpu")
    for number, kind in enumerate(sorted(KINDS)):
        for tile, shape in zip(TILES, ((19, 650), (300, 70), (140, 200)), strict=True):
            x = operand(kind, sorted(DTYPES)[number % 3], shape)
            for name, power_2, function in (("E4M3", True, "quantize"), ("E5M2", False, "quantize_dequantize")):
                how = x, QuantizeJob(tile, FORMATS[name], power_2)
                assert_same(getattr(cpu, function)(*how), getattr(reference, function)(*how))
    # a code that no neighbour has, in each lane of a vector
    x = torch.cat([torch.arange(-448, 449, 7).float().roll(k) for k in range(129)]).view(-1, 129)
    how = x, QuantizeJob((1, 129), FORMATS["E4M3"])
    assert_same(cpu.quantize(*how), reference.quantize(*how))


def test_the_fastest_width_is_compiled_and_the_measurement_is_kept(
    own_cache: Path, widths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if len(widths) < 2:
        pytest.skip("one width only")
    measured: list[list[int]] = []

    def slow_but_one(trials: dict[int, Path]) -> dict[int, int]:
        measured.append(list(trials))
        return {width: 20_000 if width == widths[1] else 30_000 for width in trials}

    monkeypatch.setattr(cpu_width, "measure", slow_but_one)
    assert [width_of(cpu_library._obtain()) for _ in range(2)] == [widths[1]] * 2
    assert measured == [widths]  # the second time nothing is measured, or compiled
    assert len(compiled(own_cache, "trial.c")) == len(widths)
    assert len(compiled(own_cache, "quantize.c")) == 1
    assert [p.suffix for p in sorted((own_cache / "fp8watch").iterdir())] == [".lock", ".so"]


def test_each_width_of_this_machine_is_timed(compiler: list[str], widths: list[int], tmp_path: Path) -> None:
    times = cpu_width.measure(cpu_width.compile_trials(compiler, NATIVE, tmp_path, widths))
    assert list(times) == widths
    assert all(0 < ns < 2**30 for ns in times.values())


def test_measuring_takes_less_than_a_third_of_a_second() -> None:
    assert cpu_width.ROUNDS * cpu_width.ROUND_MS * len(cpu_width.WIDTHS) < 300


@pytest.mark.parametrize(
    "trial",
    ["__builtin_trap();", "return 0;} void fp8watch_other(void) {", "for (;;) {}"],
    ids=["crashing", "missing", "endless"],
)
def test_a_measurement_that_fails_leaves_the_widest_and_alarms_nobody(
    own_cache: Path,
    widths: list[int],
    trial: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = "fp8watch_missing" if "other" in trial else "fp8watch_trial"
    right = cpu_compiler.compile_library

    def broken(compiler: list[str], flags: list[str], folder: Path, source: str = "quantize.c") -> Path:
        if source == "quantize.c":
            return right(compiler, flags, folder)
        (folder / "broken.c").write_text(f"int {name}(int ns) {{ {trial} }}")
        return right(compiler, flags, folder, str(folder / "broken.c"))

    monkeypatch.setattr(cpu_width.cpu_compiler, "compile_library", broken)
    monkeypatch.setattr(cpu_width, "TRIAL_TIMEOUT_S", 0.3)
    with caplog.at_level(logging.WARNING):
        assert width_of(cpu_library._obtain()) == widths[0]
    assert not caplog.records


def test_a_width_that_does_not_compile_is_left_out(
    compiler: list[str], widths: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if len(widths) < 2:
        pytest.skip("one width only")
    right = cpu_compiler.compile_library

    def picky(compiler: list[str], flags: list[str], folder: Path, source: str) -> Path:
        if f"-DVB={widths[0]}" in flags:
            raise cpu_compiler.Unavailable("an error inside the compiler")
        return right(compiler, flags, folder, source)

    monkeypatch.setattr(cpu_width.cpu_compiler, "compile_library", picky)
    got = cpu_width.fastest_width(compiler, NATIVE, tmp_path)
    assert got in [(f"-DVB={width}",) for width in widths[1:]]


@pytest.mark.parametrize("width", [16, 64])
def test_a_width_that_is_asked_for_is_taken(own_cache: Path, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", f"{own_cache / 'cc'} -DVB={width}")
    assert width_of(cpu_library._obtain()) == width
    assert compiled(own_cache, "trial.c") == []
