"""A fault that is born in one site, travels through those behind it, back through the gradients, and fades.

It begins at step BORN in the input of layer 1's attention.wq: in that step the rest of fprop is outside too, a step later
the gradients, and LASTS steps later all is as it was. One site has no records around GAP.
"""

from __future__ import annotations

from typing import Any

import httpx
import sqlalchemy as sa
from pages import synthetic

BORN, LASTS, STEPS = 60, 4, 80
MODULE, UNSEEN_MODULE = "layers.1.attention.wq", "layers.0.attention.wk"
GAP = range(40, 44)
ID = "f" * 31 + "1"
OUTLIER = 64.0


def travelling_run(
    client: httpx.Client, engine: sa.Engine, run_id: str = "travel", num_layers: int = 2
) -> synthetic.Run:
    """The run with its incident and the tile maps of the site where it is born."""
    run = synthetic.Run(
        client, run_id, "travelling", sites=synthetic.make_sites(num_layers), session="a" * 32
    ).register()
    born = run.sites.index(run.site(MODULE))
    forward = [i for i, s in enumerate(run.sites) if s.gemm == "fprop" and s.operand == "input" and i >= born]
    back = [i for i, s in enumerate(run.sites) if s.operand == "grad_output" and s.direction == "rowwise"]

    def spoil(steps: Any, rows: Any) -> None:
        by_step = rows.reshape(len(steps), -1)
        for k, step in enumerate(steps["step"].tolist()):
            if BORN <= step < BORN + LASTS:
                by_step["amax_max"][k, forward] *= OUTLIER
            if BORN < step < BORN + LASTS:
                by_step["amax_max"][k, back] *= OUTLIER**2

    for first in range(0, STEPS, 20):
        run.send(
            range(first, first + 20), fault=False, change=spoil,
            keep=lambda step, site: not (step in GAP and site.module == UNSEEN_MODULE),
        )  # fmt: skip
    site = run.sites[born]
    run.send_maps(range(BORN, BORN + 2), [site], fault=False)
    place = {"ranks": [0], "module": MODULE, "gemm": "fprop", "operand": "input", "direction": "rowwise"}
    synthetic.add_incident(
        engine, run_id, ID, mode="outlier-channel", title=f"Outlier in the input of {MODULE}", first_step=BORN,
        last_step=BORN + LASTS - 1, sites=[site.id], place={**place, "tile": None, "element": None},
    )  # fmt: skip
    return run
