"""A cell that is run again: the watch that it made before hands over to the new one.

Thread:     training, once
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from torch import nn

from fp8watch.session import step_boundary
from fp8watch.session.identity import Identity

if TYPE_CHECKING:
    from fp8watch.session.watch import Watch


def interactive() -> bool:
    """Whether somebody sits at a prompt: Python's own, IPython's or a notebook's. A script that attaches twice keeps its first."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def before(model: nn.Module) -> Watch | None:
    """The watch of this very model, where one is alive at a prompt; it is detached now."""
    found = cast("Watch | None", step_boundary.watch_of(model) if interactive() else None)
    if found is not None:
        found.detach()
    return found


def goes_on(old: Watch | None, identity: Identity, start_step: int) -> tuple[Identity, int]:
    """Run and first step of the new watch: those of the old one, where nothing else names them."""
    if old is None:
        return identity, start_step
    if identity.source == "local":
        identity = replace(identity, run_id=old.identity.run_id)
    return identity, start_step or int(old.state_dict()["step"])
