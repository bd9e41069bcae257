"""The session of one attach: rank, mesh, versions, effective configuration, and the agent that sends it.

Thread:     training, once
"""

from __future__ import annotations

import os
import platform
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from fp8watch.recipe import Recipe
from fp8watch.selection.module_filter import LeftOut
from fp8watch.session.identity import Identity
from fp8watch.session.mesh import mesh_coordinates
from fp8watch_agent.fact_lists import joined
from fp8watch_agent.guard import Guard
from fp8watch_agent.recorder import Recorder
from fp8watch_agent.session import Session
from fp8watch_agent.settings import AgentSettings
from fp8watch_agent.version import __version__


def start_recorder(
    guard: Guard,
    settings: AgentSettings,
    identity: Identity,
    session: str,
    run: str | None,
    recipe: Recipe,
    backend: str,
    left_out: list[LeftOut],
    num_linears: int,
    model: nn.Module,
    more: Mapping[str, str | float],
    tags: list[str],
) -> Recorder:
    """Start the agent of this process, and tell it who it is."""

    script = Path(getattr(sys.modules.get("__main__"), "__file__", None) or "interactive").stem
    facts = recipe.session_facts()
    facts["num_linears"] = num_linears
    facts.update(more)
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    if restarts.isascii() and restarts.isdigit():
        facts["restart_count"] = int(restarts)  # of the launcher: the same on all ranks
    facts["left_out"] = joined(f"{m.fqn or 'the model'} ({m.reason})" for m in left_out)
    versions = {"fp8watch": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
    return Recorder(
        settings,
        Session(
            run_id=identity.run_id,
            run_name=run or f"{script}-{identity.run_id}",
            session=session,
            rank=identity.rank,
            world_size=identity.world_size,
            mesh=guard.call("mesh", lambda: mesh_coordinates(model), {}),
            host=socket.gethostname(),
            pid=os.getpid(),
            started_at=time.time(),
            versions=versions,
            recipe=recipe.name,
            fingerprint=recipe.fingerprint(),
            backend=backend,
            facts=facts,
            key=secrets.token_hex(16),
            tags=tags,
        ),
        guard,
    )
