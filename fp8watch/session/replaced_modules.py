"""Linears that were replaced or added after attach, as torchao's and accelerate's conversions do, and models that grow: observed again
where that can be, said where not.

Thread:     training, in the first steps and then every CHECK_EVERY steps

A conversion puts a new module under the old name. The old one has the site and is never called again. What took its
place goes on its site where it is a Linear that computes in FP8 by a forward of its own; the rest is named as left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from fp8watch.layers.computed_weight import held_weight, is_computed
from fp8watch.layers.fp8_linear import GEMMS_KEY, SITE_KEY
from fp8watch.selection.flop_coverage import coverage
from fp8watch.selection.module_filter import LeftOut
from fp8watch.selection.own_forward import foreign_linears, own_class
from fp8watch.selection.wrappers import named_modules
from fp8watch.session.attachment import Attachment, Session
from fp8watch.session.site_placement import put_on_site, turns_of

FIRST_CHECKS = 2
CHECK_EVERY = 64
"""Steps: it is looked after each of the first ones, and then after so many."""
MEASURED = ("gemm_flops_observed", "not_counted")
"""Facts that `SiteRegistration` says of what is covered now, for only running shows what is silent of it."""


@dataclass
class ReplacedModules:
    """Looks after the Linears of one attach."""

    attachment: Attachment
    session: Session
    _told: set[int] = field(default_factory=set)  # first rows that were said to be gone
    _names: set[str] = field(default_factory=set)  # of the Linears that were met

    def __post_init__(self) -> None:
        if self.attachment.plan is not None:  # what is there at attach; adapters may be put on before the first step
            self._names = _unwatched(named_modules(self.attachment.model))

    def look(self) -> None:
        """Look at what is in the model now; say what is not what it was, once."""
        model, plan = self.attachment.model, self.attachment.plan
        if plan is None or plan.slab is None or not plan.sites.quantizers:
            return
        sites = (m.__dict__.get(SITE_KEY) for m in model.modules())
        there = {int(s) & 0xFFFFFFFF for s in sites if s is not None and int(s) >> 32 == plan.handle}
        each, table = len(plan.sites.rows), self.attachment.table
        linears = [row for row in range(0, len(plan.sites.quantizers), each) if not table[row].is_own]
        gone = [row for row in linears if row not in there and row not in self._told]
        named = list(named_modules(model))
        added = self._added(named, {table[row].fqn for row in gone})
        if not gone and not added:
            return
        self._told.update(gone)
        by_name = {fqn: module for fqn, module in named if SITE_KEY not in module.__dict__}
        in_fp8 = foreign_linears(model)
        again: Counter[str] = Counter()
        left: list[LeftOut] = []
        for row in gone:
            fqn = table[row].fqn
            module = by_name.get(fqn)
            if isinstance(module, nn.Linear) and id(module) in in_fp8 and _can_go_on(module, plan.slab.device):
                put_on_site(plan, row, module, in_fp8)
                plan.modules.add(module)
                again[_kind(module)] += 1
            else:
                left.append(
                    LeftOut(fqn, f"replaced after attach by {_kind(module)}" if module else "removed after attach")
                )
        plan.canary.cover(turns_of(plan, len(linears), self.attachment.te, [*self.attachment.own.values()]), each)
        self._tell(named, again, left, added)

    def _added(self, named: list[tuple[str, nn.Module]], gone: set[str]) -> list[str]:
        """Names under which there was no Linear before; what took the place of one, and is said to, is none."""
        linears = _unwatched(named)
        new, inside = linears - self._names - gone, tuple(f"{fqn}." for fqn in gone)
        self._names |= linears
        return [fqn for fqn, _ in named if fqn in new and not fqn.startswith(inside)]

    def _tell(
        self, named: list[tuple[str, nn.Module]], again: Counter[str], left: list[LeftOut], added: list[str]
    ) -> None:
        say, recorder = self.session.say, self.attachment.recorder
        for kind, num in again.items():
            say(
                f"{num} Linear{'s were' if num != 1 else ' was'} replaced by {kind} after attach: observed as "
                f"{'they are' if num != 1 else 'it is'} from now on; call attach after converting, so that their recipe is read"
            )
        if left:
            names = ", ".join(f"{m.fqn} ({m.reason})" for m in left[:4])
            more = f" and {len(left) - 4} more" if len(left) > 4 else ""
            say(f"no longer observed: {names}{more}; call attach after converting")
        if added:
            num = len(added)
            say(
                f"{num} Linear{'s were' if num != 1 else ' was'} added after attach and {'are' if num != 1 else 'is'} not observed, in the precision "
                f"of the model: {', '.join(added[:4])}{f' and {num - 4} more' if num > 4 else ''}; watch.detach() and attach again take them in"
            )
        if recorder is None:
            return
        seen = [m for _, m in named if SITE_KEY in m.__dict__ and GEMMS_KEY not in m.__dict__]
        te = self.attachment.te
        seen += [m.module for m in te.modules] if te is not None else []
        self.attachment.cover(coverage(named, seen, self.attachment.own_modules, self.attachment.heads))
        covered = self.attachment.coverage.facts()
        facts = {name: value for name, value in covered.items() if name not in MEASURED}
        facts["replaced"] = "; ".join(
            [
                *(f"{num} by {kind}, observed" for kind, num in again.items()),
                *(f"{m.fqn} ({m.reason})" for m in left),
                *(f"{fqn} (added after attach, not observed)" for fqn in added),
            ]
        )[:2000]
        recorder.update_facts(facts)


def _unwatched(named: Iterable[tuple[str, nn.Module]]) -> set[str]:
    return {fqn for fqn, m in named if isinstance(m, nn.Linear) and SITE_KEY not in m.__dict__}


def _can_go_on(module: nn.Linear, device: torch.device) -> bool:
    """Whether a Linear with a forward of its own can be observed by rows that are on a device."""
    return not is_computed(module) and held_weight(module).device == device


def _kind(module: nn.Module | None) -> str:
    cls = own_class(module) if module is not None else type(None)
    return f"{cls.__module__.split('.')[0]} {cls.__name__}"
