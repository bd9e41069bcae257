"""What to change for a finding, most likely first, as its mode says it.

Shapes:     (mode, operand, place) -> fixes
Thread:     any; pure functions
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fp8watch_server.detect.modes import MODE_BY_SLUG
from fp8watch_server.detect.remedies import OPERANDS, Fix, Place

__all__ = ["Fix", "fixes"]


def fixes(
    mode: str,
    *,
    module: str | None = None,
    operand: str | None = None,
    operands: tuple[str, ...] = (),
    eps: float = 0.0,
    power_2_scale: bool = True,
    batch_id: str | None = None,
    lr: float | None = None,
    usual_lr: float | None = None,
    extra: Mapping[str, Any] = MappingProxyType({}),
    backend: str = "",
    verdict: str = "unknown",
    recipe: str = "",
    format: str = "",
) -> list[Fix]:
    """What to change, most likely first, with the exact variable or flag for the operand that is hit.

    Args:
        mode: slug.
        module, operand: the named place.
        operands: roles that are hit.
        eps, power_2_scale: of the named site.
        batch_id: name of the batch, where the user gave one.
        lr, usual_lr: of the step, and before.
        extra: what else the finding knows.
        backend: what quantises at the named site: the switch is that of its framework.
        verdict: of the finding.
        recipe, format: of the named site; "" where there is none.
    """
    if mode not in MODE_BY_SLUG:
        return []
    hit = tuple(o for o in OPERANDS if o == operand or o in operands) or OPERANDS
    place = Place(
        name=module,
        operand=operand or "input",
        operands=hit,
        eps=eps,
        power_2_scale=power_2_scale,
        backend=backend,
        verdict=verdict,
        batch_id=batch_id,
        lr=lr,
        usual_lr=usual_lr,
        extra=extra,
        site_recipe=recipe,
        format=format,
    )
    return MODE_BY_SLUG[mode].fixes(place)
