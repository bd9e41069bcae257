"""What a recipe is: how each operand of a Linear is quantised, as frozen data with facts and a fingerprint.

Thread:     any; read-only
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from fp8watch.numerics.formats import E2M1, number_format
from fp8watch_agent.checks import Rule, argument

OPERANDS = ("input", "weight", "grad_output")

ROW = (1, -1)
"""Tile of one scale a row, as long as the contraction is."""

NVFP4_TILES = ((1, 16), (16, 16))
TILES: tuple[tuple[int, int] | None, ...] = ((1, 128), (128, 128), (1, 32), *NVFP4_TILES, ROW, None)
GEMMS = {"fprop": ("input", "weight"), "dgrad": ("grad_output", "weight"), "wgrad": ("grad_output", "input")}
"""What each GEMM of a Linear reads."""

SCALINGS = ("current", "delayed", "mx", "nvfp4")
AMAX_COMPUTE_ALGOS = ("max", "most_recent")

FLOAT32_MAX = 3.4028234663852886e38

Fact = str | int | float | bool

HISTORY_LEN = Annotated[int, Meta(ge=1, le=1 << 20), Rule("must be a whole number of passes from 1 to 1048576")]
MARGIN = Annotated[int, Meta(ge=-32, le=32), Rule("must be a whole number of octaves from -32 to 32; 0 is usual")]
WARMUP_STEPS = Annotated[int, Meta(ge=0), Rule("must be a whole number of steps, 0 or more")]


@dataclass(frozen=True)
class OperandRecipe:
    """How one operand is quantised.

    `tile` is (1, 128), (1, 32) or (1, 16) along the contraction axis, (128, 128), (16, 16), ROW for the whole of the
    contraction axis, or None for the whole tensor. `eps` clamps
    the tile's amax from below. `scaling` says where a scale comes from: "current": the amax of the tile; "delayed":
    the amax of earlier passes, whole tensors only; "mx": an E8M0 byte rounded up, tiles (1, 32) only; "nvfp4": an E4M3
    scale of the block and one of the tensor, tiles (1, 16) and (16, 16) and format E2M1 only. Of "nvfp4" alone are
    `random_hadamard_transform`, of the columnwise copy, and `stochastic_rounding`.
    """

    tile: tuple[int, int] | None
    format: str = "E4M3"
    power_2_scale: bool = True
    eps: float = 0.0
    scaling: str = "current"
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False

    def __post_init__(self) -> None:
        if self.tile not in TILES:
            rule = "must be (1, 128), (128, 128), (1, 32) for scaling='mx', (1, 16) or (16, 16) for scaling='nvfp4', (1, -1) for a row, or None for the whole tensor"
            raise ValueError(f"tile={self.tile}: {rule}")
        number_format(self.format)
        if not 0 <= self.eps <= FLOAT32_MAX:  # NaN too
            raise ValueError(f"eps={self.eps}: must be finite in float32 and 0 or more; 1e-12 is recommended")
        if self.scaling not in SCALINGS:
            raise ValueError(f"scaling={self.scaling!r}: must be one of {', '.join(map(repr, SCALINGS))}")
        if self.scaling == "delayed" and (self.tile is not None or self.power_2_scale or self.eps):
            rule = "delayed scaling has one FP32 scale a tensor and no eps: tile=None, power_2_scale=False, eps=0.0"
            raise ValueError(f"tile={self.tile}, power_2_scale={self.power_2_scale}, eps={self.eps}: {rule}")
        if (self.scaling == "mx") != (self.tile == (1, 32)) or (self.scaling == "mx" and not self.power_2_scale):
            rule = "tiles (1, 32) and scaling='mx' belong together, and their scales are powers of two"
            raise ValueError(f"tile={self.tile}, scaling={self.scaling!r}, power_2_scale={self.power_2_scale}: {rule}")
        if self.scaling == "mx" and self.eps:
            raise ValueError(f"eps={self.eps}: an E8M0 scale has no eps; leave it at 0")
        self._check_nvfp4()
        if self.tile == ROW and not self.eps:
            raise ValueError(f"eps={self.eps}: a row of zeros has no scale without one; 1e-12 is torchao's")

    def _check_nvfp4(self) -> None:
        is_one = self.scaling == "nvfp4"
        if (self.tile in NVFP4_TILES) != is_one or (self.format == E2M1.name) != is_one:
            rule = "tiles (1, 16) and (16, 16), format='E2M1' and scaling='nvfp4' belong together"
            raise ValueError(f"tile={self.tile}, format={self.format!r}, scaling={self.scaling!r}: {rule}")
        if is_one and (self.power_2_scale or self.eps):
            rule = "scales of NVFP4 are E4M3 and float32, and have no eps: power_2_scale=False, eps=0.0"
            raise ValueError(f"power_2_scale={self.power_2_scale}, eps={self.eps}: {rule}")
        if self.random_hadamard_transform and self.tile != (1, 16):
            raise ValueError(f"random_hadamard_transform=True with tile={self.tile}: it is of tiles (1, 16)")
        if self.stochastic_rounding and not is_one:
            raise ValueError(f"stochastic_rounding=True with scaling={self.scaling!r}: it is of scaling='nvfp4'")

    @property
    def kind(self) -> str:
        """The recipe that this arithmetic belongs to: blockwise, current, delayed, mxfp8, nvfp4 or rowwise."""
        if self.scaling in ("mx", "nvfp4"):
            return "mxfp8" if self.scaling == "mx" else "nvfp4"
        if self.tile == ROW:
            return "rowwise"
        if self.scaling == "delayed":
            return "delayed"
        return "current" if self.tile is None else "blockwise"

    @property
    def shared(self) -> bool:
        """Whether rowwise and columnwise copies have the same codes and scales, so that one quantisation serves both."""
        return self.tile is None or self.tile[0] == self.tile[1]


@dataclass(frozen=True)
class AmaxHistory:
    """How a delayed scale follows the amax of earlier passes."""

    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    margin: int = 0

    def __post_init__(self) -> None:
        argument("amax_history_len", self.amax_history_len, HISTORY_LEN)
        if self.amax_compute_algo not in AMAX_COMPUTE_ALGOS:
            known = ", ".join(map(repr, AMAX_COMPUTE_ALGOS))
            raise ValueError(f"amax_compute_algo={self.amax_compute_algo!r}: must be one of {known}")
        argument("margin", self.margin, MARGIN)


def _input() -> OperandRecipe:
    return OperandRecipe((1, 128))


def _weight() -> OperandRecipe:
    return OperandRecipe((128, 128))


Operands = tuple[OperandRecipe | None, OperandRecipe | None, OperandRecipe | None]


def in_order(made: Mapping[str, OperandRecipe | None]) -> Operands:
    """Input, weight, grad_output, as `Recipe` takes them."""
    return made["input"], made["weight"], made["grad_output"]


def _check_transform(specs: Mapping[str, OperandRecipe]) -> None:
    turned = {o: s.random_hadamard_transform for o, s in specs.items()}
    if turned.get("weight"):
        rule = "dgrad reads it beside a gradient without the transform; leave it out"
        raise ValueError(f"random_hadamard_transform=True for weight: {rule}")
    if {"input", "grad_output"} <= specs.keys() and turned["input"] != turned["grad_output"]:
        rule = "wgrad multiplies input by grad_output, and the transform drops out only where both went through it"
        raise ValueError(f"random_hadamard_transform of one of input and grad_output: {rule}")
    stochastic = [o for o, s in specs.items() if s.stochastic_rounding and o != "grad_output"]
    if stochastic:
        raise ValueError(f"stochastic_rounding=True for {' and '.join(stochastic)}: it is for grad_output alone")


@dataclass(frozen=True)
class Recipe:
    """A recipe for the three GEMMs of a Linear.

    An operand that is None stays in high precision, and so does each GEMM that reads it: with `grad_output=None` the
    forward is in FP8, and both GEMMs of the backward multiply unquantised operands.

    With `observe_only` the GEMMs stay as they are and operands are quantised on the side, for statistics; the name is
    then "observe". For the first `warmup_steps` steps of a run the GEMMs multiply unquantised operands, which are
    observed all the same; delayed histories fill meanwhile. Linears whose name matches one of the shell patterns in
    `high_precision_modules` are not converted. `flags` are a trainer's own FP8 flags; they change
    nothing here but the fingerprint. The next two are what a reader must be told, and are not in the fingerprint.
    """

    name: str = ""
    input: OperandRecipe | None = field(default_factory=_input)
    weight: OperandRecipe | None = field(default_factory=_weight)
    grad_output: OperandRecipe | None = field(default_factory=_input)
    observe_only: bool = False
    warmup_steps: int = 0
    history: AmaxHistory | None = None
    flags: tuple[tuple[str, str], ...] = ()
    declared_not_effective: tuple[str, ...] = field(default=(), compare=False)
    warnings: tuple[str, ...] = field(default=(), compare=False)
    high_precision_modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        steps = self.warmup_steps
        argument("warmup_steps", steps, WARMUP_STEPS)
        if steps and self.observe_only:
            raise ValueError(
                f"warmup_steps={steps} with observe_only=True: observed GEMMs never compute in FP8; drop one"
            )
        modules: object = self.high_precision_modules
        if not isinstance(modules, (tuple, list)) or any(not isinstance(m, str) for m in modules):
            raise ValueError(f"high_precision_modules={modules!r}: must be a list of module names or shell patterns")
        object.__setattr__(self, "high_precision_modules", tuple(modules))
        specs = dict(self.quantised)
        if len(specs) < 2:
            rule = "a GEMM is in FP8 where both of its operands are; quantise two of them, or use recipe='observe'"
            raise ValueError(f"{' and '.join(o for o in OPERANDS if o not in specs)} in high precision: {rule}")
        blocks = [o for o, s in specs.items() if s.tile == (128, 128)]
        if len(blocks) > 1:
            rule = "no GEMM takes 128×128 blocks on both sides: give one operand (128, 128), the others (1, 128)"
            raise ValueError(f"tile=(128, 128) for {' and '.join(blocks)}: {rule}")
        kinds = {s.kind for s in specs.values()}
        _check_transform(specs)
        if self.history is None and "delayed" in kinds:
            object.__setattr__(self, "history", AmaxHistory())
        if self.history is not None and "delayed" not in kinds:
            raise ValueError(f"history={self.history}: no operand has scaling='delayed'; leave it out")
        name = "observe" if self.observe_only else self.name if self.name != "observe" else ""
        object.__setattr__(self, "name", name or self.kind)

    def operand(self, name: str) -> OperandRecipe | None:
        """The recipe of `input`, `weight` or `grad_output`; None: it stays in high precision."""
        got: OperandRecipe | None = getattr(self, name)
        return got

    @property
    def quantised(self) -> tuple[tuple[str, OperandRecipe], ...]:
        """The operands that are not in high precision, with their recipes, in order."""
        return tuple((o, spec) for o in OPERANDS if (spec := self.operand(o)) is not None)

    @property
    def high_precision(self) -> tuple[str, ...]:
        """The operands that are."""
        return tuple(o for o in OPERANDS if self.operand(o) is None)

    @property
    def gemms(self) -> tuple[bool, bool, bool]:
        """Of fprop, dgrad, wgrad: whether both operands are quantised."""
        fprop, dgrad, wgrad = (all(self.operand(o) is not None for o in reads) for reads in GEMMS.values())
        return fprop, dgrad, wgrad

    @property
    def kind(self) -> str:
        """The arithmetic, observed or computed: blockwise, current, delayed, mxfp8, nvfp4, rowwise, or mixed."""
        kinds = {spec.kind for _, spec in self.quantised}
        return kinds.pop() if len(kinds) == 1 else "mixed"

    @property
    def shared(self) -> tuple[bool, bool, bool]:
        """Of input, weight, grad_output: whether one quantisation serves both directions."""
        input, weight, grad_output = ((s := self.operand(o)) is not None and s.shared for o in OPERANDS)
        return input, weight, grad_output

    def site_recipe(self, operand: str, *, observe: bool = False) -> str:
        """What a site of the operand is registered with: observed sites say "observe", but for delayed scaling, whose
        scale is bound to no invariant. `observe`: its GEMM is only observed, whatever the others do."""
        spec = self.operand(operand)
        kind = "" if spec is None else spec.kind
        return "observe" if (self.observe_only or observe) and kind != "delayed" else kind

    def facts(self) -> dict[str, Fact]:
        """The effective configuration as flat facts, for the session and the pages."""
        out: dict[str, Fact] = {"recipe": self.name, "observe_only": self.observe_only}
        for name in OPERANDS:
            spec = self.operand(name)
            if spec is None:
                out[f"{name}.format"] = "high precision"
                continue
            out[f"{name}.tile"] = (
                "tensor" if spec.tile is None else "row" if spec.tile == ROW else "x".join(map(str, spec.tile))
            )
            out[f"{name}.format"] = spec.format
            out[f"{name}.power_2_scale"] = spec.power_2_scale
            out[f"{name}.eps"] = spec.eps
            out[f"{name}.scaling"] = spec.scaling
            if spec.scaling == "nvfp4":
                out[f"{name}.random_hadamard_transform"] = spec.random_hadamard_transform
                out[f"{name}.stochastic_rounding"] = spec.stochastic_rounding
        if self.high_precision_modules:
            out["high_precision_modules"] = ", ".join(self.high_precision_modules)[:2000]
        if self.warmup_steps:
            out["warmup_steps"] = self.warmup_steps
        if self.history is not None:
            out["amax_history_len"] = self.history.amax_history_len
            out["amax_compute_algo"] = self.history.amax_compute_algo
            out["margin"] = self.history.margin
        out.update({f"flag.{name}": value for name, value in self.flags})
        return out

    def fingerprint(self) -> str:
        """12 hex digits over the effective configuration: equal fingerprints quantise alike."""
        text = ";".join(f"{k}={v!r}" for k, v in sorted(self.facts().items()))
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()

    def session_facts(self) -> dict[str, Fact]:
        """`facts`, and beside them what was declared without effect and what does not fit together."""
        out = self.facts()
        if self.declared_not_effective:
            out["declared_not_effective"] = "; ".join(self.declared_not_effective)[:2000]
        if self.warnings:
            out["configuration_warning"] = "; ".join(self.warnings)[:2000]
        return out
