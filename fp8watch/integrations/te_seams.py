"""Functions of Transformer Engine's modules that are replaced while an observer runs. Several observers replace the same
ones, one around the other, and end in any order.

Thread:     training, and autograd's
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

Show = Callable[[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Any]
"""(function, its arguments) -> what it returned: calls the function and looks on."""


class Seam:
    """Stands for a function, and shows each call as long as there is somebody to show it to."""

    def __init__(self, original: Callable[..., Any], show: Show) -> None:
        self.original = original
        self.show: Show | None = show

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        show = self.show
        return self.original(*args, **kwargs) if show is None else show(self.original, args, kwargs)


class Seams:
    """What one observer has replaced."""

    def __init__(self) -> None:
        self._seams: list[tuple[ModuleType, str, Seam]] = []

    def __bool__(self) -> bool:
        return bool(self._seams)

    def replace(self, module: ModuleType, name: str, show: Show) -> None:
        """Show each call of this function of the module, if there is one."""
        if (original := getattr(module, name, None)) is not None:
            self._seams.append((module, name, Seam(original, show)))
            setattr(module, name, self._seams[-1][2])

    def put_back(self) -> None:
        """Show nothing any more. A seam around which somebody else's wrapper lies stays, and calls on."""
        while self._seams:
            module, name, seam = self._seams.pop()
            seam.show = None
            last, current = None, getattr(module, name, None)
            while isinstance(current, Seam):
                if current.show is not None:
                    last = current
                elif last is None:
                    setattr(module, name, current.original)
                else:
                    last.original = current.original
                current = current.original
