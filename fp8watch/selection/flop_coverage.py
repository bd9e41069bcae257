"""FLOP coverage: share of a model's GEMMs that is observed, estimated from shapes, and the parameters left out.

Shapes:     a weight of N elements -> 2·N FLOPs a token; of E experts of which k see a token, k/E of that
Thread:     training, once

Products with weights that are computed in a forward are added once one ran (`computed_weights`). Attention's products of
activations have no weight, and are not in the estimate. Nor are embedding lookups, which are no
GEMMs, and parameters that are no GEMM weights by their names: those are named apart, and counted where they would be much.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter

from fp8watch.observer.probes import is_norm
from fp8watch.selection.computed_weights import ComputedWeight, flops_besides
from fp8watch.selection.own_parameters import LEARNED_ARRAYS, NO_GEMM, OwnModule
from fp8watch.selection.tied_heads import TiedHead
from fp8watch.selection.wrappers import shows_anothers_weight
from fp8watch_agent.fact_lists import joined
from fp8watch_agent.roles import EMBEDDING, OUTPUT_HEAD, ROUTER, pattern, role_of

NAMED_ON_LINE = 4
MUCH = 0.1
"""Of the GEMM FLOPs: a parameter that would be as many is not passed over for its name."""
_LOOKED_UP = re.compile(r"embed|(?:cls|class|mask|register|dist\w*)_tokens?$", re.IGNORECASE)
_TOP_K = ("top_k", "topk", "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_router_topk")
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_NUMBERED_EXPERT = re.compile(r"(?:^|\.)(\w*experts)\.\d+(?:\.|$)")


@dataclass(frozen=True)
class NotTaken:
    """GEMM weights that attach leaves out, all layers together."""

    name: str
    what: str
    share: float  # of the model's GEMM FLOPs
    at_most: bool  # experts with an unknown number per token

    def __str__(self) -> str:
        return f"{self.name} ({self.what}, {'up to ' if self.at_most else ''}{percent(self.share)})"


@dataclass
class Coverage:
    """Observed share of the GEMM FLOPs, and GEMM weights besides the Linears that were left out."""

    observed: float | None = None  # None: no GEMM
    not_taken: list[NotTaken] = field(default_factory=list)
    not_counted: list[NotTaken] = field(default_factory=list)  # by their names no GEMM weights; `share` if they were
    shares: Mapping[str, float] = field(
        default_factory=dict
    )  # of each module that is observed, by the name of its sites
    total: float = 0.0  # FLOPs a token
    counted: Mapping[int, float] = field(default_factory=dict)  # FLOPs a token by id of the parameter

    def silent(self, names: Iterable[str]) -> float:
        """Share of the model's GEMM FLOPs that these observed modules are."""
        return sum(self.shares.get(name, 0.0) for name in names)

    def without(self, arrays: Iterable[str]) -> Coverage:
        """The same where these observed modules turned out to be none of the GEMM FLOPs."""
        rest = 1.0 - (gone := self.silent(arrays := list(arrays)))
        if not arrays or rest <= 0.0:
            return self if not arrays else replace(self, observed=None, shares={})
        shares = {name: share / rest for name, share in self.shares.items() if name not in arrays}
        return replace(self, observed=((self.observed or 0.0) - gone) / rest, shares=shares)

    def besides(self, weights: Iterable[ComputedWeight], names: Mapping[int, str]) -> Coverage:
        """The same with products besides, that are not observed: with weights that the model computes from parameters of these names."""
        found = flops_besides(weights, self.counted)
        total = self.total + sum(found.values())
        if self.observed is None or not found:
            return self
        computed = [
            _Weight(_shared(sorted(names[i] for i in weight.made_of)), f"computed weight [{weight.shape[0]}, {weight.shape[1]}]", flops)
            for weight, flops in found.items()
        ]  # fmt: skip
        less = self.total / total
        not_taken = [replace(n, share=n.share * less) for n in self.not_taken] + _grouped(computed, total)
        return replace(
            self, observed=self.observed * less, total=total,
            not_taken=sorted(not_taken, key=lambda n: -n.share),
            not_counted=[replace(n, share=n.share * less) for n in self.not_counted],
            shares={name: share * less for name, share in self.shares.items()},
        )  # fmt: skip

    def not_counted_names(self) -> list[str]:
        """Parameters that are no GEMM weights by their names, and what they are."""
        return [f"{n.name} ({n.what})" for n in self.not_counted]

    def line(self) -> str | None:
        """Text for the line that attach prints; None when there is nothing to report."""
        if self.observed is None or (self.observed >= 0.995 and not self.not_taken):
            return None
        least = "at least " if any(n.at_most for n in self.not_taken) else ""
        text = f"observing {least}{percent(self.observed)} of the GEMM FLOPs"
        if self.not_taken:
            rest = self.not_taken[NAMED_ON_LINE:]
            more = f" and {len(rest)} more ({percent(sum(n.share for n in rest))})" if rest else ""
            text += f"; not taken: {', '.join(map(str, self.not_taken[:NAMED_ON_LINE]))}{more}"
        return text

    def facts(self) -> dict[str, str | float]:
        """Session facts."""
        if self.observed is None:
            return {}
        facts: dict[str, str | float] = {
            "gemm_flops_observed": round(self.observed, 4),
            "not_taken": joined(map(str, self.not_taken)),
        }
        if self.not_counted:
            facts["not_counted"] = joined(self.not_counted_names())
        return facts


