"""A forward that was put on a module and calls that of its class, which it took as a bound method: the call is found.

Thread:     training, where modules are taken over and released

torchtitan puts such a function on every module that it parallelizes. The class's forward is then no longer looked up where
the module is called, so a class that is swapped in would never run. What the function's closure holds is pointed at the
forward of the class that the module has; arguments and results pass through the function as before.
"""

from __future__ import annotations

from types import CellType, FunctionType, MethodType

from torch import nn

MAX_DEPTH = 4
"""Functions around functions that are looked through."""


def replaces_forward(module: nn.Module) -> bool:
    """Whether a forward on the module itself stands in for that of its class, or calls it in a way that is not known."""
    return "forward" in module.__dict__ and _cell(module) is None


def lead_to_class(module: nn.Module) -> None:
    """Let a forward that was put on the module call that of the class which it has now; nothing where there is none."""
    if "forward" in module.__dict__ and (cell := _cell(module)) is not None:
        cell.cell_contents = MethodType(type(module).forward, module)


def _cell(module: nn.Module) -> CellType | None:
    """Where a closure of the module's own forward keeps the forward of its class, bound to this module."""
    functions: list[object] = [module.__dict__["forward"]]
    known = {vars(cls)["forward"] for cls in type(module).__mro__ if "forward" in vars(cls)}
    for _ in range(MAX_DEPTH):
        cells = [c for f in functions if isinstance(f, FunctionType) for c in f.__closure__ or ()]
        functions = []
        for cell in cells:
            try:
                held = cell.cell_contents
            except ValueError:  # empty
                continue
            if isinstance(held, MethodType) and held.__self__ is module and held.__func__ in known:
                return cell
            functions.append(held)
    return None
