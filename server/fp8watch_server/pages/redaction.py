"""Names of a run, its modules, hosts, people and logged scalars replaced by others, for a report that goes elsewhere.

Shapes:     what a report shows (dicts, lists, text) -> the same with other names
Thread:     any; pure functions

Numbers of layers stay: `layers.17.mlp.down_proj` becomes `n1.17.n2.n3`. What people wrote and facts that may hold any
text are left out, not rewritten: see `report_sections`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

KEPT = frozenset({"input", "weight", "grad_output", "output", "fprop", "dgrad", "wgrad"})
_TOKEN = re.compile(r"\w+(?:[.\-/]\w+)*")


class Redaction:
    """Replaces names in text. One that is made of nothing leaves all as it is."""

    def __init__(self, modules: Iterable[str] = (), names: Mapping[str, str] | None = None) -> None:
        """`modules` are fully qualified names; `names` are others, with what stands for them."""
        self._modules = {m for m in modules if m}
        parts = dict.fromkeys(p for m in sorted(self._modules) for p in m.split(".") if not p.isdigit())
        self._parts = {part: f"n{i}" for i, part in enumerate(parts, 1)}
        self._first = {m.split(".")[0] for m in self._modules}
        given = {k: v for k, v in (names or {}).items() if k}
        order = sorted(given, key=len, reverse=True)
        self._given = given
        self._pattern = re.compile("|".join(rf"(?<!\w){re.escape(k)}(?!\w)" for k in order)) if order else None

    def __call__(self, value: Any) -> Any:
        """The same value with other names, however deep they lie."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Mapping):
            return {k: self(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self(v) for v in value)
        return value

    def _text(self, text: str) -> str:
        if self._pattern is not None:
            text = self._pattern.sub(lambda m: self._given[m[0]], text)
        return _TOKEN.sub(self._token, text) if self._modules else text

    def _token(self, found: re.Match[str]) -> str:
        token = found[0]
        parts = token.split(".")
        if token in KEPT:
            return token
        if token not in self._modules and (parts[0] not in self._first if len(parts) > 1 else not self._is_name(token)):
            return token
        return ".".join(p if p.isdigit() or p in KEPT else self._parts.get(p, "n0") for p in parts)

    def _is_name(self, word: str) -> bool:
        """Whether a word alone is a part of a module's name: one that is no plain word, such as down_proj."""
        return word in self._parts and not (word.isalpha() and word.islower())
