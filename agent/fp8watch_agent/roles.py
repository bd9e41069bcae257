"""Module roles by name (output head, embedding, router, norm): attach leaves these out, the collector warns about them.

Attach sees shapes, tied weights and siblings as well, so a session reports the role of each module whose name alone
would mislead; see `encode_roles`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

OUTPUT_HEAD, EMBEDDING, ROUTER, NORM = "output head", "embedding", "router", "norm"
TIED = "weight tied to an embedding"
LINEAR = "linear"
"""A module that belongs in FP8, whatever its name looks like."""

ROLES_FACT = "roles"
MAX_FACT_CHARS = 4000

_HEAD = re.compile(r"(?:^|[._])(?:lm_head|output_head|tied_head|unembed\w*)(?:\.|$)")
_OUTER_HEAD = re.compile(r"(?:^|\.)(?:output_layer|embed_out)(?:\.|$)")
"""Heads at any depth outside of numbered blocks; inside of one they are a part of the block."""
_IN_BLOCK = re.compile(r"(?:^|\.)\d+\.")
_TOP_HEAD = frozenset({"head", "output", "classifier", "score", "logits"})
"""Heads at the top level of a model; deeper, the name may mean anything."""
_INNER = re.compile(r"attn|attention|mlp|ffn|feed_forward")
_EMBEDDING = re.compile(r"(?:^|[._])(?:\w*embed(?:ding|dings)?|embed_(?:tokens|positions|in)|wte|wpe)$")
_ROUTER = re.compile(r"(?:^|[._])(?:router(?:\.\w+)?|(?:gating|gate|wg)(?:\.(?:weight|linear|wg))?)$")
_NORM = re.compile(r"(?:^|[._])\w*(?:norm|ln_[f0-9])$")
_PEFT_PREFIX = re.compile(r"^(?:base_model\.model\.)+")
_PEFT_SUFFIX = re.compile(r"\.(?:base_layer|original_module|(?:lora_[AB]|modules_to_save)\.\w+)$")
_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")


def plain_name(fqn: str) -> str:
    """A module name without the prefixes and suffixes of adapters."""
    return _PEFT_SUFFIX.sub("", _PEFT_PREFIX.sub("", fqn))


def role_of(fqn: str) -> str | None:
    """The role that a name implies: output head, embedding, router, norm; else None."""
    name = plain_name(fqn)
    parent, _, last = name.rpartition(".")
    if _HEAD.search(name) or (_OUTER_HEAD.search(name) and not _IN_BLOCK.search(name)):
        return OUTPUT_HEAD
    if last in _TOP_HEAD and parent.count(".") == 0 and not _INNER.search(parent):
        return OUTPUT_HEAD
    for pattern, role in ((_EMBEDDING, EMBEDDING), (_ROUTER, ROUTER), (_NORM, NORM)):
        if pattern.search(name):
            return role
    return None


def pattern(fqn: str) -> str:
    """A name with its numbers replaced by `*`, as shared by all layers. A name that is only a number stays."""
    return _NUMBER.sub("*", fqn) if not fqn.isdigit() else fqn


def layers_of(names: Iterable[str]) -> list[str]:
    """Names in order, those that differ only in numbers merged into one pattern."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(pattern(name), []).append(name)
    return [of[0] if len(of) == 1 else common for common, of in groups.items()]


def encode_roles(roles: Mapping[str, str]) -> str:
    """Module -> role as one session fact: `model.layers.*.mlp.gate (linear); …`, layers merged."""
    items = dict.fromkeys(f"{pattern(fqn)} ({role})" for fqn, role in roles.items())
    out = ""
    for item in items:
        if len(out) + len(item) > MAX_FACT_CHARS:
            break
        out += f"{'; ' if out else ''}{item}"
    return out


def decode_roles(fact: object) -> dict[str, str]:
    """Inverse of `encode_roles`: pattern -> role."""
    return dict(re.findall(r"([^;()]+?) \(([^()]*)\)(?:; |$)", fact)) if isinstance(fact, str) else {}
