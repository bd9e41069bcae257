"""Graphs behind what a Linear in FP8 computes, and hooks that keep what is saved in them."""

from __future__ import annotations

import weakref


def as_it_is(saved):
    return saved


def nodes_of(y):
    """Weak references to what computes in FP8 in the graph behind a tensor."""
    found, ways = {}, [y.grad_fn]
    while ways:
        node = ways.pop()
        ways += [n for n, _ in node.next_functions if n is not None]
        if any(name in type(node).__name__ for name in ("Fp8Linear", "ScaledLinear", "ExpertLinear")):
            found[id(node)] = weakref.ref(node)
    return list(found.values())
