"""A backend is one module and one row: what the registry names has the functions of a backend."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest

import fp8watch
from fp8watch.kernels import BACKEND_NAMES, registry
from fp8watch.kernels.backend import Backend
from fp8watch.numerics.formats import E4M3
from fp8watch.numerics.quantize_job import QuantizeJob, quantize_jobs


@pytest.mark.parametrize("name", BACKEND_NAMES)
def test_a_backend_is_a_module_with_the_functions_of_the_protocol(name: str) -> None:
    module = importlib.import_module(f"fp8watch.kernels.{name}")
    assert name == module.NAME
    for function in ("probe", "quantize", "quantize_dequantize", "dequantize"):
        wanted = list(inspect.signature(getattr(Backend, function)).parameters)[1:]
        assert list(inspect.signature(getattr(module, function)).parameters) == wanted, function


@pytest.mark.parametrize("function", ["attach", "quantize_blockwise", "quantize_mxfp8", "quantize_per_tensor"])
def test_docstrings_name_the_registry_and_no_backend(function: str) -> None:
    said = re.search(
        r"^ +backend: (.*?)(?=^ +\w+: |^$)", inspect.getdoc(getattr(fp8watch, function)) or "", re.M | re.S
    )
    assert said is not None
    assert "`fp8watch.kernels.BACKEND_NAMES`" in said[1]
    assert not re.findall(r'"\w+"', said[1])


def test_every_backend_but_the_judge_is_taken_for_its_devices_alone() -> None:
    *fast, judge = registry.BACKENDS
    assert judge == "reference"
    assert registry.BACKENDS[judge] == ()
    assert all(registry.BACKENDS[name] for name in fast)


def test_a_job_is_checked_when_it_is_made() -> None:
    with pytest.raises(ValueError, match="tile_shape"):
        QuantizeJob((0, 128), E4M3)
    with pytest.raises(ValueError, match="finite number, 0 or more"):
        QuantizeJob((1, 128), E4M3, eps=-1.0)
    assert not QuantizeJob((1, 128), E4M3, stats=False).heavy


def test_a_job_is_made_once() -> None:
    none, light, full = quantize_jobs((1, 128), "E4M3", True, 0.0)
    assert [(j.stats, j.heavy) for j in (none, light, full)] == [(False, False), (True, False), (True, True)]
    assert quantize_jobs((1, 128), "E4M3", True, 0.0)[2] is full
    assert full.transposed() is full.transposed()
    assert full.transposed() == QuantizeJob((128, 1), E4M3)
