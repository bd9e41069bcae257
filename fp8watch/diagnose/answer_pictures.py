"""Pictures of a bisection, a calibration, and of moments and collectives in fewer bits.

Thread:     the caller's

A result is a Bisection, a Calibration, a MomentsWhatIf or a CollectivesWhatIf, which import this file to show themselves.
"""

from __future__ import annotations

import math
from typing import Any

from fp8watch.diagnose.svg import CELL_H, CHAR_W, svg, text

_KEPT, _FP8, _CULPRIT = "#4393c3", "#e6e9ed", "#d6604d"
_BAR, _OTHER = "#f4a582", "#4393c3"


def bisection_picture(result: Any) -> str:
    """Trials down, modules across: dark where a module stayed in high precision, red where it is a culprit; what came of it."""
    modules = list(result.modules)
    wide = max(6, min(28, 640 // max(1, len(modules))))
    left, top = 34, 56
    right = left + wide * len(modules)
    culprits = set(result.culprits) | set(result.culprit_modules)
    parts = [text(8, 18, "Which modules stayed in high precision in each trial, and what came of it", bold=True)]
    parts.append(text(left, top - 12, f"{len(modules)} modules, in the order of the model"))
    for i, trial in enumerate(result.trials):
        y = top + CELL_H * i
        parts.append(text(left - 8, y + 15, str(i + 1), anchor="end"))
        kept = {name: _module_of(name, modules) for name in trial.leave}
        for j, module in enumerate(modules):
            mine = [name for name, of in kept.items() if of == module]
            colour = _FP8 if not mine else _CULPRIT if culprits.intersection([module, *mine]) else _KEPT
            parts.append(
                f'<rect x="{left + wide * j}" y="{y + 2}" width="{wide - 1}" height="{CELL_H - 4}" fill="{colour}"/>'
            )
        operands = sorted({name[len(kept[name]) + 1 :] for name in trial.leave if name != kept[name]})
        what = f" ({', '.join(operands)} alone)" if operands else ""
        parts.append(text(right + 10, y + 15, ("fails" if trial.failed else "does not fail") + what))
    y = top + CELL_H * len(result.trials) + 8
    sentence = str(result)
    parts.append(
        _legend(8, y, ((_FP8, "in FP8"), (_KEPT, "in high precision"), (_CULPRIT, "in high precision, and named")))
    )
    parts.append(text(8, y + 34, sentence))
    return svg(max(right + 250, CHAR_W * len(sentence) + 16), y + 46, parts)


def calibration_picture(result: Any) -> str:
    """Layers down, operands across: tile SQNR under the suggested recipe, and the coarsest recipe that serves each."""
    by_place = {(s.module, s.operand): s for s in result.sites}
    modules = list(dict.fromkeys(s.module for s in result.sites))
    operands = list(dict.fromkeys(s.operand for s in result.sites))
    left, top, cell = CHAR_W * max(len(m) for m in modules) + 16, 58, 150
    parts = [
        text(
            8,
            18,
            f"Suggested: {result.recipe.name}. Tile SQNR under it, and the coarsest recipe that serves",
            bold=True,
        )
    ]
    parts += [text(left + cell * j + cell // 2, top - 8, o, anchor="middle") for j, o in enumerate(operands)]
    for i, module in enumerate(modules):
        y = top + CELL_H * i
        parts.append(text(left - 8, y + 15, module, anchor="end"))
        for j, operand in enumerate(operands):
            site = by_place.get((module, operand))
            if site is None:
                continue
            db = site.tile_sqnr_p05_db.get(result.recipe.name, math.nan)
            shown = f"{db:.1f} dB" if math.isfinite(db) else "–"
            colour = (
                "#fddbc7" if site.suggested is None else "#d1e5f0" if site.suggested == result.recipe.name else _FP8
            )
            parts.append(
                f'<rect x="{left + cell * j}" y="{y}" width="{cell - 2}" height="{CELL_H - 2}" fill="{colour}"/>'
            )
            words = f"{shown}, {site.suggested or 'high precision'}"
            parts.append(text(left + cell * j + cell // 2 - 1, y + 14, words, anchor="middle"))
        if module in result.reasons:
            parts.append(text(left + cell * len(operands) + 8, y + 15, "kept in high precision"))
    height = top + CELL_H * len(modules)
    words = f"SQNR: 5 % quantile over {result.steps} steps, in E4M3, the worse direction"
    return svg(left + cell * len(operands) + 170, height + 34, [*parts, text(8, height + 22, words)])


def moments_picture(result: Any) -> str:
    """Formats down: shares of each moment that were flushed or stuck, as bars of 0 to 100 %."""
    rows = [
        (f"{f.name} {m.moment}, {what}", getattr(m, what), colour)
        for f in result.formats for m in f.moments for what, colour in (("flushed", _BAR), ("stuck", _OTHER))
    ]  # fmt: skip
    left, long, top = CHAR_W * max(len(label) for label, _, _ in rows) + 16, 320, 34
    parts = [text(8, 18, f"Moments in fewer bits, {result.steps} steps: share of their elements", bold=True)]
    for i, (label, share, colour) in enumerate(rows):
        y = top + CELL_H * i
        parts.append(text(left - 8, y + 15, label, anchor="end"))
        parts.append(f'<rect x="{left}" y="{y + 3}" width="{long}" height="{CELL_H - 8}" fill="{_FP8}"/>')
        parts.append(f'<rect x="{left}" y="{y + 3}" width="{long * share:.1f}" height="{CELL_H - 8}" fill="{colour}"/>')
        parts.append(text(left + long + 10, y + 15, f"{share:.2%}"))
    y = top + CELL_H * len(rows) + 16
    for f in result.formats:
        said = f"{f.name}: updates ×{f.update_rms_ratio:.4g} as large, weights {f.drift:.3g} of their way off, loss {f.loss:.5f}"
        parts.append(text(8, y, f"{said} ({result.loss:.5f} with moments as they are)"))
        y += 18
    return svg(left + long + 170, y + 4, parts)


def collectives_picture(result: Any) -> str:
    """Formats down: SQNR of the gradients before their sum over the ranks, and of the sum."""
    rows = [
        (f"{f.name}, {what}", db, colour)
        for f in result.formats
        for what, db, colour in (("before", f.sqnr_before_db, _OTHER), ("sum", f.sqnr_after_db, _BAR))
    ]
    most = max((db for _, db, _ in rows if math.isfinite(db)), default=0.0)
    left, long, top = CHAR_W * max(len(label) for label, _, _ in rows) + 16, 320, 34
    parts = [
        text(
            8, 18, f"Gradients of {result.ranks} ranks in fewer bits: SQNR before their sum, and of the sum", bold=True
        )
    ]
    for i, (label, db, colour) in enumerate(rows):
        y = top + CELL_H * i
        wide = long * min(max(db, 0.0), most) / (most or 1.0)
        parts.append(text(left - 8, y + 15, label, anchor="end"))
        parts.append(f'<rect x="{left}" y="{y + 3}" width="{wide:.1f}" height="{CELL_H - 8}" fill="{colour}"/>')
        parts.append(text(left + wide + 10, y + 15, f"{db:.1f} dB"))
    y = top + CELL_H * len(rows) + 16
    largest = result.headroom[0]
    words = f"headroom that the sum takes: {largest.octaves:.1f} octaves at most, of {math.log2(result.ranks):.1f}"
    return svg(left + long + 170, y + 12, [*parts, text(8, y, words)])


def _module_of(name: str, modules: list[str]) -> str:
    return name if name in modules else name.rpartition(".")[0]


def _legend(x: int, y: int, entries: tuple[tuple[str, str], ...]) -> str:
    parts = []
    for colour, words in entries:
        parts.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="{colour}"/>')
        parts.append(text(x + 20, y + 12, words))
        x += 40 + CHAR_W * len(words)
    return "\n".join(parts)
