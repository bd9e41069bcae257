"""What is said of outlier-growth: title, cause, and what to change."""

from __future__ import annotations

from fp8watch_server.detect.finding import Finding, SiteFacts
from fp8watch_server.detect.phrases import baseline, channels, evidence, number, since, site_words
from fp8watch_server.detect.remedies import Fix, Place


def words(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    """Title and cause."""
    where = channels(f, s)
    named = f", worst in {where}" if where else ""
    grown = evidence(f, "amax_growth")
    if f.extra.get("leap"):
        at = f"in {where}" if where else ""
        amax, usual, loss = evidence(f, "amax_max"), baseline(f, "amax_max"), evidence(f, "loss")
        told = f": {number(usual)} → {number(amax)}" if amax is not None and usual is not None else ""
        gap = ""
        if (first := f.extra.get("not_before")) is not None and first < f.onset:
            gap = f" Its usual size was last seen before step {first}, so it may have begun in any step since."
        site, why = site_words(s), "Under one scale a few giants take the range from the rest."
        if f.extra.get("probe") and s is not None:
            site = f"the {s.operand} of {s.module}"
            why = "No quantiser lies between: the module returned it like that."
            if s.operand == "input":
                why = f"{s.module} stays in high precision: what runs before it made it like that."
        elif (depth := evidence(f, "clip_depth")) is not None:
            why += f" The delayed scale clips it at 1/{number(depth)}; a scale of this very tensor would flush the rest instead."
        jumped = f" The loss is {number(loss)}, and was {number(baseline(f, 'loss'))}." if loss is not None else ""
        return (
            f"Outlier in {site}: amax leaped{f' by {number(grown)} octaves' if grown is not None else ''}",
            f"amax of {site} leaped at step {f.onset}{told}{f', {at}' if at else ''}. {why}{gap}{jumped}",
        )
    if f.extra.get("climbed"):
        usual, amax = baseline(f, "amax_max"), evidence(f, "amax_max")
        return (
            f"Outliers grow in {site_words(s)}: amax +{number(grown)} octaves in {f.extra['climbed']} steps",
            f"amax of {site_words(s)} grows in each step{since(f)}: {number(usual)} → {number(amax)}, alone among the weights and "
            "after gradients of ordinary size. What grows step by step is no flipped bit: something writes this weight besides the "
            "optimizer, or its own decay and learning rate are not those of the others.",
        )
    if f.extra.get("together"):
        return _together(f, s)
    if grown is None:
        return f"Outliers grow in {site_words(s)}", f"amax of {site_words(s)} grows{since(f)}{named}."
    return (
        f"Outliers grow in {site_words(s)}: amax +{number(evidence(f, 'amax_growth'))} octaves",
        f"amax of {site_words(s)} grows away from the other layers{since(f)}{named}. Under one scale a few giants take the range "
        "from the rest.",
    )


def _together(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    """Of a weight that left the others behind without a tail."""
    grown, usual = evidence(f, "amax_growth"), baseline(f, "amax_growth")
    amax, before = evidence(f, "amax_max"), baseline(f, "amax_max")
    told = f": {number(before)} → {number(amax)}" if amax is not None and before is not None else ""
    kurtosis, rms = evidence(f, "kurtosis"), evidence(f, "rms_growth")
    tail = (
        f", and the kurtosis is {number(kurtosis)} (was {number(baseline(f, 'kurtosis'))}; a bell curve has 3)"
        if kurtosis
        else ""
    )
    return (
        f"{site_words(s)} grows away from the other weights: amax +{number(grown)} octaves",
        f"amax of {site_words(s)} grows{since(f)}{told}; that of the median weight went up by {number(usual)} octaves. "
        + (
            "Its tail was not measured behind that"
            if rms is None
            else f"As measured last no few elements stand apart in it: the root mean square grew by {number(rms)} octaves"
        )
        + f"{tail}.",
    )


def fixes(p: Place) -> list[Fix]:
    """What to change, most likely first."""
    if p.extra.get("together"):
        return [
            Fix(
                "code",
                f"Nothing need change while its SQNR stays. If {p.module} is not meant to grow faster than the others: look at the "
                "learning rate and the weight decay of its parameter group.",
            )
        ]
    if p.extra.get("probe") and p.operand == "input":
        return [
            Fix("code", f"Look at what runs right before {p.module}: a norm's weight, a residual stream that grows."),
            p.batch,
        ]
    if p.extra.get("probe"):
        return [
            Fix("code", f"Look at what {p.module} returns: its table, its weights, and what scales its output."),
            Fix("code", "A row that ran away: set it back to the checkpoint's, and see which step wrote it."),
            p.batch,
        ]
    return [
        Fix("code", f"If {p.module} is behind a SwiGLU: smooth SwiGLU, which scales its channels apart."),
        p.keep_out,
        Fix("code", "Weight decay on this layer, a lower LR for it, or a clamp of its input."),
    ]
