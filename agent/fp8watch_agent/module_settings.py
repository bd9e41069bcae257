"""Numbers that modules hold as settings, as a fact of a session: probabilities, eps, scalings, tables of frequencies.

Shapes:     "Dropout.p" -> "0.1", all of them as one text     Thread:     any; data alone
"""

from __future__ import annotations

from collections.abc import Mapping

SETTINGS_FACT = "module_settings"
"""Of a session."""
SETTING = "setting."
"""Begins the name of one of them where two sessions are compared."""
MAX_CHARS = 4000


def encode_settings(settings: Mapping[str, str]) -> str:
    """Name and value of each, in order; what does not fit is left out as a whole."""
    kept: list[str] = []
    length = 0
    for name in sorted(settings):
        text = f"{name}={settings[name]}"
        length += len(text) + 2
        if length > MAX_CHARS or ";" in text or "=" in name:
            continue
        kept.append(text)
    return "; ".join(kept)


def decode_settings(fact: object) -> dict[str, str]:
    """What `encode_settings` was given; nothing of what is no such text."""
    if not isinstance(fact, str):
        return {}
    pairs = (item.partition("=") for item in fact.split("; "))
    return {name: value for name, given, value in pairs if name and given}
