"""Result of an FP8/BF16 comparison: numbers, one sentence, and a note on an incident.

Shapes:     per step two losses; per layer one error and one cosine
Thread:     the caller's
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from fp8watch.diagnose.tell_incident import tell_incident

LOSS_TOLERANCE = 0.0025
"""Healthy FP8 and high-precision runs stay within 0.25 % of each other for the first 20 to 40 steps."""
SUSTAINED = 3
"""Number of steps that must be apart: a single small batch may be by chance."""
RISE = 1.3
"""Ratio to the first loss above which a run counts as failing."""
RISE_OF_SIGNED = 100.0
"""The same of losses that may be negative, of which a ratio says nothing: in median distances from their median."""
LAYER_ERROR = 0.25
"""RMS of the difference over RMS of the output, from which on a layer is named: healthy ones stay at 0.01 to 0.03."""


@dataclass(frozen=True)
class StepPair:
    """One step in both precisions."""

    step: int  # from 0
    loss_fp8: float
    loss_high: float

    @property
    def difference(self) -> float:
        """|fp8 − high| / |high|; Inf where one of the two is not finite, 0 where neither is."""
        a, b = self.loss_fp8, self.loss_high
        if not (math.isfinite(a) and math.isfinite(b)):
            return 0.0 if not math.isfinite(a) and not math.isfinite(b) else math.inf
        return 0.0 if a == b else abs(a - b) / max(abs(b), 1e-12)


@dataclass(frozen=True)
class LayerPair:
    """One Linear in both precisions, in execution order."""

    module: str
    output_error: (
        float  # at the first step, whose weights are equal: RMS(fp8 − high) / RMS(high); Inf: not finite in FP8 only
    )
    first_diverging_step: int | None  # first step at which the output's error is above LAYER_ERROR
    grad_cosine: float | None  # of the weight gradient, at the first step; None without a gradient, or when non-finite
    grad_cosine_min: float | None  # over all steps


@dataclass(frozen=True)
class Verdict:
    """Result of `compare_bf16`. `verdict` is that of an incident: fp8 or shared."""

    verdict: str
    sentence: str
    steps: tuple[StepPair, ...]
    layers: tuple[LayerPair, ...]
    recipe: str
    high_precision: str
    first_diverging_step: int | None
    first_diverging_layer: str | None
    try_next: tuple[str, ...] = ()  # where FP8 explains it: what to change, one after the other, most telling first

    def __str__(self) -> str:
        if not self.try_next:
            return self.sentence
        return "\n".join(
            (f"{self.sentence} Try, one after the other:", *(f"  {i}. {s}" for i, s in enumerate(self.try_next, 1)))
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values; non-finite numbers as "nan", "inf", "-inf"."""
        steps = [{**asdict(s), "difference": s.difference} for s in self.steps]
        out = {**asdict(self), "steps": steps, "layers": [asdict(x) for x in self.layers]}
        named: dict[str, Any] = as_plain(out)
        return named

    def send(self, incident_id: str, collector: str | None = None, token: str | None = None) -> None:
        """Attach this to an incident, whose page then shows it.

        Args:
            incident_id: its id, or the address of its page.
            collector: URL, for an id; else FP8WATCH_COLLECTOR.
            token: with scope ingest; else FP8WATCH_TOKEN, or what is in FP8WATCH_TOKEN_FILE.

        Raises:
            ValueError: no collector is named.
            OSError: it cannot be reached, or refuses; the message says why.
        """
        tell_incident("comparison", self.as_json(), incident_id, collector, token)


FINER = {
    "delayed": "a finer recipe: scales of the operand at hand (--fp8-recipe tensorwise, recipe='current'), then blockwise",
    "current": "a finer recipe: --fp8-recipe blockwise, recipe='blockwise'; torchao: Float8LinearConfig.from_recipe_name('rowwise')",
    "rowwise": "a finer recipe: grad_weight in high precision (torchao: 'rowwise_with_gw_hp'), or blockwise",
    "blockwise": "a finer recipe: FP32 scales in place of powers of two (not on Blackwell), then mxfp8",
}
"""Recipe -> the next finer one, by the names that frameworks have for it."""


def switches(recipe: str, layer: str | None, *, param_gather: bool) -> tuple[str, ...]:
    """What to change where FP8 explains a failure, in the order to try.

    Args:
        recipe: arithmetic of the FP8 path, as `Recipe.kind` names it.
        layer: the first that differs.
        param_gather: weights are kept in FP8 by the trainer.
    """
    out = (
        [f"the same seed with {layer} in BF16: filter_fn=lambda module, fqn: False if fqn == {layer!r} else None"]
        if layer
        else []
    )
    if recipe in FINER:
        out.insert(0, FINER[recipe])
    if param_gather:
        out.insert(0, "--fp8-param-gather off: weights in high precision, cast anew in each step")
    return (*out, "the learning rate 10 to 20 % lower")


