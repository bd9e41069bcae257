"""What is said of updates that are not what the optimizer computed, and of gradients that are not those of their step.

Shapes:     a finding of `weight_updates` -> title, cause, what to change, what else it could be
Thread:     any
"""

from __future__ import annotations

from fp8watch_server.detect.finding import Finding
from fp8watch_server.detect.phrases import baseline, evidence, number, rank_words
from fp8watch_server.detect.remedies import Fix

_INNOCENT = "FP8 is not the cause."


def is_one(kind: object) -> bool:
    """Whether these words are of such a finding."""
    return kind in _FIXES


def words(f: Finding) -> tuple[str, str]:
    """Title and cause."""
    kind, at, first = f.extra.get("kind"), f.onset, f.extra.get("first") or "a weight"
    if kind == "gradients-left":
        return (
            f"Gradients are not cleared since step {at}: each update is of a sum over steps",
            f"The bits that the optimizer left in .grad behind step {at - 1} were still there where the backward of step {at} began, and it "
            f"added to them. The update is that of several steps' gradients, larger each time. {_INNOCENT}",
        )
    if kind == "rate-below-zero":
        return (
            f"The learning rate is below zero since step {at}: {number(evidence(f, 'lr'))}",
            f"At step {at} the learning rate was {number(evidence(f, 'lr'))}: every update moves the weights up their gradient. As a rule a schedule runs on behind its "
            f"last step, as a linear or a polynomial one does that was made for fewer steps. {_INNOCENT}",
        )
    more = _and_more(f)
    if kind == "gradient-apart":
        return (
            f"The optimizer gets another gradient of {first}{more} than backward gave, since step {at}",
            f"At step {f.step} what the optimizer stepped on differed from what backward had added up in .grad, by {_percent(evidence(f, 'gradient_apart'))} of the norm of {_named(f, first)}, "
            "whatever number it may be multiplied by; at an earlier look it did not. Between the two a micro-batch was lost, another tensor wrote into the buffer, or something "
            f"changes gradients since then. A few parameters are looked at in each step, one after the other: it may have begun earlier, and concern more. {_INNOCENT}",
        )
    if kind == "gradient-sum":
        return _of_sum(f, first, more)
    if kind == "gradient-noise":
        return (
            f"Noise is added to gradients since step {at}",
            f"At step {f.step} what the optimizer stepped on differed from what backward had added up in .grad, by {_percent(evidence(f, 'gradient_apart'))} of the norm of {_named(f, first)}; at an earlier look "
            "it did not. The difference is distributed as normal noise is, and as large where the gradient is small: training adds it, as a rule. If nothing of yours does, gradients are wrong. "
            f"{_INNOCENT}",
        )
    if kind == "gradients-flushed":
        return (
            f"{_percent(evidence(f, 'gradients_flushed'))} of the gradient of {f.extra.get('flushed_of') or first} is 0 when it arrives at the optimizer, since step {at}",
            f"Backward gave these elements as something else: at step {f.extra.get('flushed_at', f.step)} they had become 0 on the way, the smallest of them, and at an earlier look none had. What is summed or divided in a "
            "format of few exponents, and compression, do that to small ones; so does a mask. A few parameters are looked at in each step, one after the other: it may have begun earlier, "
            f"and concern more. {_INNOCENT}",
        )
    if kind == "gradients-cut-off":
        share = _percent(evidence(f, "gradient_cut_off"))
        return (
            f"{share} of the gradient of {first} is 0, and nothing small is left of it, since step {at}",
            f"At step {f.step} {share} of a sample of it are 0, and none of the others is smaller than a quarter of their median; at an earlier look less than half was 0. A gradient "
            "that is sparse because of its data holds small elements too; what was small was set to 0 before the optimizer: in a product or a sum of few exponents, under a loss scale that is too "
            "small for float16, where processes add gradients up, or by a mask. A few parameters are looked at in each step, one after the other: it may have begun earlier, and concern more.",
        )
    if kind == "gradients-other":
        return (
            "Gradients are changed between backward and optimizer, from the first look on",
            f"What the optimizer gets of {number(evidence(f, 'parameters'))} parameters that have been looked at has never been what backward had added up in .grad, whatever number it may be multiplied by. "
            f"Noise, projections and masks that are put on gradients do that, and so do optimizers that mix several gradients (GSAM), and a micro-batch that is lost in every step: the looks do not tell which. {_INNOCENT}",
        )
    if kind == "stepped-again":
        return (
            f"The update of step {at} was applied twice",
            f"Behind step {at} the optimizer stepped once more, on the same gradients: no backward came to a watched module in between, and every gradient that was "
            f"looked at had the bits of before. Moments took them in twice, and weights moved about twice as far. {_INNOCENT}",
        )
    if kind == "update-times":
        times = evidence(f, "update_times")
        far = number(round(times, 2)) if isinstance(times, int | float) else "some"
        return (
            f"Weights move {far} times as far as the optimizer's step since step {at}",
            f"Adam's moments, its learning rate and its decay say how far each weight moves. Of those that were looked at nearly all moved {far} times as "
            f"far along it, at two looks since step {at}: each update is applied {'more than once' if isinstance(times, int | float) and times > 1 else 'in part'}, "
            f"or something scales it behind the optimizer. {_INNOCENT}",
        )
    if kind == "gradients-repeated":
        num = evidence(f, "gradients_repeated")
        more = f" and {num - 1} more" if isinstance(num, int) and num > 1 else ""
        return (
            f"The gradient of {first}{more} is that of the step before",
            f"At step {at} the gradient of {first}{more} was that of the step before times a number, to the last rounding, while other "
            "weights had new ones: the optimizer reads a buffer that this step's backward did not write. A few weights are looked at in each "
            f"step, one after the other: it may have begun earlier, and concern more. {_INNOCENT}",
        )
    if kind == "update-astray":
        share = evidence(f, "update_astray")
        percent = number(round(100 * share)) if isinstance(share, int | float) else "Some"
        return (
            f"{percent} % of the update of {first} does not follow from its gradient",
            f"Each element of a weight moves against its moment, or its gradient, and those of the other weights did. Of {first} {percent} % of "
            f"what was moved did not, twice since step {at}: updates of other rows or of another tensor were added to it (an index that wraps or is off by one, "
            f"moments in another order), or something else writes into it. {_INNOCENT}",
        )
    if kind == "weights-rounded":
        bits, lost = evidence(f, "weight_bits"), evidence(f, "updates_lost")
        share = (
            f" {number(round(100 * lost))} % of the elements with a gradient did not move at all."
            if isinstance(lost, int | float)
            else ""
        )
        like = {8: ", as bfloat16 has", 11: ", as float16 has"}.get(int(bits) if isinstance(bits, int) else 0, "")
        return (
            f"Weights are rounded behind each update since step {at}: {number(bits)} bits of 24",
            f"Of {first} every element that the update moved, of those looked at, holds at most {number(bits)} bits{like}, in a float32 tensor: no copy of full "
            f"precision stands behind it. What is smaller than half a step of that format is lost.{share} {_INNOCENT}",
        )
    if kind == "weights-shrink":
        share, meant = evidence(f, "weights_shrink"), baseline(f, "weights_shrink")
        percent = number(round(100 * share, 2)) if isinstance(share, int | float) else "some"
        asked = f"{number(round(100 * meant, 4))} %" if isinstance(meant, int | float) else "less"
        return (
            f"All weights shrink by {percent} % a step since step {at}",
            f"Every weight that was looked at shrank along itself, by {percent} % in the median; learning rate times weight decay is {asked}. "
            f"Decay that is not multiplied by the learning rate does this, or is applied twice. {_INNOCENT}",
        )
    if kind == "rate-of-group":
        times, num = number(evidence(f, "rate_times")), evidence(f, "parameters")
        some = "1 parameter" if num == 1 else f"{num} parameters"
        return (
            f"The learning rate of {first} is {times} times its share of the others' since step {at}",
            f"{some}, {first} first, got a learning rate at step {at} that is {times} times what it was beside the others'; a schedule moves all "
            f"of them alike. {_INNOCENT}",
        )
    off = number(evidence(f, "recompute_differs"))
    return (
        f"What is recomputed for {first} is not what the forward pass computed",
        f"Activation checkpointing gave {first} other values the second time, off by {off} of their norm at step {at}: the loss is of the first pass and the "
        "gradient of the second. Dropout drew other masks, or what was kept for the backward was written over. A few operands are looked at in each "
        f"step: it may have begun earlier. {_INNOCENT}",
    )


