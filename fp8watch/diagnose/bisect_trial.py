"""One trial of a bisection, in a process of its own: a training with some operands left out of FP8.

Thread:     training

Run by `fp8watch.diagnose.bisection`, alone or under torchrun: python -m fp8watch.diagnose.bisect_trial REQUEST
"""

from __future__ import annotations

import importlib
import json
import math
import numbers
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fp8watch
from fp8watch.recipe import OPERANDS, resolve_recipe

RAISED = 3
"""Exit status of a trial that raised: under torchrun the other ranks must not wait for it."""
NO_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "ALLOC_FAILED")
"""In the errors of devices, of cuBLAS and of torch's allocators."""


@dataclass
class Trial:
    """What the function that is bisected is given.

    Attributes:
        checkpoint: path that `bisect` was given, for the function to load.
        leave: names that stay in high precision: "module", or "module.operand".
    """

    leave: frozenset[str] = frozenset()
    checkpoint: str | None = None
    recipe: str | None = None
    modules: list[str] = field(default_factory=list)
    """Names of the modules that compute in FP8 where nothing is left out."""

    def attach(self, model: nn.Module, *, recipe: object = None, filter_fn: Any = None, **arguments: Any) -> None:
        """Put the model's Linears on the FP8 path as `fp8watch.attach` does, but for what this trial leaves out.

        Args:
            model: to train.
            recipe, filter_fn: as for attach; `bisect(recipe=...)` wins.
            arguments: others of attach.

        Raises:
            TypeError, ValueError: as attach does.
        """
        chosen = resolve_recipe(self.recipe or recipe)
        parts = {name: ops for name in self.modules if (ops := self._operands(name))}
        asked = set(self.modules) if self.modules else None

        def whole(module: nn.Module, fqn: str) -> bool | None:
            if fqn in self.leave or self._operands(fqn):
                return False
            return filter_fn(module, fqn) if filter_fn is not None else None

        before = _named(fp8watch.attach(model, recipe=chosen, filter_fn=whole, **arguments))
        for left in sorted(set(parts.values())):
            names = {name for name, ops in parts.items() if ops == left}
            if len(left) > 1:
                continue  # each GEMM reads one of the two: all stay in high precision
            out: dict[str, Any] = {left[0]: None}
            filter_in = partial(_is_one_of, frozenset(names))
            fp8watch.attach(model, recipe=replace(chosen, name="", **out), filter_fn=filter_in, **arguments)
        if asked is None:
            self.modules = before

    def _operands(self, name: str) -> tuple[str, ...]:
        return tuple(op for op in OPERANDS if f"{name}.{op}" in self.leave)

    def in_fp8(self, module: object, fqn: str) -> bool:
        """Whether a module computes in FP8 in this trial: as a filter of other libraries, such as torchao's
        `module_filter_fn`. Operands of it are not told apart; the names must be announced, see `announce`."""
        return fqn not in self.leave and not self._operands(fqn)

    def announce(self, modules: Iterable[str]) -> None:
        """Name the modules that compute in FP8 where nothing is left out, for models that `attach` does not convert."""
        self.modules = self.modules or list(modules)


def _is_one_of(names: frozenset[str], _module: nn.Module, fqn: str) -> bool:
    return fqn in names


def _named(watch: Any) -> list[str]:
    return list(dict.fromkeys(site.fqn for site in watch._table if site.operand in OPERANDS and not site.as_it_is))


def function_of(target: str) -> Callable[[Trial], Any]:
    """What "module:function" names.

    Raises:
        ValueError: another form, or nothing of that name.
    """
    module, _, name = target.partition(":")
    if not module or not name:
        raise ValueError(f"{target!r}: must be 'module:function', such as 'train:one_trial'")
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as e:
        raise ValueError(f"{target!r}: {e}; give the module as it is imported from the current folder") from e
    if not callable(found):
        raise ValueError(f"{target!r}: is {type(found).__name__}, must be a function of a Trial")
    return found  # type: ignore[no-any-return]


def judged(result: Any, limit: float | None) -> tuple[bool | None, str]:
    """Whether what the function returned is a failure, and why.

    Args:
        result: True or False; or a loss, or losses in order: one that is not finite or above `limit` is a failure. As Python,
            torch and numpy have them. Of several flags one that is True is a failure.
        limit: of a loss; None: only what is not finite fails.

    Returns:
        None for the former where it returned nothing, or no losses.

    Raises:
        TypeError: nothing of these.
    """
    if result is None:
        return None, "the function returned None: must be True, False, a loss, or losses in order"
    flags, losses = _flags_and_losses(result)
    if any(flags):
        return True, "the function says so"
    for i, loss in enumerate(losses):
        if not math.isfinite(loss):
            return True, f"loss {i} is {loss}"
        if limit is not None and loss > limit:
            return True, f"loss {i} is {loss:.4g}, above {limit:g}"
    if losses:
        return False, f"{len(losses)} loss{'es' if len(losses) > 1 else ''}, the last {losses[-1]:.4g}"
    return (False, "the function says so") if flags else (None, "the function returned no losses")


def _flags_and_losses(result: Any) -> tuple[list[bool], list[float]]:
    plain = getattr(result, "tolist", None) or getattr(result, "item", None)  # of torch, numpy and their like
    if callable(plain):
        result = plain()
    if isinstance(result, bool):
        return [result], []
    if isinstance(result, numbers.Real):
        return [], [float(result)]
    if isinstance(result, Iterable) and not isinstance(result, str | bytes | Mapping):
        parts = [_flags_and_losses(part) for part in result]
        return [x for flags, _ in parts for x in flags], [x for _, losses in parts for x in losses]
    raise TypeError(f"the function returned {type(result).__name__}: must be True, False, a loss, or losses in order")


def _says_nothing(e: Exception) -> bool:
    """Whether an error is one of the program, or of memory: it is none of the training's numbers."""
    if isinstance(e, TypeError | NameError | AttributeError | ImportError | SyntaxError | OSError | MemoryError):
        return True
    if isinstance(e, torch.cuda.OutOfMemoryError):
        return True
    return isinstance(e, RuntimeError) and any(words in str(e) for words in NO_MEMORY)


def main(argv: Sequence[str]) -> int:
    """Run one trial; its result goes to a file, one for each rank."""
    request = json.loads(Path(argv[0]).read_text())
    rank = int(os.environ.get("RANK", "0"))
    trial = Trial(frozenset(request["leave"]), request["checkpoint"], request["recipe"], list(request["modules"]))
    status, said, failed = 0, "", None
    try:
        function = function_of(request["target"])
        try:
            failed, said = judged(function(trial), request["limit"])
        except Exception as e:  # training may raise where it fails: that is a result
            failed = None if _says_nothing(e) else True
            raise
    except Exception as e:  # noqa: BLE001  told to who started the trial
        said, status = f"{type(e).__name__}: {e}"[:500], RAISED
        traceback.print_exc()
    answer = {"failed": failed, "said": said, "raised": status == RAISED, "modules": trial.modules}
    out = Path(request["out"]) / f"rank{rank}.json"
    part = out.with_suffix(".part")
    part.write_text(json.dumps(answer))
    part.replace(out)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
