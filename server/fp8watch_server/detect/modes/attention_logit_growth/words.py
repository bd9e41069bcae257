"""What is said of attention-logit-growth: title, cause, and what to change."""

from __future__ import annotations

from fp8watch_server.detect.finding import Finding, SiteFacts
from fp8watch_server.detect.phrases import baseline, evidence, number, since
from fp8watch_server.detect.remedies import Fix, Place


def words(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    """Title and cause."""
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
    if f.severity == "info":
        return (
            f"Attention logits{where} are {number(value)} before the learning rate is warm",
            f"The largest attention logit{where} is {number(value)}. Above 100 softmax is one-hot. While a model finds its feet that "
            "may pass: it is a warning when it grows from there, or is reached later.",
        )
    return (
        f"Attention logits grow{where}: {number(value)}",
        f"The largest attention logit{where} is {number(value)} and was {number(baseline(f, 'max_attention_logit'))}. Above 100 softmax is "
        f"one-hot; above 1e4 bfloat16 no longer tells neighbours apart.{shared}",
    )


def fixes(p: Place) -> list[Fix]:
    """What to change, most likely first."""
    first = [Fix("code", "Log it to be sure: watch.log(max_attention_logit=...) from an eager pass each 100 steps.")]
    return [
        *(first if p.extra.get("bound") else []),
        Fix("code", "QK norm: an RMSNorm on q and k before the rotary embedding."),
        Fix(
            "code",
            "Or QK clip: scale the weights of q and k down by sqrt(100 / max_attention_logit) when it is above 100.",
        ),
        *([Fix("code", "Do not change FP8 flags for this: BF16 does the same.")] if p.verdict == "shared" else []),
    ]
