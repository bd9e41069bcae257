"""What a checkpoint keeps of the numerics: the recipe with its facts, delayed scales and amax histories by name.

Thread:     training, between steps

The collector compares the facts of a session with those of the checkpoint that it loaded: a run that goes on with other
FP8 flags, another eps or another format than it was saved with explodes hours later, and nobody connects the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fp8watch.observer.observation_plan import ObservationPlan
from fp8watch.quantize.per_tensor import DelayedScale
from fp8watch.quantize.site_quantizer import DelayedQuantizer
from fp8watch.recipe import Recipe
from fp8watch.session.sites import SlabSite

Fact = str | int | float | bool
KEY = "amax_histories"
"""Where `Watch.state_dict` keeps delayed scales: "module.operand" -> scale, amax_history."""


def resume_state(recipe: Recipe) -> dict[str, Any]:
    """For `Watch.state_dict`: the recipe's fingerprint and its facts."""
    return {"fingerprint": recipe.fingerprint(), "facts": recipe.facts()}


def resume_facts(state: Mapping[str, Any]) -> dict[str, Fact]:
    """Facts of a session that has loaded such a state. States of older versions have none."""
    out: dict[str, Fact] = {}
    fingerprint, facts = state.get("fingerprint"), state.get("facts")
    if isinstance(fingerprint, str):
        out["checkpoint_fingerprint"] = fingerprint
    if isinstance(facts, Mapping):
        out.update({f"checkpoint.{k}": v for k, v in facts.items() if isinstance(v, str | int | float | bool)})
    out.update(
        {f"checkpoint.{k}": v for k in ("run_id", "session", "step") if isinstance(v := state.get(k), str | int)}
    )
    return out


def _states(plan: ObservationPlan | None, table: Sequence[SlabSite]) -> dict[str, DelayedScale]:
    if plan is None:
        return {}
    pairs = zip(table, plan.sites.quantizers, strict=False)  # behind them come sites that others quantise
    return {f"{s.fqn}.{s.operand}": q.state for s, q in pairs if isinstance(q, DelayedQuantizer)}


def scale_state(plan: ObservationPlan | None, table: Sequence[SlabSite]) -> dict[str, Any]:
    """{KEY: …} with copies of all states, passes that are over rolled in; empty where no recipe is delayed."""
    if plan is None or not (states := _states(plan, table)):
        return {}
    plan.close_passes()
    return {KEY: {name: state.state_dict() for name, state in states.items()}}


def load_scale_state(plan: ObservationPlan | None, table: Sequence[SlabSite], state: Mapping[str, Any]) -> None:
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
        plan.close_passes()
    before = {name: states[name].state_dict() for name in given}
    for name in given:
        try:
            states[name].load_state_dict(given[name])
        except ValueError as e:
            for other, old in before.items():
                states[other].load_state_dict(old)
            raise ValueError(f"amax history of {name!r}: {e}") from None
