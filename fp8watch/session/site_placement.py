"""Puts modules on their sites: Linears of the plan's recipe, those with a forward of their own, and Transformer Engine's.

Upstream:   fp8watch.session.attach
Downstream: fp8watch.layers.fp8_linear
Shapes:     modules and the rows of their sites
Thread:     training, once
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from fp8watch.integrations.opacus import lend_rules
from fp8watch.integrations.te_modules import TeModule
from fp8watch.integrations.te_tensors import QuantizedView
from fp8watch.integrations.te_turns import TeTurns
from fp8watch.integrations.transformer_engine import TeObserver
from fp8watch.layers import custom_ops
from fp8watch.layers.foreign_linear import ForeignLinear
from fp8watch.layers.fp8_linear import layout, take_over
from fp8watch.layers.local_part import is_dtensor
from fp8watch.layers.own_turns import OwnGemms
from fp8watch.layers.scaled_linear import Formats
from fp8watch.layers.shadow_gemm import TURN_COLUMNS, TURN_ROWS, Allowed, Factor, check_gemm
from fp8watch.layers.torchao_casts import watch_casts
from fp8watch.observer.foreign import Foreign
from fp8watch.observer.observation_plan import ObservationPlan
from fp8watch.quantize.output_checks import GemmCheck
from fp8watch.recipe import Recipe
from fp8watch.recipe.declared import declared_fp8, not_active
from fp8watch.recipe.torchao import FAST
from fp8watch.selection.module_filter import LeftOut
from fp8watch.selection.own_forward import TORCHAO, has_own_forward
from fp8watch_agent.guard import Guard
from fp8watch_agent.recorder import Recorder

ELSEWHERE = "on {now}, and what is observed is on {rows}: a watch observes what is on one device"


def put_on_sites(
    plan: ObservationPlan,
    linears: Sequence[tuple[str, nn.Linear]],
    in_fp8: Mapping[int, Foreign],
    scaled: Formats | None,
) -> int:
    """Put each Linear on its rows of the slab; returns how many compute in FP8 by a forward of their own.

    Args:
        plan: whose recipe the others compute by, or are observed by.
        linears: in the order of their rows.
        in_fp8: by the id of the module.
        scaled: formats of codes that are multiplied, where they are.
    """
    recipe = plan.recipe
    for i, (_, module) in enumerate(linears):
        first = i * len(plan.sites.rows)
        if has_own_forward(module):
            put_on_site(plan, first, module, in_fp8)
        else:
            site = custom_ops.site_tensor(plan, first)
            take_over(module, site, observe_only=recipe.observe_only, how=layout(recipe), scaled=scaled)
    plan.guard.run("opacus", lend_rules, [module for _, module in linears])
    return len(plan.sites.foreign)


def put_on_site(plan: ObservationPlan, first: int, module: nn.Linear, in_fp8: Mapping[int, Foreign]) -> None:
    """Put a Linear with a forward of its own on its rows of the slab, to be observed as it is."""
    foreign = in_fp8.get(id(module))
    if foreign is not None:
        plan.sites.foreign[first] = foreign
        if foreign.backend == TORCHAO and foreign.casts:
            plan.guard.run("torchao", watch_casts)
    take_over(module, custom_ops.site_tensor(plan, first), observe_only=True, mixin=ForeignLinear)


def turns_of(
    plan: ObservationPlan, num_linears: int, te: TeObserver | None, own: Sequence[tuple[OwnGemms, str]] = ()
) -> list[int]:
    """First rows of the modules whose quantisers and GEMMs are checked in turn: those that compute in FP8, parameters of
    experts (what is seen of their modules, and their paths there) among them."""
    each, foreign = len(plan.sites.rows), plan.sites.foreign
    firsts = [i * each for i in range(num_linears) if not plan.recipe.observe_only or i * each in foreign]
    firsts += [int(gemms.sites[path]) & 0xFFFFFFFF for gemms, path in own if path in gemms.computes]
    there = [] if te is None else [m for m in te.modules if elsewhere(plan, m.module) is None]
    return firsts + [te.rows_of[id(module)][0] for module in there if te is not None]


def elsewhere(plan: ObservationPlan, module: nn.Module) -> str | None:
    """Why nothing of a module is looked at that is on another device than the rows, or None. Where parameters lie between
    forwards says nothing of that on the host, to which they may be offloaded, and nothing where FSDP2 gathers them."""
    first, slab = next(module.parameters(), None), plan.slab
    if slab is None or first is None or first.device.type in ("cpu", "meta") or is_dtensor(first):
        return None
    return None if first.device == slab.device else ELSEWHERE.format(now=first.device, rows=slab.device)


def told_of(plan: ObservationPlan) -> tuple[int, str]:
    """How many modules with a forward of their own are observed in FP8, and by which recipe; for the line of attach."""
    foreign = plan.sites.foreign.values()
    if not foreign:
        return 0, ""
    own = sum(f.recipe is not None and f.site_recipe(plan.recipe, "input") != "observe" for f in foreign)
    reasons = sorted({f.reason or "its configuration is another" for f in foreign} if own < len(foreign) else ())
    if not reasons:
        return len(foreign), f" by their own configuration ({plan.recipe.kind})"
    rest = "" if not own else f", {own} by their own configuration"
    return len(foreign), f" as {plan.recipe.kind}{rest}: {'; '.join(reasons)}"


def _check_codes(
    output: Tensor, left: QuantizedView, right: QuantizedView, bias: Tensor | None, phase: int
) -> GemmCheck:
    """A product of Transformer Engine, in bfloat16 or float32, against the codes that it reads."""
    a, b = (Factor(v.codes.view(v.fmt.dtype), v.scale_inv) for v in (left, right))
    rows, columns = TURN_ROWS, TURN_COLUMNS
    return check_gemm(output, a, b.t(), bias, phase, num_rows=rows, num_columns=columns, allow=Allowed(FAST))


def with_declared(recipe: Recipe) -> Recipe:
    """The recipe with a warning where a trainer was asked for FP8 and nothing in the model computes in it."""
    said = not_active(declared_fp8(), converted=not recipe.observe_only)
    return recipe if said is None else replace(recipe, warnings=(*recipe.warnings, said))


def observe_te(
    plan: ObservationPlan,
    te: list[TeModule],
    left_out: list[LeftOut],
    guard: Guard,
    recorder: Recorder | None,
    say: Callable[[str], None],
) -> TeObserver | None:
    """Observe the Transformer Engine modules; where that cannot be, each is left out with the reason."""
    if plan.slab is None or not te:
        return None

    def entered(backward: bool) -> None:
        if backward:
            plan.step.saw_backward()
        else:
            custom_ops.enter_forward(plan)

    def tell(line: str | None, facts: Mapping[str, str]) -> None:
        if line is not None:
            say(line)
        if recorder is not None:
            recorder.update_facts(facts)

    met = plan.sites.shapes.setdefault
    turns = TeTurns(plan.canary, plan.slab, _check_codes, lambda: plan.observing and plan.stopwatch is None, met)
    observer = TeObserver(
        te,
        len(plan.sites.quantizers),
        plan.record,
        guard,
        entered=entered,
        tell=tell,
        turns=turns,
        output=plan.note_output,
    )
    try:
        reason = observer.start()
    except Exception as error:  # noqa: BLE001 - whatever it is: training goes on without these observations
        guard.swallow("te start", error)
        reason = f"transformer_engine cannot be observed ({type(error).__name__}: {error})"
    if reason is None:
        return observer
    observer.stop()
    left_out += [LeftOut(module.fqn, f"Transformer Engine module: {reason}") for module in te]
    return None
