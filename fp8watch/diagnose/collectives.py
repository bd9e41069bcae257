"""Collectives in fewer bits: what rounding does to a gradient before and behind its sum over N ranks, and to what experts are sent.

Shapes:     model, one batch a rank, loss -> per format shares and SQNR, per parameter the headroom that the sum takes
Thread:     the caller's

One process plays all ranks: each batch gives the gradients of one rank. They are divided by N, as DDP does, cast, and summed
one rank after the other with each partial sum rounded to the format, as a ring does that adds in the dtype that it sends. FP8
has one scale for a tensor, agreed on over the ranks: with room for N times the largest amax, or for that amax alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8watch.diagnose.answer_pictures import collectives_picture
from fp8watch.diagnose.diagnosis_copy import deep_copy
from fp8watch.diagnose.impact_tables import columns
from fp8watch.diagnose.model_copies import check, unwrapped
from fp8watch.diagnose.number_grid import E4M3, E5M2, Grid
from fp8watch.diagnose.subject import LossFn, checked_loss, default_loss
from fp8watch.diagnose.untouched import untouched
from fp8watch.diagnose.verdict import as_plain
from fp8watch.quantize import quantize_blockwise

EXPERT = re.compile(r"(.*\.)?experts\.\d+")
"""Names of modules that tokens are sent to."""
MAX_RANKS = 4096


class _Format(NamedTuple):
    """How a summand travels."""

    round: Callable[[Tensor], Tensor]
    max_finite: float
    reserve: bool | None
    """Whether the scale leaves room for the sum; None: there is no scale."""


def _cast(dtype: torch.dtype) -> _Format:
    return _Format(lambda x: x.to(dtype).float(), torch.finfo(dtype).max, None)


def _grid(grid: Grid, reserve: bool) -> _Format:
    return _Format(grid.round, grid.max_finite, reserve)


REDUCE_FORMATS: dict[str, _Format] = {
    "bf16": _cast(torch.bfloat16),
    "fp16": _cast(torch.float16),
    "e5m2": _grid(E5M2, True),
    "e4m3": _grid(E4M3, True),
    "e5m2-no-room": _grid(E5M2, False),
    "e4m3-no-room": _grid(E4M3, False),
}
"""Formats of a reduction by name; "no-room" has a scale that fits each rank's gradient and not their sum."""
SENT_FORMATS: dict[str, Callable[[Tensor], Tensor]] = {
    "bf16": lambda x: x.to(torch.bfloat16).float(),
    "e4m3": lambda x: quantize_blockwise(x).dequantize(),
    "e5m2": lambda x: quantize_blockwise(x, fp8_format="E5M2").dequantize(),
}
"""Formats of what experts are sent, FP8 in tiles of 1×128 with power-of-two scales, as DeepSeek-V3 dispatches."""


@dataclass(frozen=True)
class ReducedFormat:
    """All gradients in one format."""

    name: str
    flushed: float
    """Share of the non-zero elements that are 0 before the sum."""
    sqnr_before_db: float
    """Of the summands."""
    sqnr_after_db: float
    """Of the sum, against that in float64."""
    clipped: float
    """Share of the elements of which a partial sum lies beyond the largest number."""
    worst: str
    """Parameter whose sum has the lowest SQNR."""


@dataclass(frozen=True)
class Headroom:
    """How far the sum of one gradient rises above its summands."""

    parameter: str
    octaves: float
    """log2 of amax of the sum over the largest amax of a summand: at most log2 of the number of ranks."""


@dataclass(frozen=True)
class SentTensor:
    """What one expert is sent, or sends back."""

    module: str
    way: str
    """dispatch: its input. combine: its output."""
    format: str
    flushed: float
    sqnr_db: float


