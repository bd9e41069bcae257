"""Probes: what norms, attention, layers in high precision and modules named by the user put out, and what Linears in
high precision are given, as sites without a quantiser.

Shapes:     output [..., N] -> one slab row     Thread: training

A value that breaks outside of a GEMM shows first in what a module returns. A probe reads it once: largest magnitude,
NaN, Inf and where the first of them is; in sampled steps its energy (RMS² = signal_energy / num_elements) as well. On a
GPU it looks as often as at the outputs of GEMMs, by kernels of its own (`fp8watch.kernels.triton_look`). On devices that have none it
counts in some rows only where an output is large, as a head's is: the memory that counting takes belongs to training. Logits
of attention: see attention_logits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from fp8watch.kernels.cpu import largest_magnitude
from fp8watch.numerics.tile_stats import Heavy, Invariant, PerTile, TileStats
from fp8watch.quantize.output_checks import ProbeNumbers
from fp8watch_agent.record import PROBE, Measured
from fp8watch_agent.roles import EMBEDDING, OUTPUT_HEAD, ROUTER, role_of

NORMS, ATTENTION, HIGH_PRECISION = "norms", "attention", "high_precision"
ATTENTION_LOGITS = "attention_logits"
DEFAULT = (NORMS, ATTENTION, HIGH_PRECISION, ATTENTION_LOGITS)
_NORM = re.compile(r"norm(?:\dd)?$")
_WEIGHTED = (nn.Linear, nn.Embedding)
MAX_COUNTED = 1 << 23
"""Elements of an output that are counted by operators of torch: for a moment that takes about 25 bytes each."""


@dataclass(frozen=True)
class Probe:
    """One module whose output is looked at."""

    fqn: str
    module: nn.Module

    @property
    def gemm(self) -> str:
        """The GEMM whose output it is: fprop for a Linear."""
        return "fprop" if isinstance(self.module, nn.Linear) else PROBE

    @property
    def multiplies(self) -> bool:
        """Whether it multiplies what it is given with a weight of its own: a Linear, a router or a head."""
        if isinstance(self.module, nn.Linear):
            return True
        looks_up = isinstance(self.module, (nn.Embedding, nn.EmbeddingBag)) or role_of(self.fqn) == EMBEDDING
        return not looks_up and _keeps_precision(self.fqn, self.module)


def is_norm(module: nn.Module) -> bool:
    """By the name of its class: LayerNorm, LlamaRMSNorm, BatchNorm1d, …; a norm with a GEMM behind it is none."""
    return _NORM.search(type(module).__name__.lower()) is not None


def is_attention(module: nn.Module) -> bool:
    """By the name of its class: MultiheadAttention, LlamaAttention, CausalSelfAttention, Attn, …"""
    name = type(module).__name__.lower()
    return name.endswith(("attention", "attn")) or "attention" in name


def shows_logits(module: nn.Module) -> bool:
    """Whether an nn.Softmax inside reads its attention logits."""
    return any(isinstance(m, nn.Softmax) for m in module.modules())


def _keeps_precision(fqn: str, module: nn.Module) -> bool:
    """Embeddings, Linears, and heads, routers and embeddings of other classes, as transformers and Megatron have them."""
    if isinstance(module, _WEIGHTED):
        return True
    weight = module._parameters.get("weight")
    return (
        weight is not None
        and weight.dim() == 2
        and (role_of(fqn) in (ROUTER, OUTPUT_HEAD, EMBEDDING) or "router" in type(module).__name__.lower())
    )


def select(
    modules: Iterable[tuple[str, nn.Module]], wanted: Sequence[str] | None, quantised: Container[int] = ()
) -> list[Probe]:
    """Modules to probe, in the order of the model.

    Args:
        modules: fully qualified names and modules.
        wanted: "norms", "attention", "high_precision" (embeddings, and what is not quantised: heads, routers),
            "attention_logits", and names or shell patterns of modules; None for these four.
        quantised: ids of the modules whose own operands are observed.

    Raises:
        TypeError: not a sequence of names.
        ValueError: a name or pattern that no module has.
    """
    names = DEFAULT if wanted is None else wanted
    if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
        raise TypeError(f"probes={wanted!r}: must be a list of names, such as ['norms', 'layers.*.mlp']")
    found: dict[int, Probe] = {}
    modules = list(modules)
    looked_at = {fqn for fqn, module in modules if id(module) in quantised}  # an adapter has the name of what it holds
    kinds = set(DEFAULT)
    unused = set(names) - kinds
    for fqn, module in modules:
        if not fqn:
            continue
        hits = {name for name in unused | (set(names) - kinds) if fqn == name or fnmatchcase(fqn, name)}
        unused -= hits
        by_kind = (
            (NORMS in names and is_norm(module))
            or ((ATTENTION in names or ATTENTION_LOGITS in names) and is_attention(module))
            or (HIGH_PRECISION in names and fqn not in looked_at and _keeps_precision(fqn, module))
        )
        if hits or by_kind:
            found.setdefault(id(module), Probe(fqn, module))
    if unused:
        raise ValueError(
            f"probes={list(names)!r}: no module is called {sorted(unused)[0]!r}; give 'norms', 'attention', "
            "'high_precision', 'attention_logits', or names and patterns of model.named_modules(), such as 'layers.*.mlp'"
        )
    return list(found.values())


@torch.no_grad()
def probe_stats(y: Tensor, *, heavy: bool, max_counted: int = MAX_COUNTED) -> TileStats:
    """Statistics of an output as if it were one tile with scale 1; only counts, amax and energy are measured. Reads
    nothing back: for devices other than the CPU.

    Args:
        y: [M, N], floating.
        heavy: with its energy.
        max_counted: of a larger output rows evenly apart are counted, and `num_elements` is of these. All of it is
            looked at for its extremes: what is not finite elsewhere counts as 1, without a place.
    """
    device = y.device
    apart = -(-y.shape[0] // max(1, max_counted // y.shape[1]))
    whole, y = y, y[::apart]
    nan, inf = y.isnan(), y.isinf()
    bad = (nan | inf).view(-1)
    amax = y.abs().masked_fill(nan, 0.0).amax().float().view(1, 1)
    index = bad.to(torch.uint8).argmax()
    place = torch.stack((index // y.shape[1] * apart, index % y.shape[1])).to(torch.int32)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    num_nan, num_inf = nan.sum(), inf.sum()
    if apart > 1:
        low, high = torch.aminmax(whole)
        largest = torch.maximum(low.abs(), high.abs()).float()
        amax = torch.where(largest.isnan(), amax, largest)
        num_nan, num_inf = num_nan.maximum(largest.isnan()), num_inf.maximum(largest.isinf())
    counts = torch.stack(((y != 0).sum(), zero, zero, num_nan, num_inf)).view(5, 1, 1)
    one = torch.ones((1, 1), dtype=torch.float32, device=device)
    no = torch.zeros((1, 1), dtype=torch.bool, device=device)
    sums = noise = None
    if heavy:
        energy = y.float().masked_fill(nan | inf, 0.0).double().square().sum()
        sums = torch.cat((energy.view(1), torch.zeros(4, dtype=torch.float64, device=device)))
        noise = Heavy(sums, torch.zeros((1, 1), dtype=torch.float64, device=device), zero.expand(32).clone())
    tiles = PerTile(amax, one, one, Invariant(no, no, one * 0), counts, torch.where(bad.any(), place, -1), noise)
    measured = int(Measured.COUNTS | Measured.AMAX) | (int(Measured.ENERGIES) if heavy else 0)
    return TileStats((y.shape[0], y.shape[1]), (y.shape[0], y.shape[1]), True, 0.0, one, measured, tiles=tiles)


@torch.no_grad()
def probe_numbers(y: Tensor, *, heavy: bool) -> ProbeNumbers:
    """Look at an output [M, N] on the CPU: one read where all of it is finite."""
    amax = largest_magnitude(y)
    if math.isfinite(amax):
        energy = None
        if heavy:
            flat = y.float().reshape(-1)
            energy = float(torch.dot(flat, flat))
            energy = energy if math.isfinite(energy) else float(flat.double().square().sum())
        return ProbeNumbers(y.numel(), amax, energy=energy)
    nan, inf = y.isnan(), y.isinf()
    index = int((nan | inf).reshape(-1).to(torch.uint8).argmax())
    amax = float(y.abs().masked_fill(nan, 0.0).amax())
    finite = y.float().masked_fill(nan | inf, 0.0).double()
    energy = float(finite.square().sum()) if heavy else None
    return ProbeNumbers(y.numel(), amax, int(nan.sum()), int(inf.sum()), divmod(index, y.shape[1]), energy)
