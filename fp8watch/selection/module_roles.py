"""Role of each Linear (output head, router, embedding), from the model's structure, or from its name.

A head is what the model returns as its output embeddings, what shares its weight with an embedding, or a Linear outside
of the blocks with one output per token whose outputs no Linear there reads. A router has few outputs, one per expert
beside it; a `gate` as wide as its sibling `up` belongs to the MLP.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from torch import nn

from fp8watch_agent.roles import LINEAR, OUTPUT_HEAD, ROLES_FACT, ROUTER, TIED, encode_roles, plain_name, role_of

_POSITIONS = re.compile(r"pos|wpe|type|segment|time")
_NUMBERED = re.compile(r"(?:^|\.)\d+\.")
_UP = re.compile(r"^(?:\w*_)?(?:up|value|w3|w2|v|fc\w*)(?:_|$)")


def roles(named: Sequence[tuple[str, nn.Module]]) -> dict[int, str]:
    """Linear, by id -> its role; Linears without one are omitted.

    Args:
        named: modules of the model under the names that sites have.
    """
    heads = {id(m) for head in _called_heads(named) for m in head.modules()}
    embeddings = {
        id(m._parameters["weight"])
        for _, m in named
        if isinstance(m, nn.Embedding) and m._parameters.get("weight") is not None
    }
    # a head is last: an MLP outside of the blocks has a Linear that reads its output width
    read = {m.in_features for fqn, m in named if isinstance(m, nn.Linear) and not _NUMBERED.search(fqn)}
    vocabularies = {v for v in _vocabularies(named) if v[0] not in read}
    children: dict[str, list[tuple[str, nn.Module]]] = {}
    for fqn, module in named:
        parent, _, name = plain_name(fqn).rpartition(".")
        children.setdefault(parent, []).append((name, module))
    found: dict[int, str] = {}
    for fqn, module in named:
        if not isinstance(module, nn.Linear):
            continue
        role = role_of(fqn)
        if id(module._parameters.get("weight")) in embeddings:
            role = TIED
        elif id(module) in heads or _is_vocabulary_wide(fqn, module, vocabularies):
            role = OUTPUT_HEAD
        elif role == ROUTER and not _routes(fqn, module, children):
            role = None
        if role is not None:
            found[id(module)] = role
    return found


def role_facts(named: Sequence[tuple[str, nn.Module]], taken: Sequence[tuple[str, nn.Linear]]) -> dict[str, str]:
    """Session facts: the role of each selected Linear that has one, or whose name alone would imply a wrong one."""
    found = roles(named)
    told = {fqn: found.get(id(module)) for fqn, module in taken}
    said = {fqn: role or LINEAR for fqn, role in told.items() if role is not None or role_of(fqn) is not None}
    return {ROLES_FACT: encode_roles(said)}


def _called_heads(named: Sequence[tuple[str, nn.Module]]) -> Iterator[nn.Module]:
    """What models return as their output embeddings."""
    for _, module in named:
        try:
            get = getattr(module, "get_output_embeddings", None)
            head = get() if callable(get) else None
        except Exception:  # noqa: BLE001 - a model without one may say so in any way
            continue
        if isinstance(head, nn.Module) and not isinstance(head, nn.Embedding):
            yield head


def _vocabularies(named: Sequence[tuple[str, nn.Module]]) -> Iterator[tuple[int, int]]:
    """(number of tokens, width) of the largest embedding other than of positions."""
    tables = [m for fqn, m in named if isinstance(m, nn.Embedding) and not _POSITIONS.search(fqn.rpartition(".")[2])]
    if tables:
        largest = max(tables, key=lambda m: m.num_embeddings)
        if largest.num_embeddings != largest.embedding_dim:
            yield largest.num_embeddings, largest.embedding_dim


def _is_vocabulary_wide(fqn: str, module: nn.Linear, vocabularies: set[tuple[int, int]]) -> bool:
    """One output per token, outside of the blocks: a byte vocabulary is often as wide as an MLP."""
    return (module.out_features, module.in_features) in vocabularies and not _NUMBERED.search(fqn)


def _routes(fqn: str, module: nn.Linear, children: dict[str, list[tuple[str, nn.Module]]]) -> bool:
    """Whether a `gate` chooses among experts, and is not the gate of an MLP."""
    parent, _, name = plain_name(fqn).rpartition(".")
    if name not in ("gate", "wg"):
        return True
    siblings = [(n, m) for n, m in children.get(parent, ()) if n and m is not module]
    if any("expert" in n for n, _ in siblings) or parent.rpartition(".")[2] in ("gate", "gating", "router"):
        return True
    shape = module.in_features, module.out_features
    twins = [n for n, m in siblings if isinstance(m, nn.Linear) and (m.in_features, m.out_features) == shape]
    return module.out_features * 2 <= module.in_features and not any(_UP.match(n) for n in twins)
