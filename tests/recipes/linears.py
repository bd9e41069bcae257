"""Operands through a Linear of tests/recipes."""

from __future__ import annotations


def run(model, x, grad):
    y = model(x)
    y.backward(grad)
    return y.detach(), x.grad, model[0].weight.grad
