"""The class of a Linear, swapped in place for a subclass of it.

Thread:     training, where Linears are taken over

Python lets an object change its class where both lay their objects out alike. A subclass whose first base is ours does for
nearly all Linears; for one that mixes in a class without a dict, such as an `abc.ABC`, its own class must be the first.
"""

from __future__ import annotations

import contextlib

from torch import nn

_classes: dict[tuple[type[nn.Linear], type[nn.Linear]], type[nn.Linear]] = {}


def swap(module: nn.Linear, mixin: type[nn.Linear]) -> None:
    """Put a mixin over the class of a Linear. One class is made of the two.

    Raises:
        TypeError: its class lets itself be neither subclassed so nor swapped.
    """
    plain = type(module)
    if (known := _classes.get((plain, mixin))) is not None:
        module.__class__ = known
        return
    namespace = {"_fp8watch_base": plain, "__module__": plain.__module__, "__qualname__": plain.__qualname__}
    own = {"forward": mixin.forward, "__reduce_ex__": mixin.__reduce_ex__}
    with contextlib.suppress(TypeError):
        made = type(plain.__name__, (mixin, plain) if plain is not nn.Linear else (mixin,), namespace)
        module.__class__ = made
        _classes[plain, mixin] = made
        return
    made = type(plain.__name__, (plain, mixin), namespace | own)
    module.__class__ = made
    _classes[plain, mixin] = made


def can_swap(module: nn.Linear, mixin: type[nn.Linear]) -> bool:
    """Whether `swap` can be done; the module is left as it was."""
    plain = type(module)
    try:
        swap(module, mixin)
        module.__class__ = plain
    except TypeError:
        return False
    return True
