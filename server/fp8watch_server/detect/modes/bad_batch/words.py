"""What is said of bad-batch: title, cause, and what to change."""

from __future__ import annotations

from fp8watch_server.detect.finding import Finding, SiteFacts
from fp8watch_server.detect.modes.bad_batch import batch_words
from fp8watch_server.detect.phrases import baseline, evidence, number
from fp8watch_server.detect.remedies import Fix, Place

ONE_BATCH_STEPS = 3
"""Steps in which a loss is back that one batch moved: that of the batch, and two in which its update shows."""


def _inputs_words(f: Finding) -> str:
    """What was measured of the inputs, with its step; or that nothing was."""
    measured = next((e for e in f.evidence if e.field == "input_amax"), None)
    about = f.extra.get("inputs")
    if measured is None or not about:
        return "No input was measured in these steps, so whether the data or the model did it is not known"
    at, usual = f"at step {measured.since_step}", number(measured.baseline)
    if about["ordinary"]:
        return f"Inputs are of ordinary size (largest against its own past: amax {number(measured.value)} {at}, {usual} before)"
    if about.get("entered"):
        return (
            f"Most inputs are larger than they were, from the first GEMM on (largest against its own past: amax {number(measured.value)} {at}, "
            f"{usual} before: {number(about['octaves'])} octaves)"
        )
    return (
        f"An input is larger than it was (amax {number(measured.value)} {at}, {usual} before: "
        f"{number(about['octaves'])} octaves)"
    )


def level_words(f: Finding) -> str:
    """` by 18 %`, or nothing: of a loss that may be negative, as a log-likelihood is, a share means nothing."""
    loss, usual = evidence(f, "loss"), baseline(f, "loss")
    if not isinstance(loss, int | float) or not isinstance(usual, int | float) or min(usual, loss) <= 0:
        return ""
    return f" by {100 * abs(loss / usual - 1):.0f} %"


def _fell(f: Finding) -> bool:
    loss, usual = evidence(f, "loss"), baseline(f, "loss")
    return isinstance(loss, int | float) and isinstance(usual, int | float) and loss < usual


def _first_gradients(f: Finding) -> tuple[int | None, object] | None:
    """Step and number of the sites that had their first gradient right before."""
    e = next((e for e in f.evidence if e.field == "first_gradients"), None)
    return None if e is None else (e.since_step, e.value)


