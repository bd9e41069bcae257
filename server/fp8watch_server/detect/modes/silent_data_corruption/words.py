"""What is said of silent-data-corruption: title, cause, and what to change."""

from __future__ import annotations

from fp8watch_server.detect.families import update_words
from fp8watch_server.detect.families.corruption import loads_most
from fp8watch_server.detect.finding import Finding, SiteFacts
from fp8watch_server.detect.phrases import baseline, evidence, expert_words, number, rank_words
from fp8watch_server.detect.remedies import Fix, Place


def words(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    """Title and cause."""
    if update_words.is_one(f.extra.get("kind")):
        return update_words.words(f)
    if f.extra.get("kind") == "moments":
        return _of_moments(f)
    if f.extra.get("kind") == "weights-written":
        return _of_written(f)
    if f.extra.get("kind") == "no-replicas":
        return _of_parts(f)
    if f.extra.get("kind") == "frozen-written":
        return _of_frozen(f, s)
    module = s.module if s else "a tensor"
    if f.extra.get("kind") == "zeros":
        return _of_zeros(f, module)
    if f.extra.get("by_hash"):
        tied, host, odd = f.extra.get("tied"), f.extra.get("host"), f.extra.get("odd_ranks", [])
        ranks, on = rank_words(odd), f" on {host}" if host else ""
        last, first = f.extra.get("last_agreed"), f.extra.get("first_differed")
        if last is not None and first is not None:
            when = f", since a step from {last + 1} to {first}" if first > last + 1 else f" since step {first}"
            found = (
                f" It happened after step {last}, where their hashes agreed last, and not after step {first}, where they were "
                "compared next: each weight is hashed once in some steps."
            )
        elif first is not None:
            when = f", found at step {first}"
            found = f" It was found at step {first}; their hashes were not compared before, so it may be older."
        else:
            when = found = ""
        if tied:
            who = f"none of them has most of the others on its side, so hashes do not tell which is right ({ranks})."
        else:
            who = f"{ranks}{on} alone {'has' if len(odd) == 1 else 'have'} other bits."
        return (
            f"Weights of {module} differ {'between' if tied else 'on'} {ranks}{on}{when}",
            f"The weight of {module} is not the same on all {f.extra.get('num_replicas')} replicas: {who} "
            f"Replicas get the same update, so memory, a link or a core changed it.{found}",
        )
    gradient = (
        "after a gradient of ordinary size: no optimizer does that. A flipped bit in the weight or in the optimizer's state does."
        if f.extra.get("gradient_seen")
        else "and the gradient before it was not measured. A flipped bit in the weight or in the optimizer's state does that; "
        "so does a gradient that was as large."
    )
    if f.extra.get("written"):
        gradient = _of_writes(f)
    loaded = bool(f.extra.get("written")) and loads_most(*f.extra["written"][:2])
    alone = ", alone" if evidence(f, "leaping_weights") is not None and not loaded else ""
    without = " without a large gradient" if f.extra.get("gradient_seen") else ""
    last, at = f.extra.get("between") or (-1, 0)
    since, within = "", "in one step"
    if 0 <= last < at - 1:
        since, within = f", since a step from {last + 1} to {at}", f"between the looks at steps {last} and {at}"
    if f.extra.get("written"):
        it = f.extra["written"][2]
        without = (
            ": something wrote it while no optimizer ran"
            if it
            else ", where weights were written while no optimizer ran"
        )
    return (
        f"Weight of {module}{expert_words(f)} leaped by {number(f.extra.get('octaves'))} octaves{without}{since}",
        f"amax of the weight of {module}{expert_words(f)} leaped by {number(f.extra.get('octaves'))} octaves {within}{alone}, {gradient}",
    )


def _of_writes(f: Finding) -> str:
    """What is known of a weight that leaped where something wrote weights."""
    changed, looked, it = f.extra["written"]
    whose = "its own" if it and changed == 1 else f"those of {changed}"
    which = ", its own among them," if it and changed > 1 else ""
    if loads_most(changed, looked):
        return (
            f"where something wrote weights between two steps of the optimizer: some elements of each of {looked} weights are held against what it left "
            f"behind its step before, and {whose}{which} were others. A model that is loaded again, or drawn anew, does this: behind a search for the "
            "learning rate, at a rewind, or for another fold of the data. Where nothing of the kind is meant, memory was overwritten."
        )
    return (
        f"where something wrote {'it' if it and changed == 1 else 'weights'} between two steps of the optimizer: some elements of each of {looked} weights are held against what it left "
        f"behind its step before, and {whose}{which} were others. A weight that is drawn anew, adapters that are merged into it and a load of one part do "
        "this, and memory of which a part was lost. A bit that flips does it too, but is seen there only where it lies in these few elements."
    )


def _of_zeros(f: Finding, module: str) -> tuple[str, str]:
    share, before = evidence(f, "zeros"), baseline(f, "zeros")
    now, was = (
        f"{number(float(f'{100 * v:.3g}'))} %" if isinstance(v, int | float) else "some" for v in (share, before)
    )
    last = f.extra.get("last_at")
    since = f"step {f.step}" if last == f.step - 1 else f"a step from {f.onset} to {f.step}"
    more = evidence(f, "weights")
    others = "other weights have none that are new" if more == 1 else f"so of {more} weights"
    return (
        f"{now} of the weight of {module} became exactly 0, since {since}",
        f"At step {f.step} {now} of the elements of the weight of {module} are exactly 0, and {was} were at step {last}; {others}. No optimizer makes an element "
        "0: a page that came back empty, a shard that did not arrive or rows that nobody wrote do, and so does pruning. FP8 is not the cause: "
        "they are 0 before the cast.",
    )


def _of_moments(f: Finding) -> tuple[str, str]:
    changed, looked, name = f.extra.get("changed"), f.extra.get("looked"), f.extra.get("first") or "a moment"
    some = "all" if changed == looked else f"{changed}"
    more = "" if changed == 1 else f", and {changed - 1} more," if isinstance(changed, int) else ""
    return (
        f"The optimizer's state changed before step {f.step} while no optimizer ran: {some} of {looked} moments",
        f"{name}{more} is not what the optimizer left behind its step before, and the weights are. Some elements of each of the {looked} "
        "moments are held against what they were. A load of the optimizer's state alone does this, code that writes into it, or memory "
        "that changed by itself. FP8 is not the cause: moments are not quantised by its recipe.",
    )


def _of_written(f: Finding) -> tuple[str, str]:
    changed, looked = f.extra.get("changed"), f.extra.get("looked")
    some = "all" if changed == looked else f"{changed}"
    first = f", {'' if changed == 1 else 'the first '}{f.extra['first']}" if f.extra.get("first") else ""
    return (
        f"Weights were written before step {f.onset} while no optimizer ran: {some} of {looked}{first}",
        f"Some elements of each of {looked} weights are held against what the optimizer left behind its step before: those of {some} were others at step {f.onset}, and no "
        "moment was. It was the first time that this was seen in this run. An average that is put in the place of weights and left there, a load of weights alone, clamping and pruning do this, and "
        "masters that are put together wrongly, or memory that changed by itself. FP8 is not the cause: weights are not changed by its recipe.",
    )


def _of_frozen(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    num, of, (last, first) = f.extra.get("num"), f.extra.get("num_frozen"), f.extra.get("between") or (-1, f.step)
    module = s.module if s else "a module"
    one = num == 1
    who = f"The weight of {module}, which had stood, was" if one else f"{num} of {of} weights that had stood were"
    when = f"before step {first}" if last == first - 1 else f"between steps {last} and {first}"
    return (
        f"{who} written {when}{'' if one else f', {module} the first'}",
        f"{'Its hash' if one else 'Their hashes'} had been the same at three looks, {'was another one' if one else 'were others'} at the look of step {first} or later, and "
        f"{'was' if one else 'were'} the same again at the look behind it: what is trained moves at each. Adapters that are merged into their base do this, a load in part, a cast or an offload, and "
        "memory that changed by itself. FP8 is not the cause: weights are not changed by its recipe.",
    )


def _of_parts(f: Finding) -> tuple[str, str]:
    parts, num, looks = f.extra.get("parts"), f.extra.get("num_ranks"), f.extra.get("looks")
    each = "Each rank" if parts == num else f"Each of {number(parts)} parts of the ranks"
    off = evidence(f, "gradients_apart")
    how_far = f": {number(off)} of its norm lies between those of two" if isinstance(off, int | float) else ""
    return (
        f"{number(num)} ranks train {number(parts)} sets of weights: these get no gradients of each other",
        f"{each} got the sum of its own gradients alone, of {number(looks)} that were looked at since step {number(f.extra.get('since'))}{how_far}, and {number(evidence(f, 'differing_weights'))} of the "
        f"weights that were compared at step {f.step} differ between them. They are no replicas, so a weight that differs is none that something changed. As a rule this is meant: local SGD and DiLoCo (torch's "
        "PostLocalSGDOptimizer with a model averager) average parameters now and then instead. It is not where each step was to average gradients. "
        "Ranks that share their gradients are compared as ever. This is said once.",
    )


def fixes(p: Place) -> list[Fix]:
    """What to change, most likely first."""
    if update_words.is_one(kind := p.extra.get("kind", "")):
        return update_words.fixes(str(kind))
    if p.extra.get("kind") == "moments":
        return [
            Fix("code", "Look at what runs between two optimizer steps there: load_state_dict, a rollback, a hook that writes into optimizer.state."),
            Fix("code", "Load weights and optimizer state from one checkpoint, both or neither."),
            Fix("hardware", "Where nothing of it runs: drain the node of that rank, and test its memory."),
        ]  # fmt: skip
    if p.extra.get("kind") == "weights-written":
        return [
            Fix("code", "Look at what runs between two optimizer steps there: an evaluation that swaps averages in and does not swap them out, a hook, a callback, a gather or an offload."),
            Fix("code", "If it is meant (averages that are written back, clamping, pruning): nothing."),
        ]  # fmt: skip
    if p.extra.get("kind") == "frozen-written":
        return [
            Fix("code", "Look at what runs between these steps: merge_and_unload, merge_adapter without unmerge_adapter, load_state_dict, a cast, an offload."),
            Fix("code", "If it is meant (adapters merged into their base, a part that is loaded anew): nothing."),
        ]  # fmt: skip
    if p.extra.get("kind") == "no-replicas":
        return [
            Fix("code", "If parameters are averaged now and then (local SGD, DiLoCo), or the ranks are trainings of their own: nothing."),
            Fix("code", "If gradients are to be averaged in each step: wrap the model in DistributedDataParallel and call the wrapped one, not its .module; look for a no_sync that is never left."),
        ]  # fmt: skip
    if p.extra.get("kind") == "zeros":
        return [
            Fix("code", "Look at what wrote this weight between the two steps: a gather or a broadcast, an offload, a shared buffer, a fused update. If it is pruned on purpose: nothing."),
            Fix("hardware", "Where nothing of it runs: drain the node of that rank, and test its memory."),
            Fix("code", "Go back to the checkpoint before it: what is lost does not come back by itself."),
        ]  # fmt: skip
    if p.extra.get("written"):
        return [
            Fix("code", "Look at what writes weights between two optimizer steps there: a reset of layers, a head that is drawn anew, a merge of adapters, a load, a callback. If it is meant: nothing."),
            Fix("hardware", "Where nothing of it runs: drain the node of that rank, and test its memory."),
            Fix("code", "Then go back to the checkpoint before it."),
        ]  # fmt: skip
    host = p.extra.get("host")
    node = f"Drain {host or 'the node of that rank'} and test its memory and links; keep it out until it passes."
    if p.extra.get("tied"):
        node = f"Test memory and links of {host or 'the nodes of these ranks'}: the hashes do not tell which of them is wrong."
    return [
        Fix("hardware", node),
        Fix(
            "code",
            "Recompute the step from the checkpoint before on other hardware and compare the weights bit by bit.",
        ),
        Fix(
            "code",
            "Reload: take weights and optimizer state from a replica that agrees with most of the others, or from the checkpoint.",
        ),
    ]


def alternatives(f: Finding) -> tuple[tuple[str, str], ...] | None:
    """What else it could be, of findings about updates and gradients; None for the others."""
    kind = f.extra.get("kind", "")
    return update_words.alternatives(str(kind)) if update_words.is_one(kind) else None
