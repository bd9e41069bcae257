"""Report of Transformer Engine operands that entered a GEMM and could not be read.

Thread:     training, and autograd's

An observed module without statistics looks healthy. So each unreadable operand is noted with its class and the reason,
and at the end of a sampled step the total is printed on stderr and stored as a session fact.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

FACT = "te_unread"
Tell = Callable[[str | None, Mapping[str, str]], None]
"""(line for people, or None; facts of the session)."""


class Unread:
    """Unreadable operands of one model, by tensor class and reason."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], set[int]] = {}
        self._said: set[tuple[str, str]] = set()
        self._fact = ""

    def note(self, what: object, reason: str, row: int) -> None:
        """Note an operand that entered a GEMM. `what`: the tensor, or the name of a stand-in."""
        name = what if isinstance(what, str) else type(what).__name__.replace("Parameter", "Tensor")
        self._rows.setdefault((name, reason), set()).add(row)

    def reasons(self) -> dict[int, str]:
        """Row -> what it was and why it could not be read."""
        return {row: f"{name}: {reason}" for (name, reason), rows in self._rows.items() for row in rows}

    def report(self, read: Collection[int], names: Mapping[int, str], version: str, tell: Tell) -> None:
        """Report what is new since the last call.

        Args:
            read: rows whose operands were read at least once: what failed for them only is not reported.
            names: row -> module and GEMM, of all rows.
            version: of Transformer Engine.
            tell: takes the line and the fact.
        """
        if not self._rows and not self._fact:
            return
        left = {key: rows - set(read) for key, rows in self._rows.items()}
        left = {key: rows for key, rows in left.items() if rows}
        line = _line(left, set(read), names, version) if left else ""
        if line == self._fact:
            return
        self._fact = line
        new = not self._said.issuperset(left)
        self._said.update(left)
        tell(line if new else None, {FACT: line[:1000]})


def _line(left: Mapping[tuple[str, str], set[int]], read: set[int], names: Mapping[int, str], version: str) -> str:
    num = len(set[int]().union(*left.values()))
    kinds = ", ".join(f"{len(rows)} of {name} ({reason})" for (name, reason), rows in sorted(left.items()))
    seen = {names[row] for row in read if row in names}
    blind = list(dict.fromkeys(name for row, name in names.items() if name not in seen))
    more = f" and {len(blind) - 6} more" if len(blind) > 6 else ""
    where = f"; not observed: {', '.join(blind[:6])}{more}" if blind else ""
    return f"Transformer Engine {version}: {num} of {len(names)} GEMM operands cannot be read: {kinds}{where}"


def silent(*_: Any) -> None:
    """Ignores the report."""
