"""Which Linears are an output head, a router or an embedding: by what a model shows, and by name where it shows nothing.

A head is what the model calls its output embeddings, what shares its weight with an embedding, or what has one output for
each token outside of the blocks, and no Linear there that reads as many. A router has few outputs, one for each expert
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
    """Linear, by id -> its role; those without one are not in it.

    Args:
        named: modules of the model under the names that sites have.
    """
    heads = {id(m) for head in _called_heads(named) for m in head.modules()}
    embeddings = {
        id(m._parameters["weight"])
        for _, m in named
        if isinstance(m, nn.Embedding) and m._parameters.get("weight") is not None
    }
    # a head is the end: an MLP outside of blocks has a Linear that reads its width
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
    """For the session: the role of each taken Linear that has one, or whose name alone would give it a wrong one."""
    found = roles(named)
    told = {fqn: found.get(id(module)) for fqn, module in taken}
    said = {fqn: role or LINEAR for fqn, role in told.items() if role is not None or role_of(fqn) is not None}
    return {ROLES_FACT: encode_roles(said)}


def _called_heads(named: Sequence[tuple[str, nn.Module]]) -> Iterator[nn.Module]:
    """What models themselves call their output embeddings."""
    for _, module in named:
        try:
            get = getattr(module, "get_output_embeddings", None)
            head = get() if callable(get) else None
        except Exception:  # noqa: BLE001 - a model without one may say so in any way
            continue
        if isinstance(head, nn.Module) and not isinstance(head, nn.Embedding):
            yield head


def _vocabularies(named: Sequence[tuple[str, nn.Module]]) -> Iterator[tuple[int, int]]:
    """(number of tokens, width) of the largest embedding that is not of positions."""
    tables = [m for fqn, m in named if isinstance(m, nn.Embedding) and not _POSITIONS.search(fqn.rpartition(".")[2])]
    if tables:
        largest = max(tables, key=lambda m: m.num_embeddings)
        if largest.num_embeddings != largest.embedding_dim:
            yield largest.num_embeddings, largest.embedding_dim


def _is_vocabulary_wide(fqn: str, module: nn.Linear, vocabularies: set[tuple[int, int]]) -> bool:
    """One output for each token, outside of the blocks: a byte vocabulary is often as wide as an MLP."""
    return (module.out_features, module.in_features) in vocabularies and not _NUMBERED.search(fqn)


def _routes(fqn: str, module: nn.Linear, children: dict[str, list[tuple[str, nn.Module]]]) -> bool:
    """Whether what is called a gate chooses among experts, and is not the gate of an MLP."""
    parent, _, name = plain_name(fqn).rpartition(".")
    if name not in ("gate", "wg"):
        return True
    siblings = [(n, m) for n, m in children.get(parent, ()) if n and m is not module]
    if any("expert" in n for n, _ in siblings) or parent.rpartition(".")[2] in ("gate", "gating", "router"):
        return True
    shape = module.in_features, module.out_features
    twins = [n for n, m in siblings if isinstance(m, nn.Linear) and (m.in_features, m.out_features) == shape]
    return module.out_features * 2 <= module.in_features and not any(_UP.match(n) for n in twins)
