"""fp8watch: which step, rank, module, GEMM, operand and tile of an FP8 training run broke, why, and what to change.

    watch = fp8watch.attach(model)

Everything here is imported when it is first used, so that `import fp8watch` needs neither torch nor time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fp8watch_agent.version import __version__

if TYPE_CHECKING:
    from fp8watch.integrations.te_debug import te_debug
    from fp8watch.quantize import BlockwiseQuantized, TileStats, quantize_blockwise, quantize_mxfp8, quantize_per_tensor
    from fp8watch.recipe import (
        AmaxHistory,
        OperandRecipe,
        Recipe,
        blockwise,
        current,
        delayed,
        mxfp8,
        nvfp4,
        observe,
        rowwise,
    )
    from fp8watch.session.attach import attach
    from fp8watch.session.mirror import mirror
    from fp8watch.session.watch import Watch

__all__ = [
    "AmaxHistory",
    "BlockwiseQuantized",
    "OperandRecipe",
    "Recipe",
    "TileStats",
    "Watch",
    "__version__",
    "attach",
    "blockwise",
    "current",
    "delayed",
    "mirror",
    "mxfp8",
    "nvfp4",
    "observe",
    "quantize_blockwise",
    "quantize_mxfp8",
    "quantize_per_tensor",
    "rowwise",
    "te_debug",
]

_PUBLIC = {
    **dict.fromkeys((name for name in __all__ if name != "__version__"), "recipe"),
    "attach": "session.attach",
    "mirror": "session.mirror",
    "te_debug": "integrations.te_debug",
    "Watch": "session.watch",
    **dict.fromkeys((name for name in __all__ if "uantize" in name or name == "TileStats"), "quantize"),
}
"""Name -> the room that it is imported from when it is first used."""


def __getattr__(name: str) -> Any:
    if name == "diagnose":
        return importlib.import_module(".diagnose", __name__)
    module = _PUBLIC.get(name)
    if module is None:
        from fp8watch.recipe import RECIPES

        if name in RECIPES:
            return RECIPES[name].build
        raise AttributeError(f"module 'fp8watch' has no attribute {name!r}; public are {', '.join(sorted(_PUBLIC))}")
    try:
        loaded = importlib.import_module(f".{module}", __name__)
    except ModuleNotFoundError as e:
        if e.name == "torch":
            raise ModuleNotFoundError(
                f"fp8watch.{name} needs torch ≥ 2.8: pip install 'fp8watch[train]'", name="torch"
            ) from e
        raise
    value = getattr(loaded, name)
    globals()[name] = value  # wins over the submodule of the same name
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC, "diagnose"})
