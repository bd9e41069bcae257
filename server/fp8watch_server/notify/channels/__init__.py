"""The channels that messages go out on, by kind. Each module of this folder registers one; nothing lists them.

Shapes:     settings or a table of a routes file -> Channel
Thread:     start of the process
"""

from __future__ import annotations

import importlib
import pkgutil

from fp8watch_server.notify.channels.base import REGISTERED, Channel, Kind
from fp8watch_server.settings import Settings

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)

KINDS: dict[str, Kind] = {k.name: k for k in sorted(REGISTERED, key=lambda k: (not k.settings, k.name))}
"""By the name that a routes file gives; those that the environment can configure come first."""


def channels_of(settings: Settings) -> list[Channel]:
    """The channels that the environment of a collector names; none is fine."""
    found = []
    for kind in KINDS.values():
        given = {name: getattr(settings, setting) for name, setting in kind.settings.items()}
        if given.get("url"):
            found.append(kind.make(**given))
    return found
