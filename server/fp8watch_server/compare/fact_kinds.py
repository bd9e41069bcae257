"""Which facts of a run somebody chose, and which only follow from them.

Shapes:     name of a fact -> whether it is a consequence
Thread:     any; pure functions

What a run saved, what it counted, and how sites are quantised under another recipe are no settings: nobody changes them, and
nothing was mended by them.
"""

from __future__ import annotations

import re

CONSEQUENCES = frozenset(
    {
        *("fingerprint", "attempt", "restart_count", "checkpoints", "replaced", "not_called", "silent_share"),
        *("loaded_weights", "loaded_codes", "loaded_scales", "loaded_delayed", "no_step_ended", "logits_unseen"),
        "gradients_unseen",
        *("num_linears", "gemm_flops_observed", "not_taken", "not_counted", "roles", "precision.cached for backward"),
        "precision.attention",
    }
)
"""Of what was written, of one load, or counted of the model."""
_OF_RECIPE = re.compile(
    r"(input|weight|grad_output)\.(tile|format|power_2_scale|eps|scaling)|amax_history_len|amax_compute_algo|margin"
    r"|amax_reduction|(tile|format|power_2_scale|eps|recipe) of \d+ of \d+ sites"
)


def is_consequence(fact: str, *, other_recipe: bool) -> bool:
    """Whether a fact that differs follows from others.

    Args:
        fact: its name, as a session or `fact_differences` says it.
        other_recipe: the recipes differ by name, so that all that a recipe sets differs with them.
    """
    if fact in CONSEQUENCES or fact.startswith("checkpoint."):
        return True
    if fact.startswith("recipe of "):
        return True
    return other_recipe and _OF_RECIPE.fullmatch(fact) is not None
