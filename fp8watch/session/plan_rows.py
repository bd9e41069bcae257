"""The rows of one attach: which site each row of the slab is, what measures it, and where probes look.

Shapes:     modules -> rows, in the order Linears, own parameters, Transformer Engine, probes
Thread:     training, once
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fp8watch.integrations.te_modules import TeModule
from fp8watch.kernels.backend import Backend
from fp8watch.layers.attention_calls import look_at_attention
from fp8watch.layers.computed_weight import held_weight
from fp8watch.layers.custom_ops import site_tensor
from fp8watch.layers.module_hooks import GivenHook, ProbeHook
from fp8watch.layers.own_class import look_at
from fp8watch.layers.own_turns import HeadSite, OwnGemms
from fp8watch.observer.expert_rows import ExpertRows
from fp8watch.observer.observation_plan import ObservationPlan
from fp8watch.observer.probes import Probe, is_attention, shows_logits
from fp8watch.observer.site_rows import SiteRows, rows_of
from fp8watch.observer.step_state import StepState
from fp8watch.quantize.per_tensor import DelayedScale
from fp8watch.quantize.site_quantizer import DelayedQuantizer, SiteQuantizer, places, site_quantizer
from fp8watch.recipe import Recipe
from fp8watch.selection.own_parameters import LEARNED_ARRAYS, OwnModule
from fp8watch.selection.tied_heads import TiedHead
from fp8watch.session.sites import INPUT, OUTPUT, SlabSite
from fp8watch.sketch.slab import Slab
from fp8watch_agent.experts import EXPERTS_FACT, encode_experts
from fp8watch_agent.guard import Guard
from fp8watch_agent.record import PROBE, site_id

states_of_module: weakref.WeakKeyDictionary[nn.Module, dict[str, DelayedScale]] = weakref.WeakKeyDictionary()
"""Delayed scales of a module, operand by operand: a later attach with the same recipe goes on with them."""


@dataclass
class Watched:
    """The modules of a model whose GEMMs are observed."""

    linears: list[tuple[str, nn.Linear]]
    own: list[OwnModule] = field(default_factory=list)
    computing: frozenset[str] = frozenset()  # of these, names of parameters of experts that compute in FP8
    te: list[TeModule] = field(default_factory=list)
    heads: Sequence[TiedHead] = ()  # those that are looked at
    probed: Sequence[Probe] = ()

    def operands(self) -> Iterator[tuple[str, nn.Module, str, Tensor, int, int]]:
        """Of each GEMM whose operands we measure: name, module, what tells it from the others of the module, weight,
        features of its input where they are known, number of experts. In the order of the rows."""
        for fqn, linear in self.linears:
            yield fqn, linear, "", held_weight(linear), linear.in_features, 0
        for own in self.own:
            for p in own.parameters:
                yield p.fqn, own.module, f"{p.path}.", own.tensor(p), 0, p.num_experts

    def given(self) -> list[str]:
        """Names of the GEMMs in high precision whose input is looked at beside their output: heads, Linears, routers. The input
        of a probed module whose operands are measured is one of them."""
        measured = {fqn for fqn, *_ in self.operands()} | {site.fqn for te in self.te for site in te.sites}
        probed = (p.fqn for p in self.probed if p.multiplies and p.fqn not in measured)
        return [*(head.fqn for head in self.heads), *probed]

    def only_computing(self) -> list[OwnModule]:
        """Modules with experts that compute in FP8, and no other parameter of them."""
        kept = [replace(o, parameters=[p for p in o.parameters if p.fqn in self.computing]) for o in self.own]
        return [own for own in kept if own.parameters]

    def device(self, otherwise: torch.device) -> torch.device:
        """Where the operands are."""
        return next((weight.device for _, _, _, weight, *_ in self.operands()), otherwise)

    def expert_facts(self) -> dict[str, str]:
        """Session facts: which sites are those of experts."""
        experts = {fqn: num for fqn, *_, num in self.operands() if num}
        return {EXPERTS_FACT: encode_experts(experts)} if experts else {}


def make_plan(
    watched: Watched, recipe: Recipe, backend: Backend, guard: Guard, *, observe: bool, model: nn.Module | None = None
) -> tuple[ObservationPlan, list[SlabSite]]:
    """The plan of a watch, and what its rows are.

    Args:
        watched: the modules.
        recipe: of the operands.
        backend: that measures them.
        guard: counts what goes wrong.
        observe: False: there is no slab.
        model: whose device is taken where no module is watched.
    """
    table: list[SlabSite] = []
    quantizers: list[SiteQuantizer] = []
    experts: dict[int, int] = {}
    for number, (fqn, module, prefix, weight, width, num_experts) in enumerate(watched.operands()):
        states = states_of_module.setdefault(module, {})
        is_own = number >= len(watched.linears)
        for place in places(recipe):
            operand, direction, gemm = place
            if num_experts:
                experts[len(table)] = num_experts
            identity = site_id(fqn, operand, direction)
            stays = is_own and fqn not in watched.computing
            table.append(SlabSite(fqn, operand, direction, gemm, identity, width, stays, is_own))
            made = site_quantizer(recipe, place, backend, weight.device, states.get(prefix + operand))
            quantizers.append(made)
            if isinstance(made, DelayedQuantizer):
                states[prefix + operand] = made.state
    for site in (site for found in watched.te for site in found.sites):
        identity = site_id(site.fqn, site.operand, site.direction)
        table.append(SlabSite(site.fqn, site.operand, site.direction, site.gemm, identity))
    table += [_probe_site(fqn, INPUT, PROBE) for fqn in watched.given()]
    table += [_probe_site(head.fqn, OUTPUT, "fprop") for head in watched.heads]
    table += [_probe_site(p.fqn, OUTPUT, p.gemm) for p in watched.probed]
    slab = None
    if observe:
        first = next((module for _, module, *_ in watched.operands()), watched.te[0].module if watched.te else model)
        devices = () if first is None else (p.device for p in first.parameters() if p.device.type != "meta")
        slab = guard.run("slab", Slab, max(1, len(table)), next(iter(devices), torch.device("cpu")))
    rows, found = SiteRows(quantizers, rows_of(recipe)), ExpertRows(experts)
    found.vectors.cover(tuple(row for row in experts if table[row].direction == "rowwise"))
    return ObservationPlan(rows, slab, guard, recipe, StepState(guard), experts=found), table


def _probe_site(fqn: str, operand: str, gemm: str) -> SlabSite:
    return SlabSite(fqn, operand, "rowwise", gemm, site_id(fqn, operand, "rowwise"), probed=True)


def _given_rows(table: Sequence[SlabSite], watched: Watched) -> dict[str, int]:
    """GEMMs in high precision -> the row of their input. These come before the outputs of heads and of probes."""
    given = watched.given()
    first = len(table) - len(watched.probed) - len(watched.heads) - len(given)
    return dict(zip(given, range(first, first + len(given)), strict=True))


def look_at_own(plan: ObservationPlan, watched: Watched, table: Sequence[SlabSite]) -> dict[str, tuple[OwnGemms, str]]:
    """Look at products with own parameters, and with weights of embeddings: their names -> what is seen of the module, and
    the parameter's path there."""
    each = len(plan.sites.rows)
    row = len(watched.linears) * each
    seen: dict[str, tuple[OwnGemms, str]] = {}
    heads: dict[int, dict[str, HeadSite]] = {}  # of each module, by path
    looked_at: dict[int, OwnGemms] = {}
    of_heads = len(table) - len(watched.probed) - len(watched.heads)
    given = _given_rows(table, watched)
    for at, head in enumerate(watched.heads, of_heads):
        rows_of_head = (given[head.fqn], at)
        if not plan.sites.unobserved.issuperset(rows_of_head):
            sites_of_head = [None if r in plan.sites.unobserved else site_tensor(plan, r) for r in rows_of_head]
            heads.setdefault(id(head.module), {})[head.path] = HeadSite(head.fqn, *sites_of_head)
    for own in watched.own:
        sites = {p.path: site_tensor(plan, row + i * each) for i, p in enumerate(own.parameters)}
        rows, row = range(row, row + len(sites) * each), row + len(sites) * each
        computes = frozenset(p.path for p in own.parameters if p.fqn in watched.computing)
        if plan.sites.unobserved.issuperset(rows) and not computes:
            continue
        gemms = look_at(own.module, sites, heads.get(id(own.module)), computes)
        plan.modules.add(own.module)
        seen.update((p.fqn, (gemms, p.path)) for p in own.parameters)
        looked_at[id(own.module)] = gemms
    for head in watched.heads:
        paths = heads.get(id(head.module), {})
        if head.path in paths:
            if id(head.module) not in looked_at:
                looked_at[id(head.module)] = look_at(head.module, {}, paths)
                plan.modules.add(head.module)
            seen[head.fqn] = looked_at[id(head.module)], head.path
    return seen


