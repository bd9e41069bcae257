"""What is said of recipe-mismatch: title, cause, and what to change."""

from __future__ import annotations

import re

from fp8watch_server.detect.families import update_words
from fp8watch_server.detect.families.fault_why import IN_EFFECT
from fp8watch_server.detect.finding import Finding, SiteFacts
from fp8watch_server.detect.modes.recipe_mismatch import in_effect
from fp8watch_server.detect.modes.recipe_mismatch.detector import LOADED
from fp8watch_server.detect.phrases import evidence, number, site_words
from fp8watch_server.detect.remedies import Fix, Place
from fp8watch_server.detect.sessions import BLIND_FACT, NOT_GIVEN
from fp8watch_server.detect.switches import recomputation

CAUSES = ("weights", "moments")
"""What was loaded otherwise comes first: codes and scales follow from it."""
IN_TITLE = 3
"""Changes, or names of what was loaded, in the title; the evidence has more of them."""


def words(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    """Title and cause."""
    if update_words.is_one(f.extra.get("kind")):
        return update_words.words(f)
    if f.extra.get("kind") in ("clipping", "sees-ahead"):
        return _of_training(f)
    if f.extra.get("kind") == IN_EFFECT:
        return in_effect.words(f, s)
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
    if f.extra.get("blind"):
        share, _, who = str(value).partition(": ")
        return (
            share[:1].upper() + share[1:],
            f"Attach announced these as observed, and no record of them has come: {who}. A fault in them shows first behind them, "
            "or not at all.",
        )
    if fact == "scale" and f.extra.get("resumed"):
        return (
            f"Scales do not continue at the resume: {site_words(s)} {number(old)} → {number(value)}",
            f"The delayed scales of most sites are not those of {against}: {number(evidence(f, 'median_move'))} octaves off in the "
            "median. The checkpoint did not carry the FP8 state, or it was loaded into other modules.",
        )
    if fact.startswith(LOADED):
        groups = [(c[0].removeprefix(LOADED), c[1]) for c in changes if c[0].startswith(LOADED)]
        groups.sort(key=lambda g: (*CAUSES, g[0]).index(g[0]))
        return (
            f"What was loaded is not what was saved: {groups[0][0]} of {_few(str(groups[0][1]))}",
            "Behind the load these differ from the fingerprint in the checkpoint: "
            + "; ".join(f"{group} of {names}" for group, names in groups)
            + ". The files were damaged or exchanged, or the model was loaded in part or in another dtype.",
        )
    listed = "; ".join(f"{c[0]} {number(c[2])} → {number(c[1])} (against {c[3]})" for c in changes)
    if "recomputation" in against:
        return (
            "Forward and recomputation do not quantise alike",
            f"The forward pass and its recomputation under activation checkpointing use other FP8 settings ({listed}): the "
            "backward pass multiplies operands that the forward never saw.",
        )
    named = [c for c in changes if c[0] != "fingerprint"] or changes or [(fact, value, old, against)]
    if f.extra.get("settings"):
        first = "; ".join(f"{c[0]} {c[2]} → {c[1]}" for c in changes[:IN_TITLE])
        rest = f" and {len(changes) - IN_TITLE} more" if len(changes) > IN_TITLE else ""
        return (
            f"The model's settings are not those of the session before: {first}{rest}",
            "Modules hold other numbers since the restart, which no checkpoint brings back: "
            + "; ".join(f"{c[0]} was {c[2]} and is {c[1]}" for c in changes)
            + ". They are of the model, whatever format it computes in. FP8 is not the cause.",
        )
    title = ", ".join(f"{c[0]} {number(c[2])} → {number(c[1])}" for c in named[:IN_TITLE])
    more = f" and {len(named) - IN_TITLE} more" if len(named) > IN_TITLE else ""
    return (
        f"FP8 configuration changed: {title}{more}" if old not in ("", None) else f"FP8 configuration: {value}",
        f"What decides how operands are quantised is not what it was: {listed}.",
    )


def _few(names: str) -> str:
    """ "a, b, c, d and 4 more of 62" as "a, b, c and 5 more of 62"."""
    found = re.fullmatch(r"(?P<named>.+?)(?: and (?P<more>\d+) more)? of (?P<all>\d+)", names)
    if found is None or len(named := found["named"].split(", ")) <= IN_TITLE:
        return names
    more = len(named) - IN_TITLE + int(found["more"] or 0)
    return f"{', '.join(named[:IN_TITLE])} and {more} more of {found['all']}"


def _of_training(f: Finding) -> tuple[str, str]:
    first = f.evidence[0]
    at = first.since_step
    if f.extra.get("kind") == "clipping":
        often = f.evidence[1]
        gone = first.value == "none"
        taken = " Another optimizer holds the parameters from that step on." if evidence(f, "optimizer") else ""
        return (
            f"Gradients are no longer clipped since step {at}"
            if gone
            else f"Gradients are clipped to {number(first.value)} since step {at}",
            f"clip_grad_norm_ ran with max_norm {number(first.baseline)} in each step before, and in {often.value} steps {often.unit} the norm was "
            f"larger. Since step {at} it {'does not run' if gone else f'runs with {number(first.value)}'}.{taken} FP8 is not the cause.",
        )
    num = f.extra.get("num", 1)
    more = f" and {num - 1} more attention modules" if isinstance(num, int) and num > 1 else ""
    return (
        f"Attention of {first.value}{more} sees later tokens",
        f"At each look before step {at} the mask of {first.value}{more} hid every token behind a query's own; at step {at} some of them take part. A "
        "causal model that sees what it is to predict has a loss that falls too well, and has learnt nothing. Looked at are some heads and "
        "rows, one module after the other: it may be some steps older. FP8 is not the cause.",
    )


def fixes(p: Place) -> list[Fix]:
    """What to change, most likely first."""
    if update_words.is_one(kind := p.extra.get("kind", "")):
        return update_words.fixes(str(kind))
    if p.extra.get("kind") == IN_EFFECT:
        return in_effect.fixes(p)
    if p.extra.get("kind") == "clipping":
        return [
            Fix("code", "Call clip_grad_norm_ between backward and optimizer.step, in each step, with the norm of before; look at what changed at that step or restart."),
            Fix("code", "If it is meant: nothing."),
        ]  # fmt: skip
    if p.extra.get("kind") == "sees-ahead":
        return [
            Fix("code", "Look at what makes the attention mask, and at is_causal, at that step: packing, padding, a cache of masks, another attention backend."),
            Fix("code", "Go back to the checkpoint before that step: what was learnt since is of no use."),
            Fix("code", "If the model is meant to see both ways from here on (prefix LM, span filling): nothing."),
        ]  # fmt: skip
    changes = p.extra.get("changes", [])
    names = {c[0] for c in changes}
    if "coverage" in names:
        left = next((c[1] for c in changes if c[0] == "left_out"), "them")
        return [
            Fix(
                "code", f"Correct the filter so that it matches {left}, or leave them out on purpose and silence this."
            ),
            Fix(
                "code",
                "Print the coverage at start: watch.summary() and the line that attach prints name what is left out.",
            ),
        ]
    if p.extra.get("settings"):
        back = [Fix("code", f"Give {name} what it had: {old}.") for name, _, old, _ in changes[:IN_TITLE]]
        return [
            *back,
            Fix(
                "code",
                "If it is meant: nothing. If not: look at what the model is built from, and at the versions of its libraries.",
            ),
        ]
    if p.extra.get("resumed") and "scale" in names:
        return [
            Fix(
                "code",
                "Load the FP8 state with the checkpoint: scales and amax histories are in the modules' extra state.",
            ),
            Fix("flag", "Save and load with the same flags: --fp8-recipe, --fp8-param-gather, --fp8-amax-history-len."),
        ]
    if BLIND_FACT in names:
        return [
            Fix(
                "code", "Train the model that was attached to: attach after what copies, wraps or replaces its modules."
            ),
            Fix(
                "code",
                "A parameter that `torch.einsum` or another library's kernel multiplies: use `F.linear` or `@`, or leave the "
                "module out with attach(filter_fn=...).",
            ),
        ]
    if any(name.startswith(LOADED) for name in names):
        return [
            Fix("code", "Check the files: fp8watch check-checkpoint PATH. Load them strictly, and all of them."),
            Fix("code", "Where a weight was changed on purpose, leave the watch's state of that checkpoint out."),
        ]
    fixes = [Fix("flag", _back(name, value, old)) for name, value, old, _ in changes if name != "fingerprint"]
    if any("recomputation" in c[3] for c in changes):
        fixes = [*recomputation(p.backend), *fixes]
    return [*fixes, Fix("flag", "Start from the checkpoint with the FP8 flags and the eps with which it was saved.")]


def _back(name: str, value: object, old: object) -> str:
    if old == NOT_GIVEN:
        return f"Leave {name} out, as before."
    return f"Give {name} the value it had: {old}." if old not in (None, "") else f"Resolve: {value}."


_ALTERNATIVES = {
    "clipping": (
        ("optimizer-divergence", "the gradient norm is above what it was clipped to, and loss or weights grow"),
        ("bad-batch", "the norm leaped in one batch, and clipping goes on"),
    ),
    "sees-ahead": (
        ("bad-batch", "the mask is as it was: the loss falls because the data are easier, or come again"),
        ("scalar-shift", "another metric moved in that step: what changed in the configuration besides the mask"),
    ),
    IN_EFFECT: (
        ("quantiser-fault", "the process has the declared setting: the kernel does not do what it is told"),
        ("gradient-underflow", "the eps is the declared one, and gradients are smaller than the format holds"),
        ("scale-rounding", "scales are of the declared kind, and rounded the wrong way"),
    ),
}


def alternatives(f: Finding) -> tuple[tuple[str, str], ...] | None:
    """What else it could be, of findings that are about no change of the recipe; None for those that are."""
    kind = str(f.extra.get("kind", ""))
    return update_words.alternatives(kind) if update_words.is_one(kind) else _ALTERNATIVES.get(kind)
