"""What every test of this room runs under."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fp8watch.kernels import cpu_compiler, cpu_width


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors on a busy machine: threads that wait for each other take longer than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def width_libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The C library for each width of vectors that this machine has instructions for, compiled without optimisation."""
    compiler = cpu_compiler.find_compiler()
    flags = (*cpu_compiler.flag_choices()[0], "-O0")
    made = {}
    for width in cpu_width.machine_widths(compiler, flags, tmp_path_factory.mktemp("widths")):
        folder = tmp_path_factory.mktemp(f"width-{width}")
        made[width] = cpu_compiler.compile_library(compiler, [*flags, f"-DVB={width}"], folder)
    return made
