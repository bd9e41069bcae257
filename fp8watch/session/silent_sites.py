"""What was announced as observed and sends nothing: which modules, why, and what share of the GEMM FLOPs they are.

Shapes:     rows of the slab that were ever measured -> a line for people, facts of the session
Thread:     training

Asked after the first step that was observed, and again where a site comes in later, such as that of an expert without tokens
so far: then the facts are put right. A parameter that was followed and is an array, no weight, is none of the GEMM FLOPs. What was read by something that is not known stays silent; a module that was not called
may come later, so that much of the model is blind is said of those after `ALARM_AFTER_STEPS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

from torch import Tensor

from fp8watch.layers.fp8_linear import SITE_KEY
from fp8watch.layers.local_part import is_dtensor
from fp8watch.layers.moved_linear import DEVICE_KEY, REPLICATED_KEY, UNSEEN_KEY, is_moved
from fp8watch.selection.flop_coverage import MUCH, percent
from fp8watch.selection.own_parameters import LEARNED_ARRAYS
from fp8watch.selection.wrappers import named_modules
from fp8watch.session.attachment import Attachment
from fp8watch.session.gradients_given import GradientsGiven
from fp8watch.session.site_placement import elsewhere
from fp8watch.session.sites import and_more, silent_modules
from fp8watch_agent.fact_lists import MAX_FACT_CHARS, joined
from fp8watch_agent.roles import pattern

ALARM_SHARE = 0.1
"""Of the GEMM FLOPs that were announced: if more of them are silent, people are told so."""

ALARM_AFTER_STEPS = 48
"""Steps in which a module that was announced has time to be called, in one in which its sites have their turn."""

MAX_NAMED = 5
NOT_SEEN = "not called in eager code: inside torch.compile products with own parameters are not seen"
NO_BACKWARD = (
    "its forward is observed; the product is inside a function whose backward is its own, so gradients are not"
)
NOT_KNOWN = "no product with it was recognised"
EVALUATED = (
    "in evaluation mode and without gradients, as a target network or a teacher is: its forwards are not looked at"
)
ARRAY = "an array that enters as activations do, no GEMM weight"
ARRAY_BY_NAME = "no product with it was seen, no GEMM by its name"
MOVED = "on {now} now, and on {then} when attach was called: nothing of it is observed, and nothing in FP8; attach behind .to(device)"
SHARDED = "spread over ranks by tensor parallelism since attach was called: nothing of it is observed, and nothing in FP8; attach behind parallelize_module"
REPLICATED = (
    "run by nn.DataParallel: replicas are not observed, and nothing in them is in FP8; use DistributedDataParallel"
)
READ_ELSEWHERE = "never called as a module: its weight is read elsewhere"
HOLDS = "though its parameters hold a gradient"


class Silence:
    """Compares what one attach announced with what arrived."""

    def __init__(self, attachment: Attachment) -> None:
        self._attachment, self.given = attachment, GradientsGiven()
        self._told: dict[str, str | float] = {
            "not_called": "", "silent": "", "silent_share": "", "blind": "", "not_in_fp8": "",
            "gemm_flops_observed": round(attachment.coverage.observed or 0.0, 4),
            "not_counted": joined(attachment.coverage.not_counted_names()),
        }  # fmt: skip

    def ask(self, arrived: Set[int], unobserved: Set[int], num_steps: int = 1) -> tuple[str, Mapping[str, str | float]]:
        """What to say of it, and the facts of the session that changed since the last time.

        Args:
            arrived: rows that were ever measured.
            unobserved: rows that attach was told to leave alone.
            num_steps: that were observed.
        """
        covered, loud = self._attachment.coverage, ""
        silent = silent_modules(self._attachment.table, arrived, unobserved)
        arrays = self._arrays(silent)
        silent = [name for name in silent if name not in arrays]
        reasons = self._reasons(silent)
        evaluated = self._evaluated(name for name in silent if name not in reasons)
        uncalled = self._uncalled([name for name in silent if name not in reasons and name not in evaluated], silent)
        elsewhere = {name: why for name, why in uncalled.items() if why == READ_ELSEWHERE}
        known = reasons | evaluated | elsewhere
        idle = [
            f"{name} ({why})" if why else name
            for name, why in _by_layers({name: uncalled.get(name, "") for name in silent if name not in known})
        ]
        unseen = [f"{name} ({reason})" for name, reason in _by_layers(known | self._forward_only())]
        high = [f"{name} ({reason})" for name, reason in _by_layers(self._kept_high())]
        counted = covered.without(arrays)
        share, announced = counted.silent(silent), counted.observed or 0.0
        unsaid = counted.silent([name for name in silent if name not in evaluated])
        if unsaid > ALARM_SHARE * announced:
            loud = f"{percent(unsaid)} of the GEMM FLOPs were announced as observed and send nothing"
        for_good = num_steps >= ALARM_AFTER_STEPS or counted.silent(reasons) > ALARM_SHARE * announced
        for_good |= bool(self._told["blind"])  # until it is seen, whatever is known of why
        facts: dict[str, str | float] = {
            "not_called": joined(idle), "silent": joined(unseen), "silent_share": loud,
            "blind": _blind(loud, unseen, idle) if loud and for_good else "", "not_in_fp8": joined(high),
            "gemm_flops_observed": round(max(0.0, announced - share), 4),
            "not_counted": joined([*covered.not_counted_names(), *(f"{name} ({why})" for name, why in _by_layers(arrays))]),
        }  # fmt: skip
        changed = {name: value for name, value in facts.items() if value != self._told[name]}
        self._told = facts
        said = [
            (f"not called as {'modules' if len(idle) > 1 else 'a module'} in the first step: {_some(idle)}", idle),
            (f"not observed: {_some(unseen)}", unseen),
            (f"in high precision, against what was announced: {_some(high)}", high),
        ]
        now = loud if for_good else loud.replace("send nothing", "sent nothing in the first step")
        return "; ".join([text for text, names in said if names] + ([now] if now else [])), changed

    def _arrays(self, silent: Sequence[str]) -> dict[str, str]:
        """Of parameters: those that were followed and are no weights, and those of which only the name speaks, if they are not much."""
        found, shares = {}, self._attachment.coverage.shares
        for fqn in silent:
            gemms, path = self._attachment.own.get(fqn, (None, ""))
            if gemms is None or path not in gemms.sites:
                continue
            if gemms.use.is_array(path):
                found[fqn] = ARRAY
            elif path not in gemms.use.as_factor and LEARNED_ARRAYS.search(path) and shares.get(fqn, 0.0) < MUCH:
                found[fqn] = ARRAY_BY_NAME
        return found

    def step_ended(self) -> bool:
        """A step has; whether it is known since of more weights that they are read elsewhere."""
        return self.given.step_ended()

    def stop(self) -> None:
        """Nothing is asked any more."""
        self.given.stop()

    def _uncalled(self, names: Sequence[str], silent: Sequence[str]) -> dict[str, str]:
        """Of modules that were not called, and whose own parameters hold a gradient all the same: whether these are read elsewhere,
        because backward came to them or a module that is not silent has them too."""
        named = list(named_modules(self._attachment.model))
        modules, probed = dict(named), {s.fqn for s in self._attachment.table if s.probed}
        others = {id(p) for fqn, m in named if names and fqn not in silent for p in m.parameters(recurse=False)}
        found = {}
        for name in names:
            if (module := modules.get(name)) is None or not (SITE_KEY in module.__dict__ or name in probed):
                continue  # what took the place of the one that is meant
            held = [p for p in module.parameters(recurse=False) if _gets_gradient(p)]
            if held:
                read = any(id(p) in others or self.given.came_to(p) for p in held)
                found[name] = READ_ELSEWHERE if read else HOLDS
        return found

    def _evaluated(self, names: Iterable[str]) -> dict[str, str]:
        """Of modules: those that are not in training mode and get no gradient, while others do. What is trained in evaluation
        mode is blind, and no copy. A frozen parameter may keep a gradient from before it was frozen."""
        modules = dict(named_modules(self._attachment.model))
        if not any(_gets_gradient(p) for p in self._attachment.model.parameters()):
            return {}
        idle = ((name, modules[name]) for name in names if name in modules)
        return {
            name: EVALUATED
            for name, module in idle
            if not module.training and not any(_gets_gradient(p) for p in module.parameters())
        }

    def _forward_only(self) -> dict[str, str]:
        own = self._attachment.own
        return {fqn: NO_BACKWARD for fqn, (gemms, path) in own.items() if path in gemms.forward_only}

    def _kept_high(self) -> dict[str, str]:
        """Experts that were to compute in FP8, of which a product does not."""
        own = self._attachment.own
        return {fqn: gemms.kept_high[path] for fqn, (gemms, path) in own.items() if path in gemms.kept_high}

    def _reasons(self, silent: Sequence[str]) -> dict[str, str]:
        """Of modules that were called, or may have been: why nothing of them is seen."""
        own, te, plan = self._attachment.own, self._attachment.te, self._attachment.plan
        found = {}
        if te is not None:
            table = self._attachment.table
            found = {table[row].fqn: reason for row, reason in te.unread.reasons().items()}
        for fqn in silent:
            if fqn in own:
                gemms, path = own[fqn]
                reader = gemms.use.read_by.get(path)
                why = f"read by {reader}, whose product is not recognised" if reader else NOT_KNOWN
                found[fqn] = why if gemms.called else NOT_SEEN
        modules = dict(named_modules(self._attachment.model)) if silent else {}
        for fqn in silent:
            module = modules.get(fqn.removesuffix(f".{own[fqn][1]}") if fqn in own else fqn)
            if module is None:
                continue
            if REPLICATED_KEY in module.__dict__:
                found[fqn] = REPLICATED
            elif is_moved(module) and (UNSEEN_KEY in module.__dict__ or not is_dtensor(next(module.parameters()))):
                found[fqn] = MOVED.format(now=next(module.parameters()).device, then=module.__dict__[DEVICE_KEY])
            elif fqn not in found and module.__dict__.get(UNSEEN_KEY):
                found[fqn] = SHARDED
            elif fqn not in found and plan is not None and (why_not := elsewhere(plan, module)) is not None:
                found[fqn] = why_not
        return {name: found[name] for name in silent if name in found}


def _gets_gradient(p: Tensor) -> bool:
    return p.requires_grad and p.grad is not None


def _blind(loud: str, unseen: Sequence[str], idle: Sequence[str]) -> str:
    """What an incident says of it: the share, and who."""
    who = [*unseen, *([f"not called: {_some(idle)}"] if idle else [])]
    return f"{loud}: {_some(who)}"[:MAX_FACT_CHARS]


def _by_layers(reasons: Mapping[str, str]) -> list[tuple[str, str]]:
    """Layers merged where they have one reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, reason in reasons.items():
        groups.setdefault((pattern(name), reason), []).append(name)
    return [(of[0] if len(of) == 1 else name, reason) for (name, reason), of in groups.items()]


def _some(items: Sequence[str]) -> str:
    return ", ".join(items[:MAX_NAMED]) + and_more(len(items) - MAX_NAMED)