def _named(f: Finding, first: str) -> str:
    """The parameter that was looked at in the step of a finding."""
    unit = next((e.unit for e in f.evidence if e.field == "gradient_apart"), "")
    return unit.rpartition(", ")[2] or first


def _and_more(f: Finding) -> str:
    num = f.extra.get("num")
    return f" and {num - 1} more" if isinstance(num, int) and num > 1 else ""


def _percent(share: object) -> str:
    return f"{number(float(f'{100 * share:.2g}'))} %" if isinstance(share, int | float) else "some"


def _of_sum(f: Finding, first: str, more: str) -> tuple[str, str]:
    """Of gradients that several processes gave."""
    how, num, odd = f.extra.get("how"), f.extra.get("num_ranks"), f.extra.get("odd_ranks") or []
    holders, others = f.extra.get("holders") or [], f.extra.get("others")
    earlier = f"at earlier looks those of {others} others were not" if others else "at an earlier look it was not"
    rows = f" (the rows that {rank_words(holders)} {'hold' if len(holders) > 1 else 'holds'})" if holders else ""
    who, at = rank_words(odd) if odd else "", f.onset
    off = _percent(evidence(f, "gradient_apart"))
    title, why = {
        "missing": (
            f"The gradient of {who} is missing in the sum over {num} processes since step {at}",
            f"It is a multiple of the sum of the others': what {who} gave is not in it. Its data are not trained on.",
        ),
        "twice": (
            f"The gradient of {who} is counted twice in the sum over {num} processes since step {at}",
            f"It is a multiple of that sum with what {who} gave added once more.",
        ),
        "one": (
            f"The optimizer of {who} gets another gradient than those of the other processes since step {at}",
            f"The others got a multiple of the sum, {who} did not: its weights drift away from the others'.",
        ),
        "alone": (
            f"The optimizer of {who} gets its own gradient since step {at}, not the sum over {num} processes",
            f"It is a multiple of what {who} gave itself: the rows that lie there follow its own data alone.",
        ),
        "own": (
            f"Gradients are not added up over {num} processes since step {at}: each steps with its own",
            "Each process got a multiple of what it gave itself. Weights drift apart.",
        ),
    }.get(
        str(how),
        (
            f"Gradients of {num} processes do not add up to what their optimizers get, since step {at}",
            "Neither leaving out what one of them gave nor adding it once more makes it fit: several are missing, something else was added or written over, or "
            "training changes gradients since then.",
        ),
    )
    return title, (
        f"At step {f.step} a linear sketch of {first}{rows}{more}, of what each of {num} processes gave and of what its optimizer got, is off by {off} of its norm, whatever number it may be "
        f"multiplied by; {earlier}. {why} One parameter is looked at in some steps: it may have begun earlier, and concern more. {_INNOCENT}"
    )


