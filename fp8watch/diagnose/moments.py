"""Optimizer moments in fewer bits: what rounding them after each step does to the moments, the updates and the weights.

Shapes:     model, batches, optimizer -> per format shares, ratios and drift
Thread:     the caller's

The same steps are trained by copies: one whose moments stay as they are, and one a format whose moments are rounded to it
behind every step, as an optimizer keeps them that computes in float32 and stores them low (DeepSeek-V3 stores both in BF16,
beside FP32 master weights). Parameters and gradients keep their own precision.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from fp8watch.diagnose.answer_pictures import moments_picture
from fp8watch.diagnose.diagnosis_copy import deep_copy
from fp8watch.diagnose.impact_tables import columns, number
from fp8watch.diagnose.model_copies import MakeOptimizer, check, optimizer_of, unwrapped
from fp8watch.diagnose.subject import LossFn, checked_loss, default_loss
from fp8watch.diagnose.untouched import RandomState, untouched
from fp8watch.diagnose.verdict import as_plain
from fp8watch.session.precision_map import MASTERS

MOMENT_FORMATS: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Formats by name. Others are given as a dict of dtypes that torch casts to."""


@dataclass(frozen=True)
class MomentCost:
    """One moment of all parameters, over all steps."""

    moment: str
    """Its name in the optimizer's state, such as exp_avg_sq."""
    flushed: float
    """Share of the elements that were not 0 and are 0 in the format."""
    stuck: float
    """Share of the elements that the step moved and rounding put back where they were. They forget nothing and learn nothing."""


@dataclass(frozen=True)
class MomentFormat:
    """All moments in one format."""

    name: str
    moments: tuple[MomentCost, ...]
    update_rms_ratio: float
    """RMS of the update over that of the same step with moments as they are, mean over steps. 1: as large."""
    drift: float
    """‖w − w₀'‖ / ‖w₀' − w₀‖ after all steps, with w₀' the weights with moments as they are: how far off, over how far they came."""
    loss: float
    """Of the last step, nats."""


