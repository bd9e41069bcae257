"""What attach refuses: each value with the rule that it breaks and the remedy.

Thread:     training, once
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated
from urllib.parse import urlsplit

from msgspec import Meta

from fp8watch_agent.checks import Rule, argument

EVERY = Annotated[int, Meta(ge=1), Rule("must be a whole number of steps, 1 or more")]
START_STEP = Annotated[int, Meta(ge=0), Rule("must be a whole number, 0 or more")]
RUN_NAME = Annotated[str, Meta(min_length=1, max_length=512), Rule("must be a name of 1 to 512 characters")]


def check_arguments(
    every: int, tile_maps: str, budget: float | None, start_step: int, run: str | None
) -> tuple[str, int]:
    argument("every", every, EVERY)
    argument("start_step", start_step, START_STEP)
    if budget is not None and not 0 <= budget <= 1:
        raise ValueError(f"overhead_budget={budget!r}: must be a share of the step from 0 to 1, or None")
    if run is not None:
        argument("run", run, RUN_NAME)
    if tile_maps in ("triggered", "all"):
        return tile_maps, 0
    got = re.fullmatch(r"every:([1-9]\d{0,8})", tile_maps) if isinstance(tile_maps, str) else None
    if got is None:
        raise ValueError(f"tile_maps={tile_maps!r}: must be 'triggered', 'all' or 'every:N' with N ≥ 1")
    return "every", int(got[1])


def check_tags(tags: object) -> list[str]:
    if isinstance(tags, str) or not isinstance(tags, Iterable):
        raise TypeError(f"tags={tags!r}: must be a sequence of texts, such as tags=['ablation']")
    out = list(tags)
    wrong = [t for t in out if not isinstance(t, str) or not 0 < len(t.strip()) <= 100 or not t.isprintable()]
    if wrong or len(out) > 50:
        raise ValueError(f"tags={tags!r}: must be at most 50 texts of 1 to 100 printable characters each")
    return [t.strip() for t in out]


def check_url(url: str) -> str:
    parts = urlsplit(url) if isinstance(url, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"collector={url!r}: must be a URL such as http://127.0.0.1:8420")
    return url