def words(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    """Title and cause."""
    if f.extra.get("kind"):
        return batch_words.words(f)
    loss, usual = number(evidence(f, "loss")), number(baseline(f, "loss"))
    about = f.extra.get("inputs") or {}
    known, entered = bool(about.get("ordinary")), bool(about.get("entered"))
    at, inputs = f.onset, _inputs_words(f)
    norm = "Loss and gradient norm" if evidence(f, "grad_norm") is not None else "The loss"
    if f.extra.get("cut") is not None:
        return (
            f"Loss jumped at step {at}: {usual} → {loss}, before values broke at step {f.extra['cut']}",
            f"{norm} jumped at step {at}, {f.extra['cut'] - at} steps before values were no longer finite, or a scale no longer "
            f"right: it did not come from there. {inputs}.",
        )
    if f.extra.get("level"):
        healthy = evidence(f, "quantiser_healthy")
        of_fp8 = {
            "yes": " Every quantiser that was looked at is as it was: FP8 is not the cause.",
            "no": " Some quantiser is worse than it was.",
        }
        more = level_words(f)
        return (
            f"The loss {'fell' if _fell(f) else 'rose'}{more} at step {at} and stays: {usual} → {loss}",
            f"The last {number(evidence(f, 'steps_above') or evidence(f, 'steps_below'))} losses are at {loss}, those before step {at} at {usual}."
            f"{of_fp8.get(str(healthy), ' Whether quantisers are as they were was not measured.')} "
            f"{'Easier data, a batch that is repeated, labels that stand in the inputs' if _fell(f) else 'Another mixture or source of data, labels that changed'}, "
            "or a setting of the loss.",
        )
    if (first := _first_gradients(f)) is not None:
        began, num = first
        took = evidence(f, "recovered_after")
        return (
            f"Loss jumped at step {at}, behind parameters that began to train at step {began}: {usual} → {loss}",
            f"{norm} jumped at step {at} and {'stays' if took is None else f'came back within {took} steps'}. {num} sites had their first gradient at "
            f"step {began}, as where parameters are unfrozen: an optimizer that has no moments of them yet moves each by its whole learning rate. {inputs}.",
        )
    if (written := next((e for e in f.evidence if e.field == "weights_changed"), None)) is not None:
        took = evidence(f, "recovered_after")
        return (
            f"Loss jumped at step {at}, behind weights that were written: {usual} → {loss}",
            f"{norm} jumped at step {at} and {'stays' if took is None else f'came back within {took} steps'}. Between the optimizer's last step and this "
            f"one something wrote {number(written.value)} weights {written.unit}: a part that begins anew, a rollback, a load. {inputs}.",
        )
    if f.extra.get("shift"):
        return _not_back(f, entered=entered)
    took = evidence(f, "recovered_after")
    then = evidence(f, "loss_after")
    back = f"came back{f' to {number(then)}' if then is not None else ''}" + (
        f" within {took} steps" if took is not None else ""
    )
    most = bool(f.extra.get("most_of_the_way"))
    brief = (took is None or took <= ONE_BATCH_STEPS) and not most
    seen = evidence(f, "batch_of_step")
    if seen is not None:
        scatter = (
            "What is drawn anew in each step (dropout, noise, masks) scatters a loss that is nearly nothing by that much."
            if f.extra.get("small_loss")
            else "Weights, labels, or what is drawn anew in each step (dropout, noise, masks) did it, or something was computed wrongly in that step."
        )
        return (
            f"Loss jumped at step {at}: {usual} → {loss}, and back, on the batch of step {seen}",
            f"{norm} jumped at step {at} and {back}. What entered the model is bit for bit the batch of step {seen}: it is not the inputs. "
            f"{scatter} {inputs}.",
        )
    if f.extra.get("learnt"):
        return (
            f"Loss jumped at step {at}: {usual} → {loss}, and back",
            f"{norm} jumped at step {at} and {back}. The usual loss is under a fiftieth of the first of the run: where data are learnt by heart, "
            f"one row of a batch that is not is such a jump. {inputs}.",
        )
    several = " Either several batches in a row were unlike the others, or the update of one did harm that was made good, or training has followed data that stay as they are."
    unlike = ": one batch was unlike the others" if (known or entered) and brief else ""
    rows = next((e for e in f.evidence if e.field == "batch_rows"), None)
    if rows is not None:
        return (
            f"A small batch at step {at}: {rows.value} rows where {rows.baseline} are usual, loss {usual} → {loss}, and back",
            f"{norm} jumped at step {at} and {back}. Into the first GEMM went {rows.value} rows, and {rows.baseline} before: the mean of so few "
            f"scatters by {number(round((float(rows.baseline or 1) / max(float(rows.value or 1), 1)) ** 0.5, 1))} times as much. {inputs}.",
        )
    return (
        f"Bad batch at step {at}: loss {usual} → {loss}, and back"
        if (known or entered) and brief
        else f"Loss jumped at step {at}: {usual} → {loss}, and {'most of the way ' if most else ''}back"
        + ("" if brief else f" within {took} steps"),
        f"{norm} jumped at step {at} and {back}. {inputs}{unlike}.{'' if brief else several}",
    )


def _not_back(f: Finding, *, entered: bool) -> tuple[str, str]:
    """Title and cause of a jump that was not back in time: what it is of was not measured, but where inputs or the norm say so."""
    loss, usual, at, inputs = number(evidence(f, "loss")), number(baseline(f, "loss")), f.onset, _inputs_words(f)
    steps = number(evidence(f, "steps_above"))
    jumped = f"The loss jumped from {usual} to {loss} at step {at}, and was not back after {steps} steps"
    title = f"The loss jumped at step {at} and was not back after {steps} steps: {usual} → {loss}"
    if (seen := evidence(f, "batch_of_step")) is not None:
        return (
            title,
            f"{jumped}. What entered the model at that step is bit for bit the batch of step {seen}: "
            f"it is not the inputs, but labels, the weights, or a setting of the loss. {inputs}.",
        )
    if entered:
        return (
            f"What enters the model is larger since step {at}: loss {usual} → {loss}",
            f"{jumped}. {inputs}: data in another unit or without their normalisation, or what stands in front of the first GEMM.",
        )
    norm: dict[object, str] = {
        True: " The gradient norm stays larger too: a spike that takes longer to come back, or a training that diverges.",
        False: " The gradient norm is about what it was, as where another mixture or source of data, other labels or a setting of the loss "
        "begin, and not where training diverges.",
    }
    return title, f"{jumped}. {inputs}.{norm.get(f.extra.get('norm_stays'), '')}"


def fixes(p: Place) -> list[Fix]:
    """What to change, most likely first."""
    about = p.extra.get("inputs")
    if p.extra.get("kind"):
        return batch_words.fixes(p)
    if p.extra.get("level"):
        return [
            p.batch,
            Fix("data", "Compare labels, mixture and tokenizer of the batches before and after that step."),
        ]
    if about and about.get("entered"):
        return [
            p.batch,
            Fix("data", "Compare units, dtype and normalisation of what the loader gives before and after that step."),
        ]
    if p.extra.get("jump_of") == "unfrozen":
        return [
            Fix(
                "flag", "Warm the learning rate up from 0 where parameters begin to train, or give them a smaller one."
            ),
            Fix("code", "Clip the gradient norm at 1.0 over that step."),
        ]
    if p.extra.get("jump_of") == "written":
        return [
            Fix("code", "Look at what runs between two optimizer steps: a load, a rollback, a re-initialisation, an average."),
            Fix("code", "If a part was begun anew on purpose: nothing; a smaller learning rate for it makes the jump smaller."),
        ]  # fmt: skip
    if p.extra.get("jump_of") == "same batch" and not p.extra.get("shift"):
        return [
            Fix(
                "code",
                "Run that step again from the checkpoint before, with the same seed: what differs twice is no chance.",
            ),
        ]
    if not about or not about.get("ordinary"):
        return [
            Fix(
                "code",
                "Measure these steps: attach(..., overhead_budget=None), from the checkpoint before, on the same batches.",
            ),
            p.batch,
        ]
    if p.extra.get("norm_stays"):
        return [
            Fix("code", "Go back to the checkpoint before that step, and skip the batches from there to the jump."),
            Fix("code", "When it comes again: lower the LR by 10 to 20 %, and clip the gradient norm at 1.0."),
            p.batch,
        ]
    if p.extra.get("shift"):
        return [
            p.batch,
            Fix(
                "data",
                "If the mixture was changed on purpose: nothing. Else compare source and tokenizer before and after.",
            ),
        ]
    return [
        p.batch,
        Fix(
            "data",
            "Skip it: keep the ids of bad batches, and go back to the checkpoint before when the loss did not come back whole.",
        ),
        Fix("code", "Clip the gradient norm at 1.0, so that one batch cannot do more."),
    ]