_FIXES: dict[str, tuple[str, ...]] = {
    "rate-below-zero": (
        "Give the schedule as many steps as the run has, or hold the rate at its last value (max(0, …) in a LambdaLR).",
        "Go back to the checkpoint before it where the loss has risen since.",
    ),
    "gradient-apart": (
        "Look at what lies between backward and optimizer.step: fused accumulation (gradient_accumulation_fusion, main_grad), buckets that are reused, an overlap that does not wait, hooks.",
        "Compare .grad of this parameter behind each micro-batch with the sum of the micro-batches' own gradients.",
        "If gradients are changed on purpose from here on (noise, masks, projections): silence this.",
    ),
    "gradient-sum": (
        "Look at what reduces gradients: a communication hook, no_sync around a backward that should reduce, buckets whose all-reduce is not waited for, find_unused_parameters, a process that skips a batch.",
        "Compare hashes of the weights between processes: where they differ, go back to the checkpoint before it.",
        "If gradients are changed on purpose from here on (noise, values clipped by code of your own, a communication hook that begins to compress, as PowerSGD's behind start_powerSGD_iter): silence this.",
    ),
    "gradient-noise": (
        "If noise is meant from here on (regularisation, differential privacy): nothing.",
        "If not: look at what writes into gradients between backward and optimizer.step: hooks, a communication hook, a callback.",
    ),
    "gradients-flushed": (
        "Sum gradients in float32 or bfloat16, and divide behind the sum (predivide_factor, gradient_as_bucket_view with a communication hook, grad_reduce_in_fp32).",
        "If they are compressed or masked on purpose from here on: silence this.",
    ),
    "gradients-cut-off": (
        "Raise the loss scale, or compute in bfloat16: float16 holds nothing below 6e-8. Look at what the scaler did at that step.",
        "Let the GEMM of the weight's gradient put out float32 (main_grad, fuse_wgrad_accumulation in FP32), and look at the scales of its operands.",
        "If gradients are made sparse on purpose from here on (the largest alone, masks): silence this.",
    ),
    "gradients-other": (
        "If training changes gradients on purpose (noise, masks, projections): nothing, but this look is blind then.",
        "If not: compare .grad behind each micro-batch with the sum of the micro-batches' own gradients.",
    ),
    "gradients-left": (
        "Call optimizer.zero_grad() between optimizer.step and the next backward, for every optimizer; look at what changed at that step.",
        "Go back to the checkpoint before it where loss or weights have leaped since.",
    ),
    "stepped-again": (
        "Look for a second optimizer.step: in a callback, a retry behind an error or a timeout, a scaler or an engine that steps by itself.",
        "If each step is meant to be applied more than once: silence this.",
    ),
    "update-times": (
        "Look for what writes into the weights besides optimizer.step: an engine that steps as well, a hook, an average that is blended in.",
        "If it is meant (a trust ratio, a look-ahead of your own): silence this.",
    ),
    "gradients-repeated": (
        "Look at buckets and buffers of the gradient reduction: an index that is not swapped, an overlap that does not wait, a parameter whose hook is gone.",
        "Switch overlapped reduction off for a few steps (overlap_comm, overlap_grad_reduce): if it goes, it is there.",
    ),
    "update-astray": (
        "Look at what updates this tensor: a sparse or fused optimizer kernel, 32-bit indices over a large table, a sharded table's row offsets, moments that were loaded in another order.",
        "If training writes into this weight on purpose (renormed rows, pruning, clamping): silence this for it.",
    ),
    "weights-rounded": (
        "Give the optimizer float32 master weights: keep parameters in float32 under autocast, or use an optimizer with master copies or stochastic rounding.",
        "Look at what copies weights back behind each step: a gather, an offload, a checkpoint or an average in bfloat16.",
    ),
    "weights-shrink": (
        "Multiply decoupled weight decay by the learning rate, as torch.optim.AdamW does; look for decay that is applied in the loss and in the optimizer.",
        "Go back to the checkpoint before it: what has shrunk does not come back by itself.",
    ),
    "rate-of-group": (
        "Look at what writes lr into the parameter groups at that step: a schedule that gives all groups one rate, a group that was added with another default.",
        "If the group is meant to learn faster from here on: nothing.",
    ),
    "recompute": (
        "Keep the random state over the recomputation (preserve_rng_state=True, Megatron's CUDA RNG tracker), and draw nothing from it in between.",
        "Look for in-place writes into what was kept for the backward, and at offloading to the host that does not wait for its copy.",
    ),
}  # fmt: skip


