"""Opacus computes gradients of single samples by the class of a layer: a watched Linear gets the rule of its own class.

Thread:     training, once

Opacus looks a layer up by its very type, which attach has put a class over. Without a rule it computes the samples through
`torch.func` on a copy of the layer, hooks and all, and raises where its own hooks are among them. Only what is loaded is looked at.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

REGISTRIES = ("GRAD_SAMPLERS", "NORM_SAMPLERS")
_WHERE = "opacus.grad_sample."


def lend_rules(modules: Iterable[nn.Module]) -> None:
    """Enter the classes of watched modules beside those that they stand for; nothing where Opacus is not loaded."""
    registries = _registries()
    if not registries:
        return
    classes = {type(m) for m in modules}
    for cls in classes:
        base = cls.__dict__.get("_fp8watch_base")
        for rules in registries:
            if base in rules:
                rules.setdefault(cls, rules[base])


def _registries() -> list[dict[type, Any]]:
    found = {}
    for name in [n for n in sys.modules if n.startswith(_WHERE)]:
        for cls in list(vars(sys.modules[name]).values()):
            if isinstance(cls, type):
                for key in REGISTRIES:
                    if isinstance(rules := cls.__dict__.get(key), dict):
                        found[id(rules)] = rules
    return list(found.values())
