"""What is said of cross-rank-disagreement: title, cause, and what to change."""

from __future__ import annotations

from fp8watch_server.detect.families.scale_agreement import LEARN_STEPS
from fp8watch_server.detect.finding import Finding, SiteFacts
from fp8watch_server.detect.phrases import rank_words, site_words
from fp8watch_server.detect.remedies import Fix, Place
from fp8watch_server.detect.switches import amax_group, without_reduction


def words(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    """Title and cause."""
    odd, blamed, axes = f.extra.get("odd_ranks", []), f.extra.get("blamed", []), f.extra.get("axes", [])
    ranks, tied = rank_words(odd), f.extra.get("tied")
    group = f" It differs along {', '.join(blamed)}" if blamed else ""
    if blamed and axes:
        group += f"; the recipe reduces amax over {', '.join(axes)}"
    num_ranks = f.extra.get("num_ranks")
    if f.extra.get("learned") is None:
        must = f"must be the same on {num_ranks} ranks"
    else:
        must = f"was the same on {num_ranks} ranks in {LEARN_STEPS} samples or more"
    return (
        f"Ranks disagree on the scale of {site_words(s)}: {ranks}",
        f"The scale of {site_words(s)} {must}, and is not {'between' if tied else 'on'} {ranks}: {_why(f)}.{group}{'.' if group else ''}",
    )


def _why(f: Finding) -> str:
    over = f.extra.get("over")
    if not over:
        return "amax was taken over a shard or over the wrong group"
    if f.extra.get("split"):
        return f"amax is reduced over ranks {over} alone, and others hold parts of the same tensor"
    return f"the process group of its ranks, {over}, is to reduce amax, and did not, or not in the same step on all of them"


def fixes(p: Place) -> list[Fix]:
    """What to change, most likely first."""
    axes, blamed = ", ".join(p.extra.get("axes", [])), ", ".join(p.extra.get("blamed", []))
    over = f" over {axes}" if axes else ""
    missing = f"; now it is not reduced over {blamed}" if blamed else ""
    return [
        *amax_group(
            p.backend,
            f"Reduce amax{over}{missing}: fp8_autocast(fp8_group=...) must be the group of every rank that holds a part.",
        ),
        Fix(
            "code",
            "With tensor parallelism take amax of the whole tensor, not of the shard: all_reduce(amax, MAX) over tp before the scale.",
        ),
        *without_reduction(p.backend),
    ]
