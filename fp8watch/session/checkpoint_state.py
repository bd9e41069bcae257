"""What a checkpoint remembers of the numerics, and what the session that resumes from it says.

Upstream:   fp8watch.session.watch     Downstream: fp8watch_agent.session
Thread:     training, between steps

The collector compares the facts of a session with those of the checkpoint that it loaded: a run that goes on with other
FP8 flags, another eps or another format than it was saved with explodes hours later, and nobody connects the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8watch.recipe import Recipe

Fact = str | int | float | bool


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
