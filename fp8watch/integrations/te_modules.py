"""Which modules of a model are Transformer Engine's, what their GEMMs read, and how well it can be known.

Upstream:   fp8watch.integrations.transformer_engine     Downstream: fp8watch.integrations.te_tensors
Shapes:     (a module) -> sites     Thread: training, once

Modules are told by the names of their classes, those that they inherit from included, as Megatron's are; nothing of
Transformer Engine is imported.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from fp8watch.integrations.te_tensors import is_quantized

KINDS = ("LayerNormMLP", "LayerNormLinear", "GroupedLinear", "Linear")

_OBSERVED = "transformer_engine.pytorch.module."
_OPS = "transformer_engine.pytorch.ops."

_DATA_FLOW = (
    ("input", "rowwise", "fprop"),
    ("weight", "rowwise", "fprop"),
    ("grad_output", "rowwise", "dgrad"),
    ("grad_output", "columnwise", "wgrad"),
    ("input", "columnwise", "wgrad"),
)

EXACT = {
    "counts": "exact", "cast": "exact", "amax": "exact", "scale": "exact", "ratio": "exact",
    "energies": "exact", "moments": "exact", "depth": "exact",
}  # fmt: skip
DERIVED = {
    "counts": "derived", "cast": "absent", "amax": "derived", "scale": "exact", "ratio": "derived",
    "energies": "absent", "moments": "absent", "depth": "absent",
}  # fmt: skip


@dataclass(frozen=True)
class TeSite:
    """One operand of one GEMM of a Transformer Engine module."""

    fqn: str  # of the module; of an MLP with .fc1 or .fc2 behind it, of a grouped Linear with the number of the GEMM
    operand: str
    direction: str
    gemm: str
    visible: bool  # whether Python sees the operand before the cast: statistics are exact, not derived

    @property
    def evidence(self) -> dict[str, str]:
        """How each group of fields is known."""
        return EXACT if self.visible else DERIVED


@dataclass
class TeModule:
    """One module, and the sites of each of its GEMMs."""

    fqn: str
    module: nn.Module
    kind: str
    sites: list[TeSite]

    @property
    def num_gemms(self) -> int:
        """Products of one forward: two of an MLP, one an expert of a grouped Linear."""
        if self.kind == "LayerNormMLP":
            return 2
        return int(getattr(self.module, "num_gemms", 1)) if self.kind == "GroupedLinear" else 1


def kind_of(module: nn.Module) -> str | None:
    """The kind of Transformer Engine module that this is or inherits from, or None. `te.ops` are none: see `unseen`."""
    for cls in type(module).__mro__:
        if cls.__name__ in KINDS and cls.__module__.startswith(_OBSERVED):
            return cls.__name__
    return None


def unseen(named_modules: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, str]]:
    """Modules of Transformer Engine that multiply where nothing is observed, and why."""
    found: list[tuple[str, str]] = []
    for fqn, module in named_modules:
        ours = any(cls.__module__.startswith(_OPS) and "Linear" in cls.__name__ for cls in type(module).__mro__)
        if ours and not (found and fqn.startswith(f"{found[-1][0]}.")):  # its parts are told with it
            found.append((fqn, "te.ops: fused behind the module, not where products are observed"))
    return found


def find(named_modules: Iterable[tuple[str, nn.Module]]) -> list[TeModule]:
    """The Transformer Engine modules of a model that multiply in FP8, in the model's order."""
    found = []
    for fqn, module in named_modules:
        kind = kind_of(module)
        if kind is not None:
            te = TeModule(fqn, module, kind, [])
            te.sites = [site for index in range(te.num_gemms) for site in _sites(te, index)]
            found.append(te)
    return found


def weights_of(te: TeModule, index: int) -> list[Any]:
    """The parameters of one GEMM: one, or the parts that Transformer Engine concatenates before it quantises them."""
    module = te.module
    if te.kind == "LayerNormMLP":
        names = [f"fc{index + 1}_weight"]
    elif te.kind == "GroupedLinear":
        names = [f"weight{index}"]
    else:
        names = list(getattr(module, "weight_names", None) or ["weight"])
    return [getattr(module, name) for name in names if getattr(module, name, None) is not None]


def _sites(te: TeModule, index: int) -> list[TeSite]:
    name = te.fqn
    if te.kind == "LayerNormMLP":
        name = f"{name}.fc{index + 1}"
    elif te.kind == "GroupedLinear":
        name = f"{name}.{index}"
    weights = weights_of(te, index)
    seen = {
        "input": te.kind in ("Linear", "GroupedLinear"),  # behind a norm or an activation the cast is fused into it
        "weight": bool(weights) and not any(is_quantized(w) for w in weights),
        "grad_output": te.kind != "LayerNormMLP" or index == 1,  # between fc2 and fc1 it stays inside
    }
    return [TeSite(name, operand, direction, gemm, seen[operand]) for operand, direction, gemm in _DATA_FLOW]
