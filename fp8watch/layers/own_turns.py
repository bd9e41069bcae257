"""What is looked at of one module that multiplies with parameters of its own, and whether that has its turn now.

Shapes:     none, but what a forward returned, of which the gradient is waited for
Thread:     training
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from fp8watch.layers.custom_ops import plan_of
from fp8watch.layers.local_part import local_part
from fp8watch.layers.observe_linear import note_rest
from fp8watch.layers.parameter_trail import ParameterUse
from fp8watch.observer.pass_counter import first_tensor

FIRST_STEPS, HEADS_EVERY = 16, 8
"""Heads that are no Linears are looked at in each of the first steps, then in one of so many: the mode sees all that the
whole forward calls, for the sake of one product in it."""
FORWARDS_IN_VAIN = 4
"""Forwards in which a head must have been seen, or it is looked for no longer."""


class HeadSite(NamedTuple):
    """A head that is no Linear."""

    fqn: str
    given: Tensor | None  # site of its input, where that is looked at
    site: Tensor | None  # of its output


@dataclass(eq=False)
class OwnGemms:
    """The parameters of one module whose products are looked at.

    Args:
        sites: path of a parameter from the module, such as "down_proj" -> its site.
        heads: path of an embedding's weight -> the head that it is: input and output of products with it are looked at.
        computes: paths of parameters of experts whose products are computed in FP8.
    """

    sites: Mapping[str, Tensor]
    heads: Mapping[str, HeadSite] = field(default_factory=dict)
    computes: frozenset[str] = frozenset()
    called: bool = False  # in eager code, in training
    seen: set[str] = field(default_factory=set)  # parameters of which a product was recognised
    use: ParameterUse = field(default_factory=ParameterUse)  # of all of them
    forward_only: set[str] = field(default_factory=set)  # of those seen: multiplied where autograd does not look
    kept_high: dict[str, str] = field(default_factory=dict)  # of those that compute in FP8: what did not, and why
    _tries: int = FORWARDS_IN_VAIN
    _numbers: tuple[int, ...] = ()  # of the sites

    def __post_init__(self) -> None:
        self._numbers = tuple(int(site) for site in self.sites.values())

    @property
    def any_site(self) -> Tensor:
        """One of them."""
        return next(
            iter((*self.sites.values(), *(s for h in self.heads.values() for s in (h.given, h.site) if s is not None)))
        )

    def rests(self) -> bool:
        """Whether nothing of this forward is looked at: no product has its turn, and there is none that was never seen."""
        if self.heads or self.computes or self.forward_only or len(self.seen) < len(self.sites):
            return False
        plan = plan_of(self._numbers[0])
        return plan is None or all(plan.resting[number & 0xFFFFFFFF] for number in self._numbers)

    def note_rest(self, output: Any) -> None:
        """Note that a forward ran which was not looked at, by what it returned; never raises."""
        plan = plan_of(self._numbers[0])
        if plan is None:
            return
        try:
            found = output if isinstance(output, Tensor) else first_tensor(output, with_gradient=True)
            if found is not None and not (found.requires_grad and found.is_leaf):  # on a leaf a hook would stay
                note_rest(plan, self._numbers[0], found, local_part(found))
        except Exception as error:  # noqa: BLE001 - training goes on, and the guard counts
            plan.guard.swallow("own gemm", error)

    def due(self) -> bool:
        """Whether this forward is looked into; of products with own parameters each one is that does not rest."""
        if self.sites:
            return True
        if not self.seen:
            self._tries -= 1
        plan = plan_of(self.any_site)
        if plan is None or self._tries < 0:
            return False
        return plan.step.num_begun <= FIRST_STEPS or plan.step.num_begun % HEADS_EVERY == 0
