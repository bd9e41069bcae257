"""Delayed scales and amax histories of a watched model by name, for checkpoints.

Upstream:   fp8watch.session.watch     Downstream: fp8watch.layers.custom_ops, fp8watch.quantize.site_quantizer
Thread:     training, between steps
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fp8watch.quantize.site_quantizer import DelayedQuantizer

if TYPE_CHECKING:
    from fp8watch.observer.plan import Plan
    from fp8watch.quantize.per_tensor import DelayedScale
    from fp8watch.session.sites import SiteTable

KEY = "amax_histories"
"""Where `Watch.state_dict` keeps them: "module.operand" -> scale, amax_history."""


def _states(plan: Plan | None, table: Sequence[SiteTable]) -> dict[str, DelayedScale]:
    if plan is None:
        return {}
    pairs = zip(table, plan.quantizers, strict=False)  # behind them come sites that others quantise
    return {f"{s.fqn}.{s.operand}": q.state for s, q in pairs if isinstance(q, DelayedQuantizer)}


def scale_state(plan: Plan | None, table: Sequence[SiteTable]) -> dict[str, Any]:
    """{KEY: …} with copies of all states, passes that are over rolled in; empty where no recipe is delayed."""
    if plan is None or not (states := _states(plan, table)):
        return {}
    plan.settle()
    return {KEY: {name: state.state_dict() for name, state in states.items()}}


def load_scale_state(plan: Plan | None, table: Sequence[SiteTable], state: Mapping[str, Any]) -> None:
    """Take over what `scale_state` gave, all or nothing. Sites that it does not name keep what they have.

    Raises:
        ValueError: a site that is not there, or a history of another length.
    """
    given, states = state.get(KEY, {}), _states(plan, table)
    unknown = sorted(set(given) - set(states))
    if unknown:
        known = f"known are {', '.join(sorted(states)[:6])} …" if states else "no site of this recipe has one"
        raise ValueError(f"amax history of {unknown[0]!r}: no such site; {known}")
    if plan is not None:
        plan.settle()
    before = {name: states[name].state_dict() for name in given}
    for name in given:
        try:
            states[name].load_state_dict(given[name])
        except ValueError as e:
            for other, old in before.items():
                states[other].load_state_dict(old)
            raise ValueError(f"amax history of {name!r}: {e}") from None