@dataclass(frozen=True)
class CollectivesWhatIf:
    """What was found. `print(found)` shows tables."""

    ranks: int
    formats: tuple[ReducedFormat, ...]
    headroom: tuple[Headroom, ...]
    """Of each parameter, the largest first."""
    sent: tuple[SentTensor, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain values; non-finite numbers as "nan", "inf", "-inf"."""
        plain: dict[str, Any] = as_plain(asdict(self))
        return plain

    def as_svg(self) -> str:
        """A picture: SQNR before and behind the sum in each format."""
        return collectives_picture(self)

    def __str__(self) -> str:
        rows = [["gradients in", "flushed", "SQNR before", "SQNR of the sum", "clipped", "worst"]]
        for f in self.formats:
            shown = [f"{db:.1f} dB" for db in (f.sqnr_before_db, f.sqnr_after_db)]
            rows.append([f.name, f"{f.flushed:.2%}", *shown, f"{f.clipped:.2%}", f.worst])
        largest, middle = self.headroom[0], self.headroom[len(self.headroom) // 2]
        text = (
            f"{columns(rows)}\nThe sum over {self.ranks} ranks takes {middle.octaves:.1f} octaves of headroom in the middle of the parameters, "
            f"{largest.octaves:.1f} in {largest.parameter}; {math.log2(self.ranks):.1f} is the most it can."
        )
        if not self.sent:
            return text
        rows = [["experts", "way", "format", "flushed", "SQNR"]]
        rows += [[s.module, s.way, s.format, f"{s.flushed:.2%}", f"{s.sqnr_db:.1f} dB"] for s in self.sent]
        return f"{text}\n\n{columns(rows)}"


def collectives_what_if(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFn | None = None,
    *,
    ranks: int = 8,
    formats: Iterable[str] | None = None,
    sent: Callable[[str], bool] | None = None,
) -> CollectivesWhatIf:
    """Sum the gradients of N batches as N ranks would in each format, and cast what experts are sent.

    Args:
        model: attached or not; nothing of it or of the random generators changes. Gradients of all ranks are kept at once.
        batches: one for each rank; at least `ranks`. The same batch again and again is the worst case of headroom.
        loss_fn: (model, batch) -> loss; None: the model returns its loss.
        ranks: 2 or more.
        formats: names of REDUCE_FORMATS; None: all.
        sent: name of a module -> whether it is sent to (its input is dispatched, its output combined); None: experts by name.

    Raises:
        TypeError, ValueError: an argument that cannot work, with value, rule and remedy.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or not 2 <= ranks <= MAX_RANKS:
        raise ValueError(f"ranks={ranks!r}: must be a whole number from 2 to {MAX_RANKS}")
    asked = _named(formats)
    check(model)
    inner = unwrapped(model)
    taken = list(islice(iter(batches), ranks))
    if len(taken) < ranks:
        raise ValueError(f"batches has {len(taken)}: must have one for each of ranks={ranks}")
    with untouched(inner):
        gradients, sent_found = _gradients(inner, taken, loss_fn, sent or (lambda name: bool(EXPERT.fullmatch(name))))
    if not gradients:
        raise ValueError("no parameter got a gradient from any batch: nothing is reduced")
    headroom = sorted((_headroom(name, g) for name, g in gradients.items()), key=lambda h: -h.octaves)
    found = tuple(_reduced(name, asked[name], gradients) for name in asked)
    return CollectivesWhatIf(ranks, found, tuple(headroom), sent_found)


def _named(formats: Iterable[str] | None) -> dict[str, _Format]:
    names = list(REDUCE_FORMATS) if formats is None else [formats] if isinstance(formats, str) else list(formats)
    for name in names:
        if name not in REDUCE_FORMATS:
            raise ValueError(f"format {name!r} is unknown; known are {', '.join(REDUCE_FORMATS)}")
    if not names:
        raise ValueError(f"formats is empty: give some of {', '.join(REDUCE_FORMATS)}")
    return {name: REDUCE_FORMATS[name] for name in names}


def _gradients(
    model: nn.Module, batches: Sequence[Any], loss_fn: LossFn | None, sent: Callable[[str], bool]
) -> tuple[dict[str, Tensor], tuple[SentTensor, ...]]:
    """Gradients over N of each parameter and rank, float32 [N, numel], and what the experts were sent with the first batch."""
    copied, loss = deep_copy(model), default_loss if loss_fn is None else loss_fn
    found: dict[str, list[Tensor]] = {}
    passed: dict[tuple[str, str], list[Tensor]] = {}
    hooks = [m.register_forward_hook(_keeper(n, passed)) for n, m in copied.named_modules() if n and sent(n)]
    for rank, batch in enumerate(batches):
        copied.zero_grad(set_to_none=True)
        checked_loss(loss(copied, batch)).backward()  # type: ignore[no-untyped-call]
        if rank == 0:
            for hook in hooks:
                hook.remove()
        for name, p in copied.named_parameters():
            if p.requires_grad:  # a rank whose tokens never came here sends zeros
                g = torch.zeros_like(p) if p.grad is None else p.grad
                if not bool(torch.isfinite(g).all()):
                    raise ValueError(
                        f"the gradient of {name} is not finite on rank {rank}, before it is reduced: there is nothing to compare; "
                        "give batches before the failure"
                    )
                found.setdefault(name, []).append(g.detach().float().flatten() / len(batches))
    summed = {name: torch.stack(g) for name, g in found.items()}
    return {name: g for name, g in summed.items() if bool((g != 0).any())}, _sent(passed)


def _keeper(name: str, passed: dict[tuple[str, str], list[Tensor]]) -> Callable[..., None]:
    def keep(_module: nn.Module, args: Any, out: Any) -> None:
        first = out[0] if isinstance(out, tuple) and out else out
        for way, x in (("dispatch", args[0] if args else None), ("combine", first)):
            if isinstance(x, Tensor) and x.is_floating_point() and x.ndim >= 2 and x.numel():
                passed.setdefault((name, way), []).append(x.detach().reshape(-1, x.shape[-1]).float())

    return keep


def _sent(passed: Mapping[tuple[str, str], Sequence[Tensor]]) -> tuple[SentTensor, ...]:
    found = []
    for (module, way), parts in passed.items():
        x = torch.cat(list(parts)).contiguous()
        for name, read in SENT_FORMATS.items():
            y = read(x)
            found.append(SentTensor(module, way, name, _flushed(x, y), _sqnr_db(x, y)))
    return tuple(found)


def _headroom(name: str, gradients: Tensor) -> Headroom:
    total, one = float(gradients.double().sum(0).abs().amax()), float(gradients.abs().amax())
    return Headroom(name, math.log2(total / one) if total > 0 and math.isfinite(total) else -math.inf)


def _reduced(name: str, f: _Format, gradients: Mapping[str, Tensor]) -> ReducedFormat:
    nonzero = zero = clipped = numel = 0
    before, after = _Noise(), _Noise()
    worst, worst_db = "", math.inf
    for parameter, g in gradients.items():
        scale = _scale(g, f)
        sent = f.round(g * scale)
        nonzero += int((g != 0).sum())
        zero += int(((g != 0) & (sent == 0)).sum())
        before.add(g, sent.double() / scale)
        total, over = sent[0], torch.zeros_like(sent[0], dtype=torch.bool)
        for part in sent[1:]:
            raw = total + part
            over |= raw.abs() > f.max_finite
            total = f.round(raw)
        exact, got = g.double().sum(0), total.double() / scale
        own = _sqnr_db(exact, got)
        if own < worst_db:
            worst, worst_db = parameter, own
        after.add(exact, got)
        clipped, numel = clipped + int(over.sum()), numel + over.numel()
    return ReducedFormat(name, zero / nonzero if nonzero else 0.0, before.db, after.db, clipped / numel, worst)


def _scale(g: Tensor, f: _Format) -> float:
    """What multiplies a gradient before the cast, the same on all ranks."""
    amax = float(g.abs().amax())
    if f.reserve is None or not amax or not math.isfinite(amax):
        return 1.0
    return f.max_finite / (amax * (len(g) if f.reserve else 1))


class _Noise:
    """Energy of a signal and of what is off."""

    def __init__(self) -> None:
        self.signal = self.noise = 0.0

    def add(self, exact: Tensor, got: Tensor) -> None:
        self.signal += float(exact.double().square().sum())
        self.noise += float((got.double() - exact.double()).square().sum())

    @property
    def db(self) -> float:
        """Infinite where nothing is off; −infinite where something is not finite."""
        if not math.isfinite(self.noise):
            return -math.inf
        return 10 * math.log10(self.signal / self.noise) if self.noise and self.signal else math.inf


def _sqnr_db(exact: Tensor, got: Tensor) -> float:
    noise = _Noise()
    noise.add(exact, got)
    return noise.db


def _flushed(x: Tensor, y: Tensor) -> float:
    nonzero = int((x != 0).sum())
    return int(((x != 0) & (y == 0)).sum()) / nonzero if nonzero else 0.0
