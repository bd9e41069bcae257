"""Transformer Engine modules of a model, the operands of their GEMMs, and the evidence available for each.

Shapes:     (a module) -> sites     Thread: training, once

Modules are recognised by class names, including those of base classes, as Megatron's are; nothing of Transformer Engine
is imported.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from fp8watch.integrations.te_debug import delays_wgrad, shows_all
from fp8watch.integrations.te_nvfp4 import is_nvfp4
from fp8watch.integrations.te_tensors import QuantizedView, is_quantized
from fp8watch.numerics.formats import E2M1

KINDS = ("LayerNormMLP", "LayerNormLinear", "GroupedLinear", "Linear")

_OBSERVED = "transformer_engine.pytorch.module."
_OPS = "transformer_engine.pytorch.ops."
_PACKAGE = "transformer_engine.pytorch."

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

CODES_OF_FOUR_BITS = {**DERIVED, "counts": "absent"}
"""E2M1 has no code for NaN."""


@dataclass(frozen=True)
class TeSite:
    """One operand of one GEMM of a Transformer Engine module."""

    fqn: str  # module name; with .fc1 or .fc2 appended for an MLP, with the GEMM's number for a grouped Linear
    operand: str
    direction: str
    gemm: str
    visible: bool  # whether Python sees the operand before the cast, so that statistics are exact, not derived

    @property
    def evidence(self) -> dict[str, str]:
        """Evidence of each group of fields."""
        return EXACT if self.visible else DERIVED


@dataclass(frozen=True)
class SiteNumerics:
    """Format and scaling of a site, as found at its first observation."""

    tile: tuple[int, int]
    format: str
    power_2_scale: bool
    eps: float
    evidence: dict[str, str]
    recipe: str  # our name of the recipe: it determines which scales are valid


def recipe_of(tensor: Any, tile: tuple[int, int], bound: bool) -> str:
    """Our name of a tensor's recipe. `bound`: whether the scale comes from this operand, not from a history."""
    if is_nvfp4(tensor):
        return "nvfp4"
    if hasattr(tensor, "_scale_inv"):  # per tensor: its tile is its shape, which may be any
        return "current" if bound else "delayed"
    return "mxfp8" if 32 in tile else "blockwise"


@dataclass
class TeModule:
    """One module, and the sites of each of its GEMMs."""

    fqn: str
    module: nn.Module
    kind: str
    sites: list[TeSite]

    @property
    def num_gemms(self) -> int:
        """GEMMs per forward: two for an MLP, one per expert for a grouped Linear."""
        if self.kind == "LayerNormMLP":
            return 2
        return int(getattr(self.module, "num_gemms", 1)) if self.kind == "GroupedLinear" else 1


def kind_of(module: nn.Module) -> str | None:
    """Kind of Transformer Engine module that this is or inherits from, or None. `te.ops` are not included: see
    `unseen`.
    """
    for cls in type(module).__mro__:
        if cls.__name__ in KINDS and cls.__module__.startswith(_OBSERVED):
            return cls.__name__
    return None


def unseen(named_modules: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, str]]:
    """Transformer Engine modules whose GEMMs are not observed, and why."""
    found: list[tuple[str, str]] = []
    for fqn, module in named_modules:
        ours = any(cls.__module__.startswith(_OPS) and "Linear" in cls.__name__ for cls in type(module).__mro__)
        if ours and not (found and fqn.startswith(f"{found[-1][0]}.")):  # its parts are reported with it
            found.append((fqn, "te.ops: fused behind the module, not where products are observed"))
    return found


def without_sites(named_modules: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, str]]:
    """Parts of Transformer Engine modules that may compute or communicate in FP8 and are not observed, and why."""
    found: list[tuple[str, str]] = []
    for fqn, module in named_modules:
        classes = type(module).__mro__
        if any(c.__name__ == "DotProductAttention" and c.__module__.startswith(_PACKAGE) for c in classes):
            found.append(
                (fqn, "products of activations: not observed, in FP8 where its recipe says fp8_dpa or fp8_mha")
            )
        if not kind_of(module):
            continue
        if any(name.startswith("ub_overlap") and on for name, on in vars(module).items()):
            found.append((f"{fqn} communication", "overlapped with its GEMMs: what it sends is not observed"))
        if delays_wgrad(module):
            found.append((f"{fqn} wgrad", "delayed behind the backward: its product is not observed"))
    return found


def find(named_modules: Iterable[tuple[str, nn.Module]]) -> list[TeModule]:
    """Transformer Engine modules of a model that multiply in FP8, in model order."""
    found = []
    for fqn, module in named_modules:
        kind = kind_of(module)
        if kind is not None:
            te = TeModule(fqn, module, kind, [])
            te.sites = [site for index in range(te.num_gemms) for site in _sites(te, index)]
            found.append(te)
    return found


def weights_of(te: TeModule, index: int) -> list[Any]:
    """Parameters of one GEMM: one, or the parts that Transformer Engine concatenates before quantising."""
    module = te.module
    if te.kind == "LayerNormMLP":
        names = [f"fc{index + 1}_weight"]
    elif te.kind == "GroupedLinear":
        names = [f"weight{index}"]
    else:
        names = list(getattr(module, "weight_names", None) or ["weight"])
    return [getattr(module, name) for name in names if getattr(module, name, None) is not None]


def _sites(te: TeModule, index: int) -> list[TeSite]:
    name, weights, shown = name_of(te, index), weights_of(te, index), shows_all()
    seen = {
        # after a norm or an activation the cast is fused into it
        "input": shown or te.kind in ("Linear", "GroupedLinear"),
        "weight": bool(weights) and not any(is_quantized(w) for w in weights),
        "grad_output": shown
        or te.kind != "LayerNormMLP"
        or index == 1,  # between fc2 and fc1 it stays inside the module
    }
    return [TeSite(name, operand, direction, gemm, seen[operand]) for operand, direction, gemm in _DATA_FLOW]


def name_of(te: TeModule, index: int) -> str:
    """Name of the sites of one of its GEMMs: of an MLP the first or the second, of experts each has its own."""
    of_gemm = {"GroupedLinear": f".{index}", "LayerNormMLP": f".fc{index + 1}"}.get(te.kind, "")
    return f"{te.fqn}{of_gemm}".lstrip(".")  # the model itself has no name


def numerics_of(held: Any, view: QuantizedView, *, exact: bool) -> SiteNumerics:
    """What a tensor of one direction says of itself.

    Args:
        held: the tensor.
        view: its codes and scales.
        exact: the operand was seen before its cast.
    """
    quantizer = getattr(held, "_quantizer", None)
    power_2 = bool(getattr(quantizer, "force_pow_2_scales", False))
    eps = float(getattr(quantizer, "amax_epsilon", 0.0) or 0.0)
    recipe = recipe_of(held, view.tile, is_bound(quantizer, view))
    tile = max(view.tile[0], 1), max(view.tile[1], 1)  # of an expert without tokens the tensor has no rows
    evidence = EXACT if exact else CODES_OF_FOUR_BITS if view.fmt is E2M1 else DERIVED
    return SiteNumerics(tile, view.fmt.name, power_2 or recipe == "mxfp8", eps, evidence, recipe)


def is_bound(quantizer: Any, view: QuantizedView) -> bool:
    """Whether the scale is that of the operand's own amax, rounded down; else it has a history, or is rounded up."""
    return view.fmt is not E2M1 and hasattr(quantizer, "force_pow_2_scales")
