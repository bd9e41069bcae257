"""The torch optimizers inside what an engine or a trainer calls its optimizer.

Thread:     training, once
"""

from __future__ import annotations

import torch

Optimizer = torch.optim.Optimizer

MAX_WRAPPERS = 8


def torch_optimizers(given: object) -> list[Optimizer]:
    """Those whose steps torch tells of, in what an engine or a trainer calls its optimizer: what was given, else what
    its `.optimizer` holds, and so on; several where it chains several, or is a list of them.

    Raises:
        TypeError: no optimizer at all.
        ValueError: an optimizer without a torch optimizer inside.
    """
    looked: list[str] = []
    level: list[object] = list(given) if isinstance(given, (list, tuple)) and given else [given]
    for _ in range(MAX_WRAPPERS):
        found = [o for o in level if isinstance(o, Optimizer) and getattr(type(o).step, "hooked", False)]
        if found:
            return found
        looked += [type(o).__name__ for o in level]
        level = [inner for o in level for inner in _inside(o)]
    name = type(given).__name__
    if not hasattr(given, "param_groups") and not callable(getattr(given, "step", None)):
        raise TypeError(f"optimizer={name}: must be a torch optimizer; call watch.step() for others")
    raise ValueError(
        f"optimizer={name}: its steps cannot be seen, because no torch optimizer is in it (looked at "
        f"{' → '.join(dict.fromkeys(looked))} by their .optimizer); call watch.step() after each of its steps instead"
    )


def _inside(wrapper: object) -> list[object]:
    chained = getattr(wrapper, "chained_optimizers", None)
    if isinstance(chained, (list, tuple)):
        return list(chained)
    inner = getattr(wrapper, "optimizer", None)
    return [] if inner is None else [inner]
