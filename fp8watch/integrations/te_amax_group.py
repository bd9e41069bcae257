"""Over which ranks Transformer Engine reduces amax: what their scales must have in common.

Thread:     training, between steps

Source: transformer_engine/pytorch/quantization.py, versions 2.8.0 to 2.20.2: delayed scaling with `reduce_amax` takes the largest amax over
the group of `autocast(amax_reduction_group=…)`, or over all ranks where none is given, and a module keeps recipe and group in
`fp8_meta` from its first forward under autocast on. Recipes without a history reduce nothing there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fp8watch.integrations.te_unread import Tell
from fp8watch_agent.amax_group import AMAX_RANKS_FACT, encode_ranks


class AmaxGroup:
    """The group of one model, told once it is known."""

    def __init__(self) -> None:
        self.known = False
        self._num_looks = 0

    def look(self, modules: Iterable[nn.Module], tell: Tell) -> None:
        """Look at what the modules hold: behind steps 1, 2, 4, 8 and so on, until it is known.

        Modules with groups of their own, each another, are left to what is learned.
        """
        self._num_looks += 1
        if self.known or self._num_looks & (self._num_looks - 1):
            return
        groups = {said for module in modules if (said := reduced_over(module))}
        if len(groups) == 1:
            self.known = True
            tell(None, {AMAX_RANKS_FACT: groups.pop()})


def reduced_over(module: nn.Module) -> str:
    """Ranks over which amax of this module is reduced; "" where it is not, or not yet known."""
    meta: Any = getattr(module, "fp8_meta", None)
    recipe = meta.get("recipe") if isinstance(meta, dict) else None
    if not getattr(recipe, "reduce_amax", False) or not hasattr(recipe, "amax_history_len"):
        return ""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return ""
    group = meta.get("fp8_group")
    ranks = torch.distributed.get_process_group_ranks(torch.distributed.group.WORLD if group is None else group)
    return encode_ranks(ranks) if len(ranks) > 1 else ""