def fixes(kind: str) -> list[Fix]:
    """What to change, most likely first."""
    return [Fix("code", text) for text in _FIXES[kind]]


_ALTERNATIVES: dict[str, tuple[tuple[str, str], ...]] = {
    "rate-below-zero": (("scalar-shift", "the rate is 0 or above, and the loss rises"),),
    "gradient-apart": (("bad-batch", "gradients arrive as they were given, and are larger"),),
    "gradient-sum": (("cross-rank-disagreement", "gradients add up, and weights of replicas differ"),),
    "gradient-noise": (("silent-data-corruption", "nothing in training adds noise to gradients"),),
    "gradients-flushed": (("dead-layer", "backward gives zeros already"),),
    "gradients-cut-off": (("dead-layer", "what is left of the gradient holds small elements too"),),
    "gradients-other": (("optimizer-divergence", "gradients arrive as they were given, and updates are too large"),),
    "gradients-left": (("bad-batch", "gradients were cleared, and one batch had larger ones"),),
    "stepped-again": (("scalar-shift", "the optimizer stepped once, and its learning rate was larger"),),
    "update-times": (("scalar-shift", "weights move as far as the moments say, and the rate was set higher"),),
    "gradients-repeated": (("bad-batch", "the gradients of all weights are those of before: the batch came again"),),
    "update-astray": (("recipe-mismatch", "a checkpoint was loaded in that step, with moments of other parameters"),),
    "weights-rounded": (("gradient-underflow", "weights hold all their bits, and gradients are 0"),),
    "weights-shrink": (("silent-data-corruption", "one weight shrinks, the others do not"),),
    "rate-of-group": (("outlier-growth", "no rate changed, and one layer grows"),),
    "recompute": (("kernel-output-fault", "the recomputation agrees, and the product of the GEMM does not"),),
}


def alternatives(kind: str) -> tuple[tuple[str, str], ...]:
    """(slug of what else it could be, how to tell it apart)."""
    return _ALTERNATIVES[kind]
