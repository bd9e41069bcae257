"""Heads without a Linear: the weight of an embedding that some forward multiplies with, as `F.linear(x, embed.weight)`.

Thread:     training, once

Which forward does so is told from its code: it, or a method that it calls, names the embedding and `weight`, and has a
product. The head stays in high precision like one that is a Linear tied to the embedding: its output is looked at, and
whether what is not finite came into it. Where the code names them and shows no product (a fused loss is handed the weight),
it is said that the product, if there is one, is not counted.
"""

from __future__ import annotations

import dis
import inspect
import re
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import CodeType
from typing import Any

from torch import nn

from fp8watch.layers.fp8_linear import SITE_KEY
from fp8watch.layers.own_class import refuses, watched_class
from fp8watch.selection.own_forward import own_class

TIED_HEAD = "tied_head"
READ_BY = "read by the forward of"
"""Last part of the name of such a head, behind that of the embedding."""

_ADDED = re.compile(r"posi|quer(?:y|ies)|prompt|latent", re.IGNORECASE)
"""Names of tables whose weight is read to be added, or to enter as activations: positions, and queries of DETR and Mask2Former."""
_PRODUCTS = frozenset({"linear", "matmul", "mm", "addmm", "bmm", "einsum", "tensordot", "inner"})
_WEIGHT, _FACTS = "weight", frozenset({"dtype", "device", "shape", "ndim", "requires_grad", "size", "dim"})
_ASKS = "get_input_embeddings"


@dataclass(frozen=True)
class TiedHead:
    """The weight of an embedding that a module multiplies with in its forward."""

    fqn: str  # of its site
    path: str  # of the weight, from the module
    module: nn.Module
    embedding: nn.Embedding
    reason: str | None = None  # why it is not looked at

    @property
    def multiplies(self) -> bool:
        """Whether a product is in the code; else the weight is only read there."""
        return self.reason is None


def find_tied_heads(named: Sequence[tuple[str, nn.Module]], taken: Container[int] = ()) -> list[TiedHead]:
    """Heads of a model that are no modules, at most one for each embedding.

    Args:
        named: its modules under the names that sites have.
        taken: ids of modules whose class is swapped for something else.
    """
    read_as_linear = Counter(id(m._parameters.get("weight")) for _, m in named if isinstance(m, nn.Linear))
    outer = [
        (name, module, dict(module.named_modules()))
        for name, module in named
        if not isinstance(module, nn.Embedding) and any(isinstance(m, nn.Embedding) for m in module.modules())
    ]
    found: dict[int, TiedHead] = {}
    vocabulary = max((m.num_embeddings for _, m in named if isinstance(m, nn.Embedding)), default=0)
    for fqn, embedding in named:
        weight = embedding._parameters.get("weight") if isinstance(embedding, nn.Embedding) else None
        if weight is None or id(weight) in found or read_as_linear[id(weight)] or id(embedding) in taken:
            continue
        assert isinstance(embedding, nn.Embedding)
        head = next(_readers(fqn, embedding, outer, taken), None)
        # positions and prompts are read as well, to be added: heads are over what has most entries
        is_array = embedding.num_embeddings < vocabulary or _ADDED.search(fqn.rpartition(".")[2])
        if head is not None and not (is_array and (head.reason or "").startswith(READ_BY)):
            found[id(weight)] = head
    return list(found.values())


def _readers(
    fqn: str,
    embedding: nn.Embedding,
    outer: Sequence[tuple[str, nn.Module, dict[str, nn.Module]]],
    taken: Container[int],
) -> Iterator[TiedHead]:
    """Modules around an embedding whose forward reads its weight, those that multiply first, the nearest first. A wrapper
    that has the embedding's own name is none of them: the products of an adapter are with its own parameters."""
    around: list[tuple[int, str, nn.Module]] = []
    for name, module, paths in outer:
        path = next((p for p, m in paths.items() if m is embedding), "")
        if path and name != fqn:
            around.append((path.count("."), path, module))
    only_read: list[TiedHead] = []
    for _, path, module in sorted(around, key=lambda of: of[0]):
        names, multiplies = _read_names(own_class(module))
        parts = {part for part in path.split(".") if not part.isdigit()}
        if _WEIGHT not in names or not (parts <= names or _ASKS in names):
            continue
        made = TiedHead(f"{fqn}.{TIED_HEAD}".lstrip("."), f"{path}.weight", module, embedding)
        if not multiplies:
            reader = type(module).__name__
            only_read.append(_because(made, f"{READ_BY} {reader}: a product with it is not counted"))
            continue
        reason = _refused(module, embedding.weight, taken)
        yield made if reason is None else _because(made, reason)
    yield from only_read


def _because(head: TiedHead, reason: str) -> TiedHead:
    return TiedHead(head.fqn, head.path, head.module, head.embedding, reason)


def _refused(module: nn.Module, weight: Any, taken: Container[int]) -> str | None:
    if id(module) in taken or SITE_KEY in module.__dict__:
        return "its module is watched in another way"
    if isinstance(weight, nn.parameter.UninitializedParameter) or not weight.is_floating_point():
        return f"weight is {weight.dtype}"
    reason = refuses(module)
    if reason is None:
        try:
            watched_class(type(module))
        except Exception as error:  # noqa: BLE001 - a class may refuse to be subclassed in any way
            reason = f"its class cannot be subclassed ({type(error).__name__})"
    return reason


def _read_names(cls: type[nn.Module]) -> tuple[set[str], bool]:
    """Names and keys in the code of a class's forward and of its methods that are called there; whether there is a product."""
    names: set[str] = set()
    todo, done, multiplies = ["forward"], set(dir(nn.Module)) - {"forward"}, False
    while todo:
        name = todo.pop()
        if name in done:
            continue
        done.add(name)
        for part in _codes(cls, name):
            names.update(n for n in part.co_names if n != _WEIGHT or _reads_weight(part))
            names.update(c for c in part.co_consts if isinstance(c, str))
            multiplies = multiplies or any(_is_matmul(i) for i in dis.get_instructions(part))
        todo += names - done
    return names, multiplies or bool(names & _PRODUCTS)


def _codes(cls: type[nn.Module], name: str) -> Iterator[CodeType]:
    """Of a method or property, also of the classes that it may hand the call on to."""
    for base in cls.__mro__:
        found: Any = base.__dict__.get(name) if base not in nn.Module.__mro__ else None
        found = getattr(found, "__func__", getattr(found, "fget", found))
        code = getattr(inspect.unwrap(found), "__code__", None) if callable(found) else None
        if isinstance(code, CodeType):
            yield from _parts(code)
            if "super" not in code.co_names:
                return


def _parts(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts(constant)


def _reads_weight(code: CodeType) -> bool:
    """Whether more of a weight is read than what kind of tensor it is."""
    found = [i for i in dis.get_instructions(code) if i.opname != "CACHE"]
    return any(i.argval == _WEIGHT and after.argval not in _FACTS for i, after in pairwise(found))


def _is_matmul(instruction: dis.Instruction) -> bool:
    return instruction.opname == "BINARY_MATRIX_MULTIPLY" or (
        instruction.opname == "BINARY_OP" and instruction.argrepr == "@"
    )
