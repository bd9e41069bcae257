"""What the statistical and static modes say: title and cause in plain words, with the numbers of the finding.

Upstream:   fp8watch_server.detect.finding   Downstream: fp8watch_server.incidents.explain
Shapes:     (Finding, facts) -> text
Thread:     any; pure functions
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from fp8watch_server.detect.finding import Finding, SiteFacts

Words = Callable[[Finding, SiteFacts | None], tuple[str, str]]


def number(value: Any) -> str:
    """A number as people write it: 4 digits, no 1e+00."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "none" if value is None else str(value)
    if isinstance(value, int):
        return str(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Inf" if value > 0 else "-Inf"
    return f"{value:.4g}"


def site_words(facts: SiteFacts | None) -> str:
    """`layers.1.mlp.down_proj input (fprop)`."""
    return f"{facts.module} {facts.operand} ({facts.gemm})" if facts else "the loss"


def tile_words(finding: Finding) -> str:
    """`, tile (37, 1)`, or nothing."""
    return f", tile ({finding.tile[0]}, {finding.tile[1]})" if finding.tile is not None else ""


def channels(finding: Finding, facts: SiteFacts | None) -> str:
    """The channels of the named tile: `channels 128 to 255`, or nothing."""
    if finding.tile is None or facts is None or facts.tile[1] >= facts.shape[1]:
        return ""
    first = finding.tile[1] * facts.tile[1]
    last = min(first + facts.tile[1], facts.shape[1]) - 1
    return f"channel {first}" if first == last else f"channels {first} to {last}"


def evidence(finding: Finding, name: str) -> Any:
    """Value of a piece of evidence, None where it is not there."""
    return next((e.value for e in finding.evidence if e.field == name), None)


def baseline(finding: Finding, name: str) -> Any:
    """Baseline of a piece of evidence."""
    return next((e.baseline for e in finding.evidence if e.field == name), None)


def since(finding: Finding) -> str:
    """`since step 120`, or nothing."""
    steps = [e.since_step for e in finding.evidence if e.since_step is not None]
    return f" since step {min(steps)}" if steps and min(steps) < finding.step else ""


def _power(gain: float) -> str:
    log2 = math.log2(gain) if gain > 0 else 0.0
    return f"2^{round(log2)}" if abs(log2 - round(log2)) < 0.02 and round(log2) else number(gain)


def _dying(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    left = evidence(f, "steps_to_zero")
    ahead = f" At this rate it is zero in {left} steps." if left is not None else ""
    stands = " while its largest stands" if f.extra.get("stands") else ""
    return (
        f"A tile of {site_words(s)} is dying: amax {number(evidence(f, 'amax_min_nonzero'))}",
        f"The smallest tile of {site_words(s)} falls towards zero{since(f)}{stands}. Where a kernel has no "
        f"guard, FP8_MAX/amax becomes Inf and the tile NaN.{ahead}",
    )


def _dead(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    tokens = f.extra.get("tokens")
    got = " It got no tokens." if tokens == 0 else f" It got {tokens} tokens." if tokens is not None else ""
    module = s.module if s else "A layer"
    if evidence(f, "amax_max") is None:
        return (
            f"{module} is dead",
            f"{module} no longer does anything{since(f)}; by how much it fell was not measured.{got}",
        )
    return (
        f"{module} is dead: input and gradient collapsed",
        f"The input of {module} and its gradient are both more than three octaves under what they were{since(f)}: the layer "
        f"adds nothing and learns nothing.{got}",
    )


def _clip(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    where = channels(f, s)
    named = f" The outlier is in {where}." if where else ""
    if f.extra.get("swiglu"):
        named += " The input of a SwiGLU's down projection is where outliers are born: two channels that align."
    return (
        f"Outlier clipped by a delayed scale in {site_words(s)}: clip depth {number(f.extra.get('depth'))}",
        f"The scale of {site_words(s)} comes from the history of amax, and this amax is {number(f.extra.get('depth'))} times what "
        f"that scale can carry: what is above is cut off.{named}",
    )


def _frozen(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    return (
        f"Frozen scale of {site_words(s)}: unchanged while amax moves, clip depth {number(f.extra.get('depth'))}",
        f"The delayed scale of {site_words(s)} no longer answers to its amax{since(f)}. A history that holds a NaN or an Inf keeps "
        "its old scale for good; so does one that is never updated, or that is reduced over the wrong group.",
    )


def _mismatch(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    changes = f.extra.get("changes", [])
    fact, value, old, against = changes[0] if changes else ("recipe", None, None, "the step before")
    kept = {c[0]: c for c in changes}
    if "coverage" in kept:
        covered, names = kept["coverage"], kept.get("left_out")
        return (
            f"FP8 coverage {covered[1]}: {names[1] if names else 'modules'} left out",
            f"{covered[1]} Linears compute in FP8, {covered[2]} did according to {covered[3]}. "
            f"Left in high precision: {names[1] if names else 'unknown'}.",
        )
    if fact == "scale" and f.extra.get("resumed"):
        return (
            f"Scales do not continue at the resume: {site_words(s)} {number(old)} → {number(value)}",
            f"The delayed scales of most sites are not those of {against}: {number(evidence(f, 'median_move'))} octaves off in the "
            "median. The checkpoint did not carry the FP8 state, or it was loaded into other modules.",
        )
    listed = "; ".join(f"{c[0]} {number(c[2])} → {number(c[1])} (against {c[3]})" for c in changes[:4])
    if "recomputation" in against:
        return (
            "Forward and recomputation do not quantise alike",
            f"The forward pass and its recomputation under activation checkpointing use other FP8 settings ({listed}): the "
            "backward pass multiplies operands that the forward never saw.",
        )
    return (
        f"FP8 configuration changed: {fact} {number(old)} → {number(value)}"
        if old not in ("", None)
        else f"FP8 configuration: {value}",
        f"What decides how operands are quantised is not what it was: {listed}.",
    )


def _outlier(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
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
        jumped = f" The loss is {number(loss)}, and was {number(baseline(f, 'loss'))}." if loss is not None else ""
        return (
            f"Outlier in {site_words(s)}: amax leaped{f' by {number(grown)} octaves' if grown is not None else ''}",
            f"amax of {site_words(s)} leaped at step {f.onset}{told}{f', {at}' if at else ''}. Under one scale a few giants take "
            f"the range from the rest.{gap}{jumped}",
        )
    if grown is None:
        return f"Outliers grow in {site_words(s)}", f"amax of {site_words(s)} grows{since(f)}{named}."
    return (
        f"Outliers grow in {site_words(s)}: amax +{number(evidence(f, 'amax_growth'))} octaves",
        f"amax of {site_words(s)} grows away from the other layers{since(f)}{named}. Under one scale a few giants take the range "
        "from the rest.",
    )


def _attention(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    if f.extra.get("bound"):
        parent = s.module.rpartition(".")[0] if s else "attention"
        return (
            f"Attention logits may grow in {parent}: q and k weights +{number(f.extra.get('growth'))} octaves",
            f"The weights of the q and the k projection of {parent} grow together{since(f)}. Logits grow at most with their product; "
            "fused attention hides them, so this is a bound, not a measurement: log max_attention_logit to see them.",
        )
    shared = " BF16 does the same." if f.verdict == "shared" else ""
    where = f" in {f.extra['attention']}" if f.extra.get("attention") else ""
    value = evidence(f, "max_attention_logit")
    return (
        f"Attention logits grow{where}: {number(value)}",
        f"The largest attention logit{where} is {number(value)} and was {number(baseline(f, 'max_attention_logit'))}. Above 100 softmax is "
        f"one-hot; above 1e4 bfloat16 no longer tells neighbours apart.{shared}",
    )


def _inputs_words(f: Finding) -> str:
    """What was measured of the inputs, with its step; or that nothing was."""
    measured = next((e for e in f.evidence if e.field == "input_amax"), None)
    about = f.extra.get("inputs")
    if measured is None or not about:
        return "No input was measured in these steps, so whether the data or the model did it is not known"
    at, usual = f"at step {measured.since_step}", number(measured.baseline)
    if about["ordinary"]:
        return f"Inputs are of ordinary size (largest against its own past: amax {number(measured.value)} {at}, {usual} before)"
    return (
        f"An input is larger than it was (amax {number(measured.value)} {at}, {usual} before: "
        f"{number(about['octaves'])} octaves)"
    )


def _bad_batch(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    loss, usual = number(evidence(f, "loss")), number(baseline(f, "loss"))
    known = bool((f.extra.get("inputs") or {}).get("ordinary"))
    at, inputs = f.onset, _inputs_words(f)
    norm = "Loss and gradient norm" if evidence(f, "grad_norm") is not None else "The loss"
    if f.extra.get("cut") is not None:
        return (
            f"Loss jumped at step {at}: {usual} → {loss}, before values broke at step {f.extra['cut']}",
            f"{norm} jumped at step {at}, {f.extra['cut'] - at} steps before values were no longer finite, or a scale no longer "
            f"right: it did not come from there. {inputs}.",
        )
    if f.extra.get("shift"):
        if not known:
            return (
                f"The loss jumped at step {at} and stays: {usual} → {loss}",
                f"The loss jumped from {usual} to {loss} at step {at} and stays. {inputs}.",
            )
        return (
            f"The data changed at step {at}: loss {usual} → {loss}",
            f"The loss jumped from {usual} to {loss} at step {at} and stays. {inputs}: another mixture or source "
            "of data, or a change of batch or sequence.",
        )
    took = evidence(f, "recovered_after")
    back = f"came back within {took} steps" if took is not None else "came back"
    unlike = ": one batch was unlike the others" if known else ""
    return (
        f"Bad batch at step {at}: loss {usual} → {loss}, and back"
        if known
        else f"Loss jumped at step {at}: {usual} → {loss}, and back",
        f"{norm} jumped at step {at} and {back}. {inputs}{unlike}.",
    )


def _corruption(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    module = s.module if s else "a tensor"
    if f.extra.get("by_hash"):
        odd, host = f.extra.get("odd_ranks", []), f.extra.get("host")
        ranks = f"rank {odd[0]}" if len(odd) == 1 else f"ranks {', '.join(map(str, odd[:8]))}"
        on = f" on {host}" if host else ""
        return (
            f"Weights of {module} differ on {ranks}{on}",
            f"The weight of {module} is not the same on all {f.extra.get('num_replicas')} replicas: {ranks}{on} alone has other bits. "
            "Replicas get the same update, so memory, a link or a core changed it.",
        )
    gradient = (
        "after a gradient of ordinary size: no optimizer does that. A flipped bit in the weight or in the optimizer's state does."
        if f.extra.get("gradient_seen")
        else "and the gradient before it was not measured. A flipped bit in the weight or in the optimizer's state does that; "
        "so does a gradient that was as large."
    )
    alone = ", alone" if evidence(f, "leaping_weights") is not None else ""
    without = " without a gradient" if f.extra.get("gradient_seen") else ""
    return (
        f"Weight of {module} leaped by {number(f.extra.get('octaves'))} octaves{without}",
        f"amax of the weight of {module} leaped by {number(f.extra.get('octaves'))} octaves in one step{alone}, {gradient}",
    )


def _accumulator(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    db = evidence(f, "operand_sqnr_db")
    well = (
        f", while its operands quantise well ({number(db)} dB)"
        if db is not None
        else "; its operands were not measured"
    )
    return (
        f"Accumulator too narrow in {site_words(s)}: error {number(evidence(f, 'gemm_error'))}",
        f"The output of the {s.gemm if s else ''} GEMM of {s.module if s else '?'} is off its shadow by "
        f"{number(evidence(f, 'gemm_error'))} RMS{well}: what is lost, is lost in the sum over "
        f"{number(evidence(f, 'contraction'))} products.",
    )


def _kernel(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    module, gain = s.module if s else "a module", f.extra.get("gain")
    if gain is not None:
        wrong, right = "/".join(f.extra.get("gemms", [])), " and ".join(f.extra.get("right_gemms", []))
        ok = f"; {right} is right" if right else ""
        return (
            f"{wrong} of {module} is {_power(gain)} of its shadow",
            f"The output of {wrong} of {module} is {_power(gain)} times what its operands give{ok}. A factor without noise is a scale that "
            "is missing or applied twice, or bytes that are read in another format: E5M2 read as E4M3 is 2^-7.",
        )
    tokens = f.extra.get("tokens")
    rows = (
        " It got no tokens: nothing was written into its output."
        if tokens == 0
        else f" It got {tokens} tokens."
        if tokens
        else ""
    )
    if not f.extra.get("operands_seen"):
        return (
            f"{s.gemm if s else 'A GEMM'} of {module} returned NaN or Inf",
            f"The output of the {s.gemm if s else ''} GEMM of {module} is not finite. Its operands were not all measured, so whether "
            f"the kernel or what it was given did it is not known.{rows}",
        )
    return (
        f"{s.gemm if s else 'A GEMM'} of {module} returned NaN or Inf from finite operands",
        f"Every operand of the {s.gemm if s else ''} GEMM of {module} is finite, and its output is not: FP8 is innocent, the kernel, "
        f"its padding or memory that nobody wrote is not.{rows}",
    )


def _sensitive(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    modules = f.extra.get("modules", [])
    more = f" and {len(modules) - 1} more" if len(modules) > 1 else ""
    return (
        f"{modules[0] if modules else 'A module'}{more} computes in FP8: {f.extra.get('what', 'a sensitive layer')}",
        f"{', '.join(modules)} {'is' if len(modules) == 1 else 'are'} on the FP8 path. Heads, embeddings, routers and norms stay in high "
        "precision by common practice: their errors reach every token or every expert.",
    )


def _ranks(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    odd, blamed, axes = f.extra.get("odd_ranks", []), f.extra.get("blamed", []), f.extra.get("axes", [])
    ranks = f"rank {odd[0]}" if len(odd) == 1 else f"ranks {', '.join(map(str, odd[:8]))}"
    group = f" It differs along {', '.join(blamed)}" if blamed else ""
    if blamed and axes:
        group += f"; the recipe reduces amax over {', '.join(axes)}"
    return (
        f"Ranks disagree on the scale of {site_words(s)}: {ranks}",
        f"The scale of {site_words(s)} must be the same on {f.extra.get('num_ranks')} ranks, and is not on {ranks}: amax was taken over a "
        f"shard or over the wrong group.{group}{'.' if group else ''}",
    )


def _chronic(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    if f.extra.get("onset") is not None:
        return (
            f"Quantisation noise rose in {site_words(s)}: {number(f.extra.get('sqnr_db'))} dB",
            f"The tile SQNR of {site_words(s)} fell from {number(baseline(f, 'tile_sqnr_db'))} to {number(f.extra.get('sqnr_db'))} dB at step "
            f"{f.extra['onset']}, and nothing else explains it.",
        )
    said = []
    if (db := evidence(f, "tile_sqnr_db")) is not None:
        said.append(f"the tile SQNR is {number(db)} dB")
    if (share := evidence(f, "underflow_ratio")) is not None:
        said.append(f"{number(share)} of the elements become 0")
    what = " and ".join(said)
    return (
        f"Too much quantisation noise in {site_words(s)}{': ' + said[0] if said else ''}",
        f"In most of the measured steps of {site_words(s)}{since(f)}{' ' + what if what else ' too much is lost'}. "
        "No chart shows an onset: it was so from the first of them.",
    )


def _collapse(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    if f.extra.get("grad_scaler"):
        return (
            f"GradScaler halved {evidence(f, 'halvings_without_growth')} times without growing: {number(evidence(f, 'loss_scale'))}",
            "Each halving is an overflow and a step that was skipped. Without growth between them overflows are the rule, and small "
            "gradients vanish at the other end.",
        )
    return (
        f"Scale of {site_words(s)} fell by {number(evidence(f, 'scale_fall'))} octaves",
        f"The delayed scale of {site_words(s)} follows an amax that runs away{since(f)}: "
        f"{evidence(f, 'steps_to_floor')} steps to the floor at this rate.",
    )


def _underflow(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    clamped = f.extra.get("eps_tiles")
    eps = f" {clamped} tiles are clamped by eps {number(s.eps if s else 0)}." if clamped else ""
    return (
        f"Gradients underflow in {site_words(s)}: {number(evidence(f, 'underflow_ratio'))} of them become 0",
        f"The share of gradients that become 0 in the cast rose from {number(baseline(f, 'underflow_ratio'))} to "
        f"{number(evidence(f, 'underflow_ratio'))} in {site_words(s)}{since(f)}.{eps}",
    )


WORDS: dict[str, Words] = {
    "dying-tile": _dying,
    "dead-layer": _dead,
    "delayed-clip": _clip,
    "frozen-scale": _frozen,
    "recipe-mismatch": _mismatch,
    "outlier-growth": _outlier,
    "attention-logit-growth": _attention,
    "bad-batch": _bad_batch,
    "silent-data-corruption": _corruption,
    "accumulator-precision": _accumulator,
    "kernel-output-fault": _kernel,
    "sensitive-layer-quantized": _sensitive,
    "cross-rank-disagreement": _ranks,
    "chronic-quantization-noise": _chronic,
    "scale-collapse": _collapse,
}
STATISTICAL_WORDS: dict[str, Words] = {"gradient-underflow": _underflow}
"""Of modes that the invariants find too: used where the finding says `statistical`."""
