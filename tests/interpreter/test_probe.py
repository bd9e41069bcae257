"""Where Triton is missing, broken or has no device, the backend says why and nothing else breaks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def probe(code: str, **environ: str) -> str:
    """What the last line of a fresh process prints."""
    program = f"import sys, torch\n{code}\nfrom fp8watch.kernels import available, resolve, triton\n"
    program += "print(available('cpu')['triton']); print(triton.probe(torch.device('cuda')))\n"
    program += "print(resolve(None, 'cpu').NAME)\n"
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env={**env, **environ}, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_without_the_interpreter_cpu_tensors_are_refused() -> None:
    cpu, _, auto = probe("").splitlines()
    assert cpu.startswith("serves cuda tensors, not cpu; only in Triton's interpreter, with TRITON_INTERPRET=1")
    assert auto != "triton"


def test_the_interpreter_is_never_chosen_by_itself() -> None:
    pytest.importorskip("triton.language", reason="needs triton: pip install triton")
    cpu, cuda, auto = probe("", TRITON_INTERPRET="1").splitlines()
    assert cpu == "None"
    assert cuda.startswith("TRITON_INTERPRET=1 is set")
    assert auto != "triton"


def test_too_late_to_choose_the_interpreter() -> None:
    pytest.importorskip("triton.language", reason="needs triton: pip install triton")
    code = "import fp8watch.kernels.triton_launch, os; os.environ['TRITON_INTERPRET'] = '1'"
    assert "triton was imported before TRITON_INTERPRET=1 was set" in probe(code)


@pytest.mark.parametrize("error", ["ImportError", "OSError", "RuntimeError"])
def test_any_failure_to_import_triton_is_a_reason(error: str, tmp_path: Path) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text(f"raise {error}('libcuda is not what it was')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    cpu, cuda, auto = probe("", TRITON_INTERPRET="1", PYTHONPATH=path).splitlines()
    for reason in (cpu, cuda):
        assert f"{error}:" in reason
        assert "libcuda is not what it was" in reason
        assert "pip install triton" in reason
    assert auto != "triton"


def test_without_a_gpu_there_is_a_reason() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    _, cuda, _ = probe("").splitlines()
    assert cuda == "no CUDA device" or "triton cannot be imported" in cuda


def test_a_device_on_which_no_kernel_runs_is_passed_over_with_the_reason() -> None:
    """As in an image without a C compiler, which Triton needs to launch a kernel: nothing of that comes in a training's first forward."""
    import torch

    pytest.importorskip("triton.language", reason="needs triton: pip install triton")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here, on which kernels run")
    code = "torch.cuda.is_available = lambda: True\nimport logging; logging.basicConfig(stream=sys.stdout)"
    code += "\nfrom fp8watch.kernels import resolve; print(resolve(None, 'cuda').NAME)"
    warned, auto, _, cuda, _ = probe(code).splitlines()
    assert "backend 'triton' passed over for cuda tensors: a small kernel does not run there (" in warned
    assert auto == "reference"
    assert cuda.startswith("a small kernel does not run there (")
    assert "CUDA" in cuda