def _shared(names: Sequence[str]) -> str:
    """What a computed weight is called: the parameter that it is made of, or the module of several."""
    parts = [name.split(".") for name in names]
    same = next((n for n, of in enumerate(zip(*parts, strict=False)) if len(set(of)) > 1), min(map(len, parts)))
    return ".".join(parts[0][:same]) or names[0]


def percent(share: float) -> str:
    """A share as text: never 0 % when there is something, never 100 % when something is missing."""
    if 0 < share < 0.01:
        return "<1 %"
    return "99 %" if 0.99 < share < 1 else f"{100 * share:.0f} %"


@dataclass(frozen=True)
class _Weight:
    name: str
    what: str
    flops: float
    at_most: bool = False
    by_name: bool = False  # taken for no GEMM weight, by its name


def coverage(
    named: Sequence[tuple[str, nn.Module]],
    taken: Iterable[nn.Module],
    own: Sequence[OwnModule] = (),
    heads: Sequence[TiedHead] = (),
) -> Coverage:
    """Observed part of a model.

    Args:
        named: its modules under the names that sites have.
        taken: Linears that were taken over, and modules that are observed as they are.
        own: modules whose products with their own parameters are observed.
        heads: that are no modules: like Linears in high precision they count, and not as observed.
    """
    full = _unsharded(named)
    modules: dict[str, list[nn.Module]] = {}
    for fqn, module in named:  # a wrapper has the name of the wrapped module
        modules.setdefault(fqn, []).append(module)
    whole = {id(m): m for m in taken}
    seen: set[int] = set()
    names = {id(o.tensor(p)): p.fqn for o in own for p in o.parameters}
    observed: dict[str, float] = {}
    embeddings = [head.embedding.weight for head in heads]
    counted = {id(p): 2.0 * math.prod(full.get(id(p)) or _shape(p)) for p in embeddings}
    left = sum(counted.values())
    others: list[_Weight] = []
    passed_over: list[_Weight] = []
    head = any(role_of(fqn) == OUTPUT_HEAD and m._parameters.get("weight") is not None for fqn, m in named)
    for fqn, module in named:
        if id(module) in seen or shows_anothers_weight(module):
            continue
        if id(module) in whole:
            seen.update(id(m) for m in module.modules())
            scale, _ = _share_of_tokens(fqn, module, 2, modules)
            shapes = [full.get(id(p)) or _shape(p) for p in module.parameters()]
            size = sum(math.prod(shape) for shape in shapes if len(shape) >= 2)
            counted |= {
                id(p): 2.0 * scale * math.prod(shape) for p, shape in zip(module.parameters(), shapes, strict=True)
            }
            if not size and isinstance(module, nn.Linear):  # FSDP1 without the parameters of the model: it has none
                size = module.in_features * module.out_features
            observed[fqn] = 2.0 * scale * size
        elif isinstance(module, nn.Linear) and id(module._parameters.get("weight")) not in names:
            seen.update(id(m) for m in module.modules())
            scale, _ = _share_of_tokens(fqn, module, 2, modules)
            left += (flops := 2.0 * scale * module.in_features * module.out_features)
            counted |= {id(p): flops for p in module.parameters() if len(_shape(p)) >= 2}
        elif is_norm(module):  # what is inside counts: PreNorm has the layer behind it, AdaLN a Linear
            seen.add(id(module))
        elif isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or (head and _looks_up(fqn, module)):
            seen.update(id(m) for m in module.modules())
        else:
            for parameter, weight in _weights_of(fqn, module, modules, seen, full):
                counted[parameter] = 0.0 if weight.by_name else weight.flops
                if parameter in names:
                    observed[names[parameter]] = weight.flops
                elif weight.by_name:
                    passed_over.append(weight)
                else:
                    others.append(weight)
    total = sum(observed.values()) + left + sum(w.flops for w in others)
    much = [w for w in passed_over if w.flops >= MUCH * (total + w.flops) and not _LOOKED_UP.search(w.name)]
    others += much
    total += sum(w.flops for w in much)
    if not total:
        return Coverage()
    shares = {name: flops / total for name, flops in observed.items()}
    rest = _grouped([w for w in passed_over if w not in much], total)
    return Coverage(sum(observed.values()) / total, _grouped(others, total), rest, shares, total, counted)


