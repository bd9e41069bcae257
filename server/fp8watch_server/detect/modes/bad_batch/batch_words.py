"""What is said of batches that were looked at themselves: repeated, wrongly labelled, made of something else."""

from __future__ import annotations

from fp8watch_agent.batch_names import CONCENTRATION, COPIES, MASK, SCORED, SHIFTS, TARGETS
from fp8watch_server.detect.finding import Evidence, Finding
from fp8watch_server.detect.phrases import number
from fp8watch_server.detect.remedies import Fix, Place

INNOCENT = "FP8 is not the cause: this is of what entered the model, before anything was quantised."


def words(f: Finding) -> tuple[str, str]:
    """Title and cause."""
    kind = f.extra.get("kind")
    if kind == "copies":
        return _copies(f)
    return _repeated(f) if kind == "repeated" else _labels(f) if kind == "labels" else _composition(f)


def _of(f: Finding, name: str) -> Evidence | None:
    return next((e for e in f.evidence if e.field == name), None)


def _percent(share: float) -> str:
    return f"{number(round(100 * share, 1))} %"


def _repeated(f: Finding) -> tuple[str, str]:
    lag, run, before = (_of(f, name) for name in ("repeated_batches", "repeated_steps", "batches_before"))
    if lag is None or run is None:
        return "Batches come again", f"What entered the model was there before. {INNOCENT}"
    which = "the batch of the step before" if lag.value == 1 else f"that of {lag.value} steps before"
    fresh = f" {before.value} steps before had batches that all differed." if before is not None else ""
    some = "The same batch" if lag.value == 1 else f"The same {lag.value} batches in turn"
    return (
        f"{some} again and again since step {lag.since_step}",
        f"The inputs of each of the last {run.value} steps are bit for bit {which}; batches come again since step {lag.since_step}.{fresh} "
        f"A model learns them by heart, so a loss that falls says little of other data. {INNOCENT}",
    )


def _copies(f: Finding) -> tuple[str, str]:
    told = _of(f, COPIES)
    if told is None or not isinstance(told.value, int | float) or not isinstance(told.baseline, int | float):
        return "Rows of a batch are copies of each other", f"Rows of a batch are copies of each other. {INNOCENT}"
    at = told.since_step
    return (
        f"{_percent(told.value)} of the rows of a batch are copies of others since step {at}",
        f"In each step since {at} rows came more than once: {_percent(told.value)} of a micro-batch are copies of another row in it, {_percent(told.baseline)} "
        f"at most were before. The batch is smaller than it seems, and its gradient noisier. {INNOCENT}",
    )


def _labels(f: Finding) -> tuple[str, str]:
    told, by = (f.evidence[0] if f.evidence else None), f.extra.get("by")
    if told is None or not isinstance(told.value, int | float) or not isinstance(told.baseline, int | float):
        return "Labels no longer follow from the tokens", f"Labels no longer follow from the tokens. {INNOCENT}"
    gone, at = max(told.baseline - told.value, 0.0), told.since_step
    share = f"{100 * gone:.2g} %" if gone < 0.995 else "All"
    if by is not None:
        far = f"{abs(by)} place{'s' if abs(by) > 1 else ''} {'further on' if by > 0 else 'further back'}"
        return (
            f"{share} of the labels are shifted by {by:+d} since step {at}",
            f"{_percent(told.baseline)} of the scored labels were the token that they are made of, {_percent(told.value)} are since step {at}; most of the "
            f"others are the token {far}: the shift is made twice, or by another rule. {INNOCENT}",
        )
    return (
        f"{share} of the labels no longer follow from the tokens since step {at}",
        f"{_percent(told.baseline)} of the scored labels were the token that they are made of, {_percent(told.value)} are since step {at}: the others are of "
        f"another row, or drawn at random. {INNOCENT}",
    )