def place_probes(
    plan: ObservationPlan, table: list[SlabSite], watched: Watched, *, fused: bool
) -> list[RemovableHandle]:
    """Hooks on the probed modules, and those that see the logits of attention. Rows of outputs come last in the table."""
    probed, given = watched.probed, _given_rows(table, watched)
    first = len(table) - len(probed)
    handles: list[RemovableHandle] = []
    for row, probe in enumerate(probed, first):
        entry = given.get(probe.fqn)
        if entry is not None and entry not in plan.sites.unobserved:
            handles.append(probe.module.register_forward_hook(GivenHook(site_tensor(plan, entry))))
        if row not in plan.sites.unobserved:
            linear = probe.fqn if isinstance(probe.module, nn.Linear) else None
            handles.append(probe.module.register_forward_hook(ProbeHook(site_tensor(plan, row), linear)))
    attention = [(p.fqn, p.module, row) for row, p in enumerate(probed, first) if is_attention(p.module)]
    attention = [of for of in attention if fused or shows_logits(of[1])]
    return handles + look_at_attention(plan, attention)


def own_words(watched: Watched) -> list[str]:
    """What the line of attach says of parameters that their modules multiply with; of those that are arrays by their name, nothing."""
    parameters = [p for module in watched.own for p in module.parameters if not LEARNED_ARRAYS.search(p.fqn)]
    computing = sum(p.fqn in watched.computing for p in parameters)
    said: list[str] = []
    if computing:
        s = "s" if computing != 1 else ""
        said.append(f"{computing} parameter{s} of experts now comput{'e' if s else 'es'} in FP8")
    rest = [p for p in parameters if p.fqn not in watched.computing]
    if rest:
        experts = sum(1 for p in rest if p.num_experts)
        s, them = ("s", "their modules") if len(rest) != 1 else ("", "its module")
        of = f" ({experts} of experts)" if experts else ""
        said.append(
            f"{len(rest)} parameter{s}{of} observed where {them} multipl{'y' if s else 'ies'} with {'them' if s else 'it'}"
        )
    return said