def _looks_up(fqn: str, module: nn.Module) -> bool:
    """Whether it is an embedding of another class than torch's, as Megatron's; without a head that has a weight of its own
    that of the embedding may be multiplied with."""
    return role_of(fqn) == EMBEDDING and "embedding" in type(module).__name__.lower()


def _weights_of(
    fqn: str,
    module: nn.Module,
    modules: Mapping[str, list[nn.Module]],
    seen: set[int],
    full: Mapping[int, tuple[int, ...]],
) -> Iterator[tuple[int, _Weight]]:
    """A module's own parameters that some GEMM reads, or would if their names said nothing else, by their ids."""
    for name, p in module.named_parameters(recurse=False):
        shape = full.get(id(p)) or _shape(p)
        if id(p) in seen or not p.is_floating_point() or sum(n > 1 for n in shape) < 2:
            continue
        by_name = name != "weight" and any(names.search(name) for names in (NO_GEMM, LEARNED_ARRAYS))
        seen.add(id(p))
        kind, dims = type(module).__name__, f"[{', '.join(map(str, shape))}]"
        scale, at_most = _share_of_tokens(fqn, module, len(shape), modules, shape[0])
        if name != "weight":
            what, called = f"{len(shape)}-D parameter {dims}", f"{fqn}.{name}".lstrip(".")
            what += ", no GEMM by its name" if by_name else ""
        else:
            routes = role_of(fqn) == ROUTER or "router" in kind.lower()
            what, called = f"{ROUTER if routes else kind} {dims}", fqn or name
        yield id(p), _Weight(called, what, 2.0 * scale * math.prod(shape), at_most, by_name)


def _grouped(weights: list[_Weight], total: float) -> list[NotTaken]:
    """Layers merged, the largest first."""
    groups: dict[tuple[str, str], list[_Weight]] = {}
    for w in weights:
        groups.setdefault((pattern(w.name), w.what), []).append(w)
    found = [
        NotTaken(
            of[0].name if len(of) == 1 else name, what, sum(w.flops for w in of) / total, any(w.at_most for w in of)
        )
        for (name, what), of in groups.items()
    ]
    return sorted(found, key=lambda n: -n.share)


def _shape(p: Any) -> tuple[int, ...]:
    """Full shape of the parameter; DeepSpeed keeps it beside the local part."""
    return () if isinstance(p, UninitializedParameter) else tuple(getattr(p, "ds_shape", p.shape))


def _unsharded(named: Iterable[tuple[str, nn.Module]]) -> dict[int, tuple[int, ...]]:
    """Full shapes of the parameters that FSDP1 keeps in parts, as flat ones and empty ones, by their ids."""
    full: dict[int, tuple[int, ...]] = {}
    for _, module in named:
        flat = getattr(module.__dict__.get("_handle"), "flat_param", None)
        parameters = getattr(flat, "_params", None)  # None without use_orig_params
        for p, shape in zip(parameters or (), getattr(flat, "_shapes", ()), strict=False):
            full[id(p)] = tuple(shape)
    return full


# ---- experts --------------------------------------------------------------------------------------------------------


def _share_of_tokens(
    fqn: str, module: nn.Module, num_dims: int, modules: Mapping[str, list[nn.Module]], num_first: int = 0
) -> tuple[float, bool]:
    """Share of the tokens that one weight of routed experts sees, and whether that is only an upper bound."""
    parts = fqn.split(".") if fqn else []
    if not any("expert" in part.lower() for part in (*parts, type(module).__name__)) or "shared" in fqn:
        return 1.0, False
    above = [m for n in range(len(parts), -1, -1) for m in modules.get(".".join(parts[:n]), ())]
    numbered = _NUMBERED_EXPERT.search(fqn)
    if numbered:
        containers = modules.get(fqn[: numbered.end(1)], ())
        num_experts: int | None = max((sum(1 for _ in m.children()) for m in containers), default=0)
    elif num_dims >= 3:
        num_experts = num_first
    else:
        num_experts = _said(above, _NUM_EXPERTS)
        if not num_experts:
            return 1.0, False
    top_k = _said(above, _TOP_K)
    if not top_k or not num_experts:
        return 1.0, True
    return min(1.0, top_k / num_experts), False


def _said(above: Iterable[nn.Module], names: Sequence[str]) -> int | None:
    """Value under one of these names in the module, its ancestors, or their configurations."""
    for module in above:
        config = getattr(module, "config", None)
        for source in (module, config, getattr(config, "text_config", None)):
            for name in names:
                value = getattr(source, name, None)
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    return value
    return None
