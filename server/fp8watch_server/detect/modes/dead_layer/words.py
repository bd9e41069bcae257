"""What is said of dead-layer: title, cause, and what to change."""

from __future__ import annotations

from fp8watch_server.detect.finding import Finding, SiteFacts
from fp8watch_server.detect.phrases import baseline, evidence, number, since
from fp8watch_server.detect.remedies import Fix, Place


def words(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    """Title and cause."""
    tokens = f.extra.get("tokens")
    got = " It got no tokens." if tokens == 0 else f" It got {tokens} tokens." if tokens is not None else ""
    module = s.module if s else "A layer"
    which = f.extra.get("which")
    if (last := evidence(f, "last_seen")) is not None:
        what = {"not-called": "is no longer called", "frozen": "no longer computes the gradient of its weight"}
        said = what.get(str(which), "no longer gets a gradient")
        return (
            f"{module} {said} since step {last + 1}",
            f"{module} {said}: its last record is of step {last}, while other modules went on.",
        )
    if which == "starved":
        return _starved(f, module)
    if which == "standing":
        return _standing(f, module)
    fell = _fell(f, "amax_max", "input"), _fell(f, "gradient_amax", "gradient")
    if which is None or not any(fell):
        return (
            f"{module} is dead",
            f"{module} no longer does anything{since(f)}; by how much it fell was not measured.{got}",
        )
    if which == "both":
        return (
            f"{module} is dead: input and gradient collapsed",
            f"The input of {module} and its gradient are both more than three octaves under what they were{since(f)} "
            f"({'; '.join(filter(None, fell))}): the layer adds nothing and learns nothing.{got}",
        )
    how = "is all zero" if f.extra.get("zeros") else "collapsed"
    other = f.extra.get("other_measured")
    if which == "input":
        beside = (
            "Its gradient did not fall as far, as behind a residual connection: the layer adds nothing, and the others go on."
            if other
            else "Its gradient was not measured in this step. The layer adds nothing."
        )
        return f"The input of {module} {how}", f"{fell[0]}{since(f)}. {beside}{got}"
    beside = "its input did not" if other else "its input was not measured in this step"
    return (
        f"The gradient of {module} {how}",
        f"{fell[1]}{since(f)}, less what all gradients did; {beside}. The layer no longer learns: its output is "
        f"frozen, cut off or masked.{got}",
    )


def _starved(f: Finding, module: str) -> tuple[str, str]:
    """Experts that the router passes over."""
    names, passed = f.extra.get("experts"), evidence(f, "tokens_of_others")
    several = names is not None and "," in str(names)
    who = "An expert" if names is None else f"Expert{'s' if several else ''} {names}"
    beside = f", while the others got {number(passed)}" if passed is not None else ""
    return (
        f"{who} of {module} {'get' if several else 'gets'} no tokens",
        f"The router sent no token to {who[0].lower()}{who[1:]} of {module}{since(f)}{beside}: starved, {'they learn' if several else 'it learns'} nothing.",
    )


def _standing(f: Finding, module: str) -> tuple[str, str]:
    """Weights that updates do not reach."""
    num, moving = f.extra.get("num_sites", 1), f.extra.get("num_moving")
    whose = f"The weight of {module}" if num == 1 else f"The weights of {module} and {num - 1} more"
    stand = "stands" if num == 1 else "stand"
    gradients = (
        "gradients for it were computed"
        if f.extra.get("sure")
        else "its output had a gradient (whether the weight needs one was not measured); if it is not frozen"
    )
    others = f", while {moving} other weights move" if moving else ""
    return (
        f"{whose} {stand} still{since(f)}: {'' if f.extra.get('sure') else 'frozen, or '}updates do not reach {'it' if num == 1 else 'them'}",
        f"{whose} {stand} still, bit for bit in their largest and smallest tile{since(f)}{others}. The steps ended with an update, and "
        f"{gradients}: the optimizer works on something else than what the forward pass reads, or finds no gradient there (`.grad` is None when it steps). "
        "FP8 is not the cause: weights are stored in higher precision, and were read there.",
    )


def _fell(f: Finding, name: str, what: str) -> str:
    """`input amax 2 → 0`, or nothing."""
    value = evidence(f, name)
    return "" if value is None else f"{what} amax {number(baseline(f, name))} → {number(value)}"


def fixes(p: Place) -> list[Fix]:
    """What to change, most likely first."""
    if p.extra.get("which") == "standing":
        return [
            Fix(
                "code",
                f"Check that the optimizer holds the parameter that the model reads: `any(q is model.get_submodule({p.module!r}).weight for g in optimizer.param_groups for q in g['params'])`.",
            ),
            Fix(
                "code",
                "Look at its `.grad` right before `optimizer.step()`: None there is a gradient that something cleared or detached.",
            ),
            Fix(
                "code",
                "Build the optimizer after `.to()`, weight tying, wrapping and checkpoint loading; build it anew where a module was replaced.",
            ),
            Fix(
                "code",
                "With a master copy or a sharded optimizer: check that the copy back (and the all-gather of parameters) runs for this group.",
            ),
            Fix("code", "If it is frozen on purpose: requires_grad_(False), which also saves its wgrad."),
        ]
    first = (
        "Look at the router: load-balancing loss, capacity factor, expert bias."
        if p.extra.get("tokens") == 0 or p.extra.get("which") in ("not-called", "starved")
        else (f"Look at requires_grad of {p.module} and of what feeds it, and at the gate before it.")
    )
    return [
        Fix("code", first),
        Fix("code", "If it is frozen or pruned on purpose, silence dead-layer for this module."),
    ]
