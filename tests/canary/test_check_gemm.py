"""`fp8watch check-gemm`: passes here, names what is broken, and says what this machine does not have."""

from __future__ import annotations

import pytest
import torch
from scaled_mm.strict import scaled_mm as strict

from fp8watch.cli import main as fp8watch
from fp8watch.diagnose import gemm_conformance
from fp8watch.diagnose.check_gemm import main
from fp8watch.diagnose.gemm_conformance import Shape, check_gemms, conformance, error_by_length, named_recipes
from fp8watch.kernels import emulated_gemm, reference, scaled_mm

ONE = ["--shape", "64,144,160", "--recipe", "blockwise"]


def test_the_table_of_this_machine(capsys) -> None:
    assert fp8watch(["check-gemm", *ONE]) == 0
    said = capsys.readouterr().out
    assert f"torch {torch.__version__}" in said
    assert "quantisers  reference, blockwise  64×144×160" in said
    assert " 0 FAIL" in said
    assert "NOT AVAILABLE  serves cuda tensors, not cpu" in said
    assert "K=8192:" in said


@pytest.mark.parametrize("name", sorted(named_recipes()))
def test_every_recipe_passes(name) -> None:
    found = list(conformance([Shape(64, 144, 160)], wanted=[name]))
    assert {r.status for r in found if r.where.endswith(name)} == {"PASS"}


def test_kernels_that_raise_are_rows_of_the_table(capsys, monkeypatch) -> None:
    """A library that refuses what its probe has promised, and a quantiser that does not compile."""

    def refuses(*_args, **_kwargs):
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nand more")

    monkeypatch.setattr(emulated_gemm, "fprop", refuses)
    assert main([*ONE, "--failures"]) == 1
    assert "fprop: CUBLAS_STATUS_NOT_SUPPORTED; dgrad: error" in capsys.readouterr().out
    monkeypatch.setattr(reference, "quantize", refuses)
    assert main([*ONE, "--failures"]) == 1
    assert "input rowwise: CUBLAS_STATUS_NOT_SUPPORTED; input columnwise: " in capsys.readouterr().out


def test_a_broken_kernel_fails_and_is_the_exit_status(capsys, monkeypatch) -> None:
    right = emulated_gemm.dgrad
    monkeypatch.setattr(emulated_gemm, "dgrad", lambda *a: right(*a) * 1.31)
    quantize = reference.quantize

    def shifted(x, job, scale=None):
        data, scale_inv, stats = quantize(x, job, scale)
        return data.view(torch.uint8).roll(1, 1).view(data.dtype), scale_inv, stats

    monkeypatch.setattr(reference, "quantize", shifted)
    assert main([*ONE, "--failures"]) == 1
    said = capsys.readouterr().out
    assert "PASS  " not in said
    assert "elements off the grid" in said
    assert "dgrad: error 3e-01, gain 1.310" in said


def test_a_gain_alone_fails(monkeypatch) -> None:
    right = emulated_gemm.fprop
    monkeypatch.setattr(emulated_gemm, "fprop", lambda *a: right(*a) * 1.001)  # less than the error that passes
    recipe, shape = named_recipes()["blockwise"], Shape(64, 144, 160)
    monkeypatch.setattr(gemm_conformance, "GEMM_GAIN", 0.0005)
    found = check_gemms("emulated", "x", recipe, shape, torch.device("cpu"), torch.float32)
    assert (found.status, found.said[:26]) == ("FAIL", "fprop: error 1e-03, gain 1")


def test_products_of_codes_are_checked_where_there_are_any(monkeypatch) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", strict)
    monkeypatch.setattr(scaled_mm, "probe", lambda device: None)
    recipe, device = named_recipes()["blockwise HYBRID"], torch.device("cpu")
    assert check_gemms("scaled_mm", "x", recipe, Shape(64, 144, 160), device, torch.bfloat16).status == "PASS"
    assert check_gemms("scaled_mm", "x", recipe, Shape(37, 150, 163), device, torch.bfloat16).status == "PASS"
    refused = check_gemms("scaled_mm", "x", recipe, Shape(64, 144, 160), device, torch.float64)
    assert (refused.status, refused.said[:18]) == ("NOT AVAILABLE", "results of torch.f")
    assert max(error_by_length("scaled_mm", device, (128, 512)).values()) < 1e-6


def test_a_narrow_accumulator_shows_by_the_length_of_the_contraction(monkeypatch) -> None:
    def narrow(a, b):
        out = torch.zeros(a.shape[0], b.shape[1])
        for k in range(0, a.shape[1], 32):
            out += a[:, k : k + 32] @ b[k : k + 32]
            mantissa, exponent = torch.frexp(out)
            out = torch.ldexp(torch.trunc(mantissa * 2**14) / 2**14, exponent)
        return out

    monkeypatch.setattr(emulated_gemm, "_mm", narrow)
    found = error_by_length("emulated", torch.device("cpu"), (128, 4096))
    assert found[4096] > 5 * found[128] > 0
    assert found[4096] > gemm_conformance.GEMM_ERROR / 2


@pytest.mark.parametrize(
    "wrong", [["--shape", "1,2"], ["--shape", "0,1,1"], ["--recipe", "nope"], ["--device", "nope"]]
)
def test_what_makes_no_sense_is_refused(wrong, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main(wrong)
    assert caught.value.code == 2
    assert "must be" in (said := capsys.readouterr().err) or "nope" in said