def _composition(f: Finding) -> tuple[str, str]:
    told = _of(f, str(f.extra.get("name")))
    if told is None or not isinstance(told.value, int | float) or not isinstance(told.baseline, int | float):
        return "What batches are made of changed", f"What batches are made of changed. {INNOCENT}"
    rose, values = told.value > told.baseline, f"{number(told.baseline)} → {number(told.value)}"
    at = told.since_step
    if told.field == MASK:
        what, why = (
            f"The attention mask {'covers less' if rose else 'hides more'} since step {at}: {values}",
            f"The share of places that are attended to went from {values.replace('→', 'to')} at step {at} and stood there up to step {f.step}: "
            f"{'a mask that no longer reaches the model, or rows with less padding' if rose else 'more padding, or shorter rows'}.",
        )
    elif told.field == SHIFTS[0]:
        what, why = (
            f"{'More' if rose else 'Fewer'} labels stand among the tokens since step {at}: {values}",
            f"The share of scored labels that are the token of their own place went from {values.replace('→', 'to')} at step {at} and stood there up to step {f.step}: "
            f"{'the model sees part of what it is asked for, and a loss that falls says nothing' if rose else 'less of what is asked for is shown'}.",
        )
    elif told.field == SCORED:
        what, why = (
            f"{'More' if rose else 'Fewer'} labels are scored since step {at}: {values}",
            f"The share of labels that the loss scores went from {values.replace('→', 'to')} at step {at} and stood there up to step {f.step}: "
            f"{'padding or prompts that are no longer masked out' if rose else 'more padding, or a mask over more of the row'}.",
        )
    elif told.field == TARGETS:
        one = told.value > 0.999
        what, why = (
            f"All targets are one class since step {at}"
            if one
            else f"Targets are {'of fewer classes' if rose else 'spread over more classes'} since step {at}: concentration {values}",
            f"The chance that two scored targets of a batch are alike went from {values.replace('→', 'to')} at step {at} and stood there up to step {f.step}: "
            f"{'labels that fell back to a default, another order of the data, or a narrower source' if rose else 'another mixture, or labels drawn at random'}.",
        )
    else:
        what, why = (
            f"Tokens are {'less varied' if rose else 'more evenly spread'} since step {at}: concentration {values}",
            f"The chance that two tokens of a batch are alike went from {values.replace('→', 'to')} at step {at} and stood there up to step {f.step}: "
            f"{'repeated text, more padding, or a narrower source' if rose else 'a source that got worse (noise, another encoding), another tokenizer, or another mixture'}.",
        )
    return what, f"{why} {INNOCENT}"


def fixes(p: Place) -> list[Fix]:
    """What to change, most likely first."""
    kind = p.extra.get("kind")
    if kind == "repeated":
        return [
            Fix("data", "Look at the loader: an iterator that is made anew in each step, a sampler without set_epoch, a worker that died, a prefetch that is never advanced."),
            p.batch,
            Fix("data", "If it is meant (a test that a batch can be learnt): silence bad-batch for this run."),
        ]  # fmt: skip
    if kind == "copies":
        return [
            Fix("data", "Look at the seeds of the loader's workers (worker_init_fn, a generator that is copied into each), at sampling with replacement, and at a cache of rows."),
            p.batch,
            Fix("data", "If it is meant (several samples of one prompt): silence bad-batch for this run."),
        ]  # fmt: skip
    if kind == "labels":
        return [
            Fix("data", "Shift once: transformers' losses shift labels themselves, torch's cross_entropy does not. Look at what changed in the collator at that step."),
            p.batch,
            Fix("data", "Decode one row of tokens beside its labels, of a step before and of one after."),
        ]  # fmt: skip
    fix = {
        SHIFTS[
            0
        ]: "Decode one row of tokens beside its labels: look at what hides tokens that are asked for, and at the shift.",
        MASK: "Look at the collator and at what hands attention_mask to the model; compare the row lengths before and after.",
        SCORED: "Look at where labels are set to the ignored index: padding, prompts, document boundaries.",
        TARGETS: "Print some targets of before and after: look at what reads them (a missing key, a join, a default), and at the order of the data.",
        CONCENTRATION: "Decode some rows of before and after; compare source, filter and tokenizer of that shard.",
    }.get(str(p.extra.get("name")), "Compare the batches before and after that step.")
    return [
        Fix("data", fix),
        p.batch,
        Fix("data", "If the mixture was changed on purpose: nothing."),
    ]
