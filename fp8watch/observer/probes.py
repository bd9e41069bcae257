"""Probes: what norms, attention and modules named by the user put out, as sites without a quantiser.

Shapes:     output [..., N] -> one slab row; logits -> one scalar of the step     Thread: training

A value that breaks outside of a GEMM shows first in what a module returns. A probe reads it once: largest magnitude,
NaN, Inf and where the first of them is; in sampled steps its energy (RMS² = signal_energy / num_elements) as well. On a
GPU it looks as often as at the outputs of GEMMs (see provenance).

Attention logits are seen where the implementation hands them to an nn.Softmax inside an attention module. Fused
attention shows none; training can say them itself: watch.log(max_attention_logit=…).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from fp8watch.kernels.cpu_scan import largest_magnitude
from fp8watch.numerics.tile_stats import Heavy, Invariant, PerTile, TileStats
from fp8watch.quantize.output_checks import ProbeNumbers
from fp8watch_agent.record import Measured

NORMS, ATTENTION = "norms", "attention"
DEFAULT = (NORMS, ATTENTION)
_NORM = re.compile(r"norm(?:\dd)?$")
PROBE = "probe"
"""`gemm` of a probe on a module that is no Linear, and its recipe."""


@dataclass(frozen=True)
class Probe:
    """One module whose output is looked at."""

    fqn: str
    module: nn.Module

    @property
    def gemm(self) -> str:
        """The GEMM whose output it is: fprop for a Linear."""
        return "fprop" if isinstance(self.module, nn.Linear) else PROBE


def is_norm(module: nn.Module) -> bool:
    """By the name of its class: LayerNorm, LlamaRMSNorm, BatchNorm1d, …; a norm with a GEMM behind it is none."""
    return _NORM.search(type(module).__name__.lower()) is not None


def is_attention(module: nn.Module) -> bool:
    """By the name of its class: MultiheadAttention, LlamaAttention, CausalSelfAttention, Attn, …"""
    name = type(module).__name__.lower()
    return name.endswith(("attention", "attn")) or "attention" in name


def select(modules: Iterable[tuple[str, nn.Module]], wanted: Sequence[str] | None) -> list[Probe]:
    """Modules to probe, in the order of the model.

    Args:
        modules: fully qualified names and modules.
        wanted: "norms", "attention", and names or shell patterns of modules; None for the first two.

    Raises:
        TypeError: not a sequence of names.
        ValueError: a name or pattern that no module has.
    """
    names = DEFAULT if wanted is None else wanted
    if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
        raise TypeError(f"probes={wanted!r}: must be a list of names, such as ['norms', 'layers.*.mlp']")
    found: dict[int, Probe] = {}
    unused = set(names) - set(DEFAULT)
    for fqn, module in modules:
        if not fqn:
            continue
        hits = {name for name in unused | (set(names) - set(DEFAULT)) if fqn == name or fnmatchcase(fqn, name)}
        unused -= hits
        by_kind = (NORMS in names and is_norm(module)) or (ATTENTION in names and is_attention(module))
        if hits or by_kind:
            found.setdefault(id(module), Probe(fqn, module))
    if unused:
        raise ValueError(
            f"probes={list(names)!r}: no module is called {sorted(unused)[0]!r}; give 'norms', 'attention', or names "
            "and patterns of model.named_modules(), such as 'layers.*.mlp'"
        )
    return list(found.values())


def softmaxes(probes: Iterable[Probe]) -> list[tuple[str, nn.Softmax]]:
    """(attention module, the nn.Softmax inside it): what that softmax reads are attention logits."""
    found: dict[int, tuple[str, nn.Softmax]] = {}
    for probe in probes:
        if is_attention(probe.module):
            for module in probe.module.modules():
                if isinstance(module, nn.Softmax):
                    found[id(module)] = (probe.fqn, module)  # of nested ones the innermost
    return list(found.values())


@torch.no_grad()
def probe_stats(y: Tensor, *, heavy: bool) -> TileStats:
    """Statistics of an output as if it were one tile with scale 1; only counts, amax and energy are measured. Reads
    nothing back: for devices other than the CPU.

    Args:
        y: [M, N], floating.
        heavy: with its energy.
    """
    device = y.device
    nan, inf = y.isnan(), y.isinf()
    bad = (nan | inf).view(-1)
    amax = y.abs().masked_fill(nan, 0.0).amax().float().view(1, 1)
    index = bad.to(torch.uint8).argmax()
    place = torch.stack((index // y.shape[1], index % y.shape[1])).to(torch.int32)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    counts = torch.stack(((y != 0).sum(), zero, zero, nan.sum(), inf.sum())).view(5, 1, 1)
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