def judge(
    steps: tuple[StepPair, ...],
    layers: tuple[LayerPair, ...],
    recipe: str,
    high_precision: str,
    *,
    kind: str = "",
    param_gather: bool = False,
) -> Verdict:
    """Derive the verdict: FP8 explains a failure that only the FP8 path shows.

    A failure that both show is shared, however far apart they are by then: two diverging runs drift apart. `kind` and
    `param_gather` are for `switches`.
    """
    usual = _usual(steps)
    apart, arithmetic = _apart(steps, usual), kind or recipe
    early = [x for x in layers if x.first_diverging_step is not None]
    named = min(early, key=lambda x: x.first_diverging_step or 0, default=None)  # the first in data-flow order
    layer = named.module if named else None
    where = f"; the first layer that differs is {layer}, at step {named.first_diverging_step}" if named else ""

    def verdict(kind: str, sentence: str) -> Verdict:
        step = apart.step if apart is not None else None
        then = switches(arithmetic, layer, param_gather=param_gather) if kind == "fp8" else ()
        return Verdict(kind, sentence, steps, layers, recipe, high_precision, step, layer, then)

    lost = next((s for s in steps if not math.isfinite(s.loss_high)), None)
    lost_fp8 = next((s for s in steps if not math.isfinite(s.loss_fp8)), None)
    if lost is not None and lost_fp8 is not None and lost.step <= lost_fp8.step:
        return verdict(
            "shared", f"{high_precision} does the same: its loss is not finite either, from step {lost.step} on."
        )
    if lost is not None and lost_fp8 is None:
        what = f"{high_precision} would have shown it: its loss is not finite from step {lost.step} on"
        return verdict("fp8", f"{what}, and FP8 goes on with a finite number{where}.")
    rise_high, rise_fp8 = _rise(s.loss_high for s in steps), _rise(s.loss_fp8 for s in steps)
    if lost is None and rise_high is not None and rise_fp8 is not None:
        return verdict("shared", f"{high_precision} does the same: its loss {rise_high}, FP8's {rise_fp8}.")
    if apart is not None:
        much = "its loss is not finite" if math.isinf(apart.difference) else f"{_difference(apart, usual):.2%} apart"
        return verdict("fp8", f"FP8 explains it: from step {apart.step} on the losses separate ({much}){where}.")
    worst = max((_difference(s, usual) for s in steps), default=0.0)
    hint = f" Only {layer} computes something else." if layer else ""
    how = f"over {len(steps)} steps the losses stay within {worst:.2%} of each other, and 0.25 % is normal"
    return verdict("shared", f"{high_precision} does the same: {how}.{hint}")


def _usual(steps: tuple[StepPair, ...]) -> float:
    """Size that a difference is held against at least: a loss that may be negative is next to 0 by chance."""
    high = [s.loss_high for s in steps if math.isfinite(s.loss_high)]
    return median(map(abs, high)) if high and min(high) <= 0 else 0.0


def _difference(s: StepPair, usual: float) -> float:
    signed = _signed(s, usual)
    return abs(signed) if math.isfinite(signed) else s.difference


def _signed(s: StepPair, usual: float) -> float:
    return (s.loss_fp8 - s.loss_high) / max(abs(s.loss_high), usual, 1e-12)


def _apart(steps: tuple[StepPair, ...], usual: float) -> StepPair | None:
    """First step from which the losses stay apart: by a lot, or for SUSTAINED steps and mostly to one side."""
    for i, s in enumerate(steps):
        if _difference(s, usual) > 4 * LOSS_TOLERANCE:
            return s
        rest = steps[i:]
        if _difference(s, usual) > LOSS_TOLERANCE and len(rest) >= SUSTAINED:
            signed = [_signed(x, usual) for x in rest]
            if abs(sum(signed) / len(signed)) > LOSS_TOLERANCE:
                return s
    return None


def _rise(losses: Iterable[float]) -> str | None:
    """How losses rise as those of a run that fails, in words; None: they do not."""
    got = list(losses)
    if not all(math.isfinite(x) for x in got):
        return "is not finite"
    if not got:
        return None
    if got[0] > 0 and min(got) >= 0:
        ratio = max(got) / got[0]
        return f"rises to {ratio:.2f}× that of the first step" if ratio > RISE else None
    middle = median(got)
    spread = median(abs(x - middle) for x in got)
    return f"rises from {got[0]:.4g} to {max(got):.4g}" if max(got) - got[0] > RISE_OF_SIGNED * spread > 0 else None


def as_plain(value: Any) -> Any:
    """Nested values with non-finite numbers as "nan", "inf", "-inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {k: as_plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_plain(v) for v in value]
    return value
