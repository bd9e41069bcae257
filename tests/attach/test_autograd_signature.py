"""What autograd asks of a forward in each call is known, and is what the forward takes."""

from __future__ import annotations

import inspect
from types import FunctionType

import pytest

from fp8watch.layers.fp8_linear import _Fp8Linear
from fp8watch.layers.scaled_linear import ScaledLinear


@pytest.mark.parametrize("function", [_Fp8Linear, ScaledLinear])
def test_a_forward_carries_its_own_signature(function):
    forward = function.forward
    plain = FunctionType(forward.__code__, forward.__globals__, argdefs=forward.__defaults__)
    assert list(forward.__signature__.parameters) == list(inspect.signature(plain).parameters)
    assert inspect.signature(forward) is forward.__signature__
