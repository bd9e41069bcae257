"""The largest attention logit of one call, and whether a query sees a later key, from a sample of its heads and query rows.

Shapes:     query [..., H, L, D], key [..., Hk, S, D] -> [] float32 each     Thread: training

Fused attention never writes its logits to memory. They are computed anew: the products of at most 64 query rows with all
keys, for as many heads and sequences as MAX_LOGITS allows. The next turn takes others. Nothing here waits for a device,
and no dispatch mode sees it: selective activation checkpointing counts the products that it sees.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8watch.observer.unseen import without_modes

NUM_ROWS = 64
MAX_LOGITS = 1 << 20
"""Of one call: 4 MiB in float32, and of the keys that they need at most 64 KiB times D."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How attention makes logits of products."""

    scale: float | None = None  # None: 1/√D
    mask: Tensor | None = None  # bool, True: takes part; or added to the logits. Broadcasts to [..., H, L, S]
    causal: bool = False  # query i sees keys up to i
    softcap: float | None = None  # logits are softcap · tanh(logits / softcap)


MASKED = -1e4
"""A logit, or what is added to one, from which down it takes no part: masks are made of −Inf, of the least finite number, of −1e9."""


@dataclass(frozen=True, slots=True)
class Looked:
    """What one call showed."""

    largest: Tensor
    """The largest logit of the sample; −Inf where all of it is masked. [] float32"""
    sees_ahead: Tensor | float | None
    """1 where a query takes part of a key behind its own, else 0; None where queries and keys are not of one length."""


def look_at_logits(query: Tensor, key: Tensor, rule: Rule, turn: int = 0) -> Looked:
    """The largest logit of the sample, and whether any of its queries sees ahead.

    Args:
        query: [L, D], [H, L, D] or [B, H, L, D], after the rotary embedding.
        key: [S, D], [Hk, S, D] or [B, Hk, S, D]; H is a multiple of Hk.
        rule: scale and masks.
        turn: counts the calls: others are sampled in the next.

    Raises:
        ValueError: shapes that are no attention.
    """
    if not 2 <= query.dim() <= 4 or not 2 <= key.dim() <= 4 or query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query {list(query.shape)}, key {list(key.shape)}: must be [B, H, L, D] and [B, Hk, S, D]")
    if not query.numel() or not key.numel():
        raise ValueError(f"query {list(query.shape)}, key {list(key.shape)}: must be not empty")
    with _unseen(query.device.type):
        q, k = _four(query), _four(key)
        (_, heads, length, width), (_, kv_heads, keys, _) = q.shape, k.shape
        if heads % kv_heads:
            raise ValueError(f"{heads} heads of queries, {kv_heads} of keys: must be a multiple")
        batch, groups = max(q.shape[0], k.shape[0]), heads // kv_heads
        rows, turn = _part(length, NUM_ROWS, turn)
        num_rows = len(range(*rows.indices(length)))
        room = max(1, MAX_LOGITS // (num_rows * keys * groups))
        of_heads, turn = _part(kv_heads, room, turn)
        of_batch, _ = _part(batch, max(1, room // kv_heads), turn)

        def sample(x: Tensor) -> Tensor:
            """[B, H, L, …] -> [b, h, G, r, …]"""
            x = x.expand(batch, heads, length, -1)
            return x.view(batch, kv_heads, groups, length, -1)[of_batch, of_heads, :, rows]

        chosen = sample(q).float()
        small_k = k.expand(batch, -1, -1, -1)[of_batch, of_heads].float()
        logits = torch.matmul(chosen.flatten(2, 3), small_k.mT).view(*chosen.shape[:-1], keys)
        logits = logits * (1 / math.sqrt(width) if rule.scale is None else rule.scale)
        if rule.softcap:
            logits = rule.softcap * torch.tanh(logits / rule.softcap)
        if rule.causal:
            at = torch.arange(length, device=q.device)[rows]
            logits = logits.masked_fill(torch.arange(keys, device=q.device) > at[:, None], -math.inf)
        ahead: Tensor | float | None = None if length != keys or length < 2 else 0.0 if rule.causal else 1.0
        if rule.mask is not None:
            mask = sample(_four(rule.mask).expand(-1, -1, -1, keys))
            if ahead == 1.0:
                ahead = _sees_ahead(mask if mask.dtype == torch.bool else mask > MASKED, length, rows)
            logits = logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask
        largest: Tensor = logits.amax()
    return Looked(largest, ahead)


def _sees_ahead(takes_part: Tensor, length: int, rows: slice) -> Tensor:
    """Whether anything above the diagonal takes part. [..., r, S] bool, of these rows of L -> [] float32"""
    at = torch.arange(length, device=takes_part.device)
    return (takes_part & (at > at[rows, None])).any().float()


def look_at_memory(logits: Tensor, turn: int = 0) -> Looked:
    """The same of logits that are in memory, of a sample where they are many. [..., L, S]"""
    with _unseen(logits.device.type):
        length, keys, rows = logits.shape[-2], logits.shape[-1], slice(None)
        if logits.numel() > MAX_LOGITS:
            rows, turn = _part(length, NUM_ROWS, turn)
            logits = logits[..., rows, :]
        for dim in range(logits.dim() - 2):  # other sequences first, then heads
            fits = max(1, MAX_LOGITS * logits.shape[dim] // logits.numel())
            part, turn = _part(logits.shape[dim], fits, turn)
            logits = logits[(slice(None),) * dim + (part,)]
        largest = logits.amax().float()
        ahead = _sees_ahead(logits > MASKED, length, rows) if length == keys and length > 1 else None
    return Looked(largest, ahead)


def _four(x: Tensor) -> Tensor:
    """[..., L, D] as [B, H, L, D]."""
    return x[(None,) * (4 - x.dim())]


def _part(size: int, num: int, turn: int) -> tuple[slice, int]:
    """At most `num` of `size`, evenly apart, and the turn of what is chosen next: in time each meets each."""
    apart = max(1, -(-size // num))
    return slice(turn % apart, None, apart), turn // apart


@contextmanager
def _unseen(device: str) -> Iterator[None]:
    """Plain arithmetic: no gradient, no autocast, and no mode that would take it for a part of training."""
    with torch.no_grad(), without_modes(), torch.autocast(device, enabled=False):
        yield