@dataclass(frozen=True)
class MomentsWhatIf:
    """What was found. `print(found)` shows a table."""

    steps: int
    loss: float
    """Of the last step with moments as they are, nats."""
    formats: tuple[MomentFormat, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain values; non-finite numbers as "nan", "inf", "-inf"."""
        plain: dict[str, Any] = as_plain(asdict(self))
        return plain

    def as_svg(self) -> str:
        """A picture: shares of each moment that were flushed or stuck."""
        return moments_picture(self)

    def __str__(self) -> str:
        names = list(dict.fromkeys(m.moment for f in self.formats for m in f.moments))
        head = ["moments in", *(f"{name} {what}" for name in names for what in ("flushed", "stuck"))]
        rows = [[*head, "update RMS", "drift", "loss"]]
        for f in self.formats:
            of = {m.moment: m for m in f.moments}
            shares = [number(getattr(of[n], what), ".2%") for n in names for what in ("flushed", "stuck")]
            rows.append([f.name, *shares, f"×{f.update_rms_ratio:.4f}", f"{f.drift:.2%}", f"{f.loss:.5f}"])
        steps = f"{self.steps} step{'' if self.steps == 1 else 's'}"
        return (
            f"{columns(rows)}\n{steps}; loss {self.loss:.5f} with moments as they are. Drift is the distance of the weights, over the way "
            "that they came. It does not say how a longer training would go."
        )


def moments_what_if(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFn | None = None,
    *,
    optimizer: torch.optim.Optimizer | MakeOptimizer,
    steps: int = 20,
    formats: Mapping[str, torch.dtype] | Iterable[str] | None = None,
) -> MomentsWhatIf:
    """Train copies for some steps with the optimizer's moments rounded to each format.

    Args:
        model: attached or not; nothing of it, of its optimizer or of the random generators changes.
        batches: at most `steps` are taken, and kept for as long as it runs.
        loss_fn: (model, batch) -> loss; None: the model returns its loss.
        optimizer: copied with its state, or a function parameters -> optimizer. Moments are what its state holds in the
            shape of a parameter, and is no master weight.
        steps: at most.
        formats: names of MOMENT_FORMATS, or dtypes by a name of your own. None: all of MOMENT_FORMATS.

    Raises:
        TypeError, ValueError: an argument that cannot work, with value, rule and remedy.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= 100_000:
        raise ValueError(f"steps={steps!r}: must be a whole number from 1 to 100000")
    asked = _formats(formats)
    check(model)
    if optimizer is None:
        raise ValueError(
            "optimizer=None: must be the optimizer whose moments are asked about, or a function that makes it"
        )
    inner = unwrapped(model)
    taken = list(islice(iter(batches), steps))
    if not taken:
        raise ValueError("batches is empty: give at least one")
    with untouched(inner):
        random = RandomState()
        plain = _Run(inner, optimizer, loss_fn, None)
        before = plain.weights()
        for at, batch in enumerate(taken):
            plain.step(batch)
            if not math.isfinite(plain.loss):
                raise ValueError(
                    f"the loss of step {at} is {plain.loss} with moments as they are: there is nothing to compare; give "
                    f"{f'steps={at} or ' if at else ''}batches before the failure"
                )
        after = plain.weights()
        way = _length(a - b for a, b in zip(after, before, strict=True))
        found = []
        for name, dtype in asked.items():
            random.restore()
            low = _Run(inner, optimizer, loss_fn, dtype)
            for batch in taken:
                low.step(batch)
            if not low.costs:
                raise ValueError(
                    f"{type(low.optimizer).__name__} keeps no moments in the shape of its parameters: nothing to round"
                )
            off = _length(a - b for a, b in zip(low.weights(), after, strict=True))
            ratios = [u / v for u, v in zip(low.updates, plain.updates, strict=True) if v > 0]
            found.append(
                MomentFormat(
                    name,
                    tuple(MomentCost(m, c.share("flushed"), c.share("stuck")) for m, c in low.costs.items()),
                    sum(ratios) / len(ratios) if ratios else math.nan,
                    off / way if way else math.nan,
                    low.loss,
                )
            )
    return MomentsWhatIf(len(taken), plain.loss, tuple(found))


def _formats(formats: Mapping[str, torch.dtype] | Iterable[str] | None) -> dict[str, torch.dtype]:
    if formats is None:
        return dict(MOMENT_FORMATS)
    if isinstance(formats, Mapping):
        for name, dtype in formats.items():
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise TypeError(f"formats[{name!r}]={dtype!r}: must be a floating point dtype of torch")
        found = dict(formats)
    else:
        names = [formats] if isinstance(formats, str) else list(formats)
        for name in names:
            if name not in MOMENT_FORMATS:
                raise ValueError(f"format {name!r} is unknown; known are {', '.join(MOMENT_FORMATS)}")
        found = {name: MOMENT_FORMATS[name] for name in names}
    if not found:
        raise ValueError(f"formats is empty: give some of {', '.join(MOMENT_FORMATS)}")
    return found


class _Counts:
    """Elements of one moment, over parameters and steps."""

    def __init__(self) -> None:
        self.of: dict[str, int] = {"flushed": 0, "stuck": 0}
        self.out_of: dict[str, int] = {"flushed": 0, "stuck": 0}

    def add(self, before: Tensor | None, exact: Tensor, rounded: Tensor) -> None:
        self.of["flushed"] += int(((rounded == 0) & (exact != 0)).sum())
        self.out_of["flushed"] += int((exact != 0).sum())
        if before is not None:
            moved = exact != before
            self.of["stuck"] += int((moved & (rounded == before)).sum())
            self.out_of["stuck"] += int(moved.sum())

    def share(self, what: str) -> float:
        return self.of[what] / self.out_of[what] if self.out_of[what] else 0.0


class _Run:
    """One copy that trains."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | MakeOptimizer,
        loss_fn: LossFn | None,
        dtype: torch.dtype | None,
    ) -> None:
        self._model = deep_copy(model)
        made = optimizer_of(optimizer, model, self._model)
        if not isinstance(made, torch.optim.Optimizer):
            raise TypeError(f"optimizer returned {type(made).__name__}: must be a torch optimizer")
        self.optimizer = made
        self._loss_fn = default_loss if loss_fn is None else loss_fn
        self._dtype = dtype
        self._parameters = [p for group in made.param_groups for p in group["params"]]
        self.costs: dict[str, _Counts] = {}
        self.updates: list[float] = []
        self.loss = math.nan
        if dtype is not None:
            with torch.no_grad():
                for _, moment in self._moments():
                    moment.copy_(moment.to(dtype))

    def weights(self) -> list[Tensor]:
        """As they are now, copied."""
        return [p.detach().clone() for p in self._parameters]

    def step(self, batch: Any) -> None:
        """One step, its moments rounded behind it."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = checked_loss(self._loss_fn(self._model, copy.deepcopy(batch)))
        loss.backward()  # type: ignore[no-untyped-call]
        weights = self.weights()
        kept = {id(m): m.clone() for _, m in self._moments()} if self._dtype is not None else {}
        self.optimizer.step()
        self.loss = float(loss.detach())
        self.updates.append(_length(p.detach() - w for p, w in zip(self._parameters, weights, strict=True)))
        if self._dtype is None:
            return
        with torch.no_grad():
            for name, moment in self._moments():
                rounded = moment.to(self._dtype).to(moment.dtype)
                self.costs.setdefault(name, _Counts()).add(kept.get(id(moment)), moment, rounded)
                moment.copy_(rounded)

    def _moments(self) -> Iterator[tuple[str, Tensor]]:
        for p in self._parameters:
            for name, value in self.optimizer.state.get(p, {}).items():
                alike = isinstance(value, Tensor) and value.is_floating_point() and value.shape == p.shape
                if alike and name not in MASTERS and name != "step":
                    yield str(name), value


def _length(parts: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(part.double().square().sum()) for part in parts))
