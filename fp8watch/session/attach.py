"""Find the Linears of a model, and its experts, put them on the FP8 path, and return a Watch.

Downstream: fp8watch.session.site_placement
Thread:     training, once

A Linear is taken over by swapping its class, as FSDP2 does: parameters, names, hooks, tied weights, references held
elsewhere, torch.compile, DDP and state_dict do not notice.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import torch
from torch import nn

from fp8watch.integrations import te_modules
from fp8watch.layers import custom_ops
from fp8watch.layers.computed_weight import held_weight
from fp8watch.layers.module_hooks import ForwardEnd
from fp8watch.layers.training_step import LossOfTrainingStep
from fp8watch.observer.probes import ATTENTION_LOGITS, HIGH_PRECISION
from fp8watch.observer.probes import DEFAULT as DEFAULT_PROBES
from fp8watch.observer.probes import select as select_probes
from fp8watch.quantize.backend_choice import backend_of, told_backend
from fp8watch.recipe import resolve_recipe
from fp8watch.selection.expert_precision import computing_experts
from fp8watch.selection.flop_coverage import Coverage, coverage
from fp8watch.selection.foreign_fp8 import foreign_fp8, leave_wrapped, left_as_it_is
from fp8watch.selection.module_filter import WATCHED, FilterFn, LeftOut, select_linears
from fp8watch.selection.module_roles import role_facts
from fp8watch.selection.own_forward import foreign_linears, recipe_of
from fp8watch.selection.own_parameters import select_own
from fp8watch.selection.tied_heads import TiedHead, find_tied_heads
from fp8watch.selection.wrappers import is_lightning_module, named_modules
from fp8watch.session import rerun_cell as run_again
from fp8watch.session.arguments import check_arguments, check_tags, check_url
from fp8watch.session.attach_line import attach_line, run_url, untested_versions
from fp8watch.session.attachment import Attachment, Cadence, Removable, Session
from fp8watch.session.computed_products import ComputedProducts
from fp8watch.session.gemm_choice import choose_gemm, experts_refused, scaled_formats
from fp8watch.session.identity import Identity, identify
from fp8watch.session.module_settings import setting_facts
from fp8watch.session.plan_rows import Watched, look_at_own, make_plan, place_probes
from fp8watch.session.sampling_schedule import HASH_EVERY_STEPS, Schedule, Window
from fp8watch.session.site_placement import observe_te, put_on_sites, told_of, turns_of, with_declared
from fp8watch.session.sites import unobserved_rows
from fp8watch.session.start import start_recorder
from fp8watch.session.torch_optimizers import torch_optimizers
from fp8watch.session.watch import Watch
from fp8watch_agent.guard import Guard
from fp8watch_agent.roles import TIED
from fp8watch_agent.settings import AgentSettings
from fp8watch_agent.standard_error import tell


def attach(
    model: nn.Module,
    *,
    run: str | None = None,
    run_id: str | None = None,
    recipe: object = None,
    filter_fn: FilterFn | None = None,
    every: int = 1,
    tile_maps: str = "triggered",
    overhead_budget: float | None = 0.01,
    optimizer: object = None,
    start_step: int = 0,
    collector: str | None = None,
    backend: str | None = None,
    gemm: str = "auto",
    probes: Sequence[str] | None = None,
    sites: Sequence[str] | None = None,
    windows: Sequence[Window] | None = None,
    hash_every: int = HASH_EVERY_STEPS,
    tags: Sequence[str] = (),
) -> Watch:
    """Put the Linears of `model` on the FP8 path and stream their numerics to a collector.

    Works in place and is reversible: `watch.detach()`, or use it as a context manager. Once attached, the observer
    never raises and changes no number; the compute path raises like any module. At a prompt or in a notebook a model that
    is watched already is attached anew: its watch is detached, its run and steps go on where nothing else is given.

    Args:
        model: any nn.Module; Linears are found by the precision map, see `filter_fn`.
        run: name for people.
        run_id: identity of the run, for one that goes on: that of `watch.state_dict()` in its checkpoint. None: from
            FP8WATCH_RUN or the launcher.
        recipe: None (FP8WATCH_RECIPE; else "observe" for a model that computes in FP8 already, "blockwise" for others),
            one of `fp8watch.recipe.RECIPES` such as "delayed" or "observe" (leave the GEMMs as they are), a Recipe, the
            path of a recipe file, as `fp8watch calibrate` writes it, or a recipe object of Transformer Engine.
        filter_fn: (module, fully qualified name) -> True, False, or None for the default: all but output head, router
            and weights tied to an embedding. Experts in one parameter are asked for by the name of that, "mlp.experts.down_proj".
        every: energies, moments and depth of each operand once in n optimizer steps, of some in each step; of all in the
            first step and in some after a jump or a break. Amax, counts and scales are of each step, but see below.
        tile_maps: "triggered", "all" or "every:N" (of each operand once in N steps): which full tile maps are streamed.
        overhead_budget: share of a step that observing may cost before full statistics come less often than `every`. What
            each step needs is not cut: where that leaves little or nothing, they may cost a quarter of the budget, or half
            of what is beyond it; with recipe "observe" a Linear's amax and counts come once in up to 16 steps as well. None
            switches that off.
        optimizer: the one whose steps count, or a list of those that end a step together: a torch optimizer, or an engine's
            or trainer's that has one inside; default: those that hold watched parameters, or copies of them.
        start_step: number of the first step, from a checkpoint.
        collector: URL; else FP8WATCH_COLLECTOR; else a local spool for `fp8watch sync`.
        backend: which of `fp8watch.kernels.BACKEND_NAMES` quantises, or an error says why it cannot; None: the fastest
            that can.
        gemm: how the GEMMs are computed. "scaled_mm" multiplies codes with torch's block-scaled product (Hopper, recipe
            "blockwise"), or an error says why it cannot. "emulated" multiplies dequantised operands in float32, on any
            device. "auto": on a GPU "scaled_mm", and where that cannot be had the GEMMs stay as they are and are observed,
            because emulation would make training slower; elsewhere "emulated".
        probes: whose outputs are looked at: "norms", "attention", "high_precision" (embeddings, and heads and routers
            that stay in high precision), "attention_logits" (largest logits, sampled, of fused attention too), names and shell patterns;
            None: these four.
        sites: which sites are observed, as shell patterns of "module", "module.operand" or "module.operand.direction",
            such as "layers.0.*" or "*.grad_output.*"; None: all. The others compute as they would, unobserved.
        windows: (first step, step after the last) pairs; outside of them only the scalars of a step are sent. None:
            all steps. For steps that are not known beforehand there are `watch.pause()` and `watch.resume()`.
        hash_every: in so many steps all bits of each weight are hashed once, a part of the weights in each step and the
            same on all ranks, so that the collector can tell which replica differs, so many steps later at most; 0: never.
        tags: of the run, for people to find it by: at most 50 of at most 100 characters. They are added to those it has.

    Raises:
        TypeError, ValueError: an argument or environment variable that cannot work, with value, rule and remedy.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={type(model).__name__}: must be a torch.nn.Module")
    maps = check_arguments(every, tile_maps, overhead_budget, start_step, run)
    schedule, tagged = Schedule.checked(windows, hash_every), check_tags(tags)
    settings = AgentSettings.from_environ(collector=None if collector is None else check_url(collector))
    asked = recipe if recipe is not None else settings.recipe
    computing = foreign_fp8(model)
    foreign, in_fp8 = (computing if asked is None else None), foreign_linears(model)
    chosen = resolve_recipe(
        asked if foreign is None else recipe_of(in_fp8.values()) or "observe", as_it_is=foreign is not None
    )
    if computing is None:
        chosen = with_declared(chosen)
    guard = Guard()
    session = uuid.uuid4().hex
    identity = identify(run_id=run_id) if settings.disabled != "1" else Identity("disabled", "local", 0, 1)

    def say(text: str) -> None:
        if identity.rank == 0:
            tell(text)

    earlier = run_again.before(model) if settings.disabled != "1" else None
    identity, start_step = run_again.goes_on(earlier, identity, start_step)
    cadence = Cadence(
        schedule, max(every, settings.every), maps, overhead_budget, [] if optimizer is None else torch_optimizers(optimizer),
        start_step, settings.merge_steps,
    )  # fmt: skip
    if settings.disabled == "1":
        say("switched off by FP8WATCH_DISABLED=1; the model is untouched")
        return Watch(Attachment(model), Session(chosen, identity, session, guard, say), cadence)

    named = list(named_modules(model))
    linears, left_out = select_linears(
        model, filter_fn, in_fp8, observe_only=chosen.observe_only, kept=chosen.high_precision_modules
    )
    leave_wrapped(linears, left_out)
    te = te_modules.find(named)
    left_out += [LeftOut(fqn, reason) for fqn, reason in te_modules.unseen(named) + te_modules.without_sites(named)]
    device = _device(linears, left_out)
    by = choose_gemm(gemm, chosen, device, len(linears))
    chosen = by.recipe
    formats = scaled_formats(linears, left_out, chosen) if by.how == "scaled_mm" else None
    # loss, steps and probes are recorded of every model, but not twice of one
    again = not linears and not te and any(m.reason == WATCHED for m in left_out)
    observe = settings.disabled != "stats" and not again
    watched, heads = Watched(linears, te=te), list[TiedHead]()
    elsewhere = {id(part) for m in te for part in m.module.modules()} | {id(module) for _, module in linears}
    converts = not chosen.observe_only and not again
    if observe or converts:
        on = device if linears else None
        watched.own = guard.call(
            "own", lambda: select_own(named, model, elsewhere, left_out, on, converts=converts), []
        )
        device = watched.device(device)
    if converts:
        refused = experts_refused(gemm, by, device)
        watched.computing = computing_experts(watched.own, chosen, filter_fn, refused, left_out)
        watched.own = watched.own if observe else watched.only_computing()
    if observe:
        tied: list[TiedHead] = guard.call("heads", lambda: find_tied_heads(named, elsewhere), [])
        heads = [head for head in tied if head.reason is None]
        left_out += [LeftOut(head.fqn, head.reason or TIED) for head in tied]
        watched.heads = heads if HIGH_PRECISION in (DEFAULT_PROBES if probes is None else probes) else []
    chosen_backend = backend_of(chosen, backend, device)
    backend_name = told_backend(chosen, chosen_backend)
    watched.probed = select_probes(named, probes, _observed_as_operands(watched, named, left_out))
    plan, table = make_plan(watched, chosen, chosen_backend, guard, observe=observe, model=model)
    plan.sites.unobserved = unobserved_rows(table, sites)
    seen = [module for _, module in linears] + [m.module for m in te]
    covered = guard.call("coverage", lambda: coverage(named, seen, watched.own, heads), Coverage())
    told: dict[str, str] = guard.call("roles", lambda: role_facts(named, linears), {})
    of_gemms: dict[str, str] = guard.call("device", lambda: by.facts(device), {})
    settings_there: dict[str, str] = guard.call("settings", lambda: setting_facts(named), {})
    told |= watched.expert_facts() | of_gemms | settings_there
    recorder = None
    if plan.slab is not None:
        recorder = guard.run(
            "start",
            start_recorder,
            guard,
            settings,
            identity,
            session,
            run,
            chosen,
            backend_name,
            left_out,
            len(linears),
            model,
            covered.facts() | told,
            tagged,
        )
        if recorder is None:
            plan.slab = None
            guard.emit()
    observer = observe_te(plan, te, left_out, guard, recorder, say)
    custom_ops.add_plan(plan)
    plan.modules.update(module for _, module in linears)
    num_foreign = put_on_sites(plan, linears, in_fp8, formats)
    own_gemms = look_at_own(plan, watched, table) if plan.slab is not None or watched.computing else {}
    plan.step.warming = start_step < chosen.warmup_steps
    plan.as_they_are = chosen.observe_only or (observer is None and all(s.as_it_is or s.probed for s in table))
    plan.canary.cover(turns_of(plan, len(linears), observer, [*own_gemms.values()]), len(plan.sites.rows))
    told_foreign = None if foreign is None else left_as_it_is(foreign, len(linears) - num_foreign, *told_of(plan))
    line = (
        watched,
        left_out,
        chosen,
        backend_name,
        settings,
        identity,
        recorder,
        observer,
        covered,
        told_foreign,
        by,
    )
    if earlier is not None:
        say(f"attached anew: the watch of this model is detached, and step {start_step} comes next")
    say(guard.call("line", lambda: attach_line(*line), f"attached to {len(linears)} Linears"))
    versions = guard.run("versions", untested_versions, model) or []
    for text in (*chosen.warnings, *chosen.declared_not_effective, *versions):
        say(text)
    hook = (
        ForwardEnd(custom_ops.site_tensor(plan, 0)) if chosen.history is not None and (linears or own_gemms) else None
    )
    handles: list[Removable] = [model.register_forward_hook(hook)] if hook is not None else []
    computed = None
    if plan.slab is not None:
        computed = ComputedProducts(model, plan, table)
        handles.append(computed.hook)
        if is_lightning_module(model):
            handles.append(LossOfTrainingStep(model, plan.step, custom_ops.site_tensor(plan, 0), guard))
        handles += guard.call(
            "probes",
            lambda: place_probes(
                plan, table, watched, fused=ATTENTION_LOGITS in (DEFAULT_PROBES if probes is None else probes)
            ),
            [],
        )
    url = None if recorder is None else run_url(settings, identity)
    attachment = Attachment(
        model, plan, table, recorder, handles, observer, own_gemms, watched.own, heads, covered, computed
    )
    try:
        return Watch(attachment, Session(chosen, identity, session, guard, say, url, settings.collector), cadence)
    except BaseException:
        attachment.undo()
        raise


def _device(linears: list[tuple[str, nn.Linear]], left_out: list[LeftOut]) -> torch.device:
    """Where the operands are quantised: the first Linear's device. Linears on others move to `left_out`.

    Raises:
        ValueError: the weights have no values yet.
    """
    device = held_weight(linears[0][1]).device if linears else torch.device("cpu")
    if device.type == "meta":
        raise ValueError(
            f"{linears[0][0]}.weight is on device meta: it has a shape but no values; call attach after "
            'model.to_empty(device="cuda") and loading the weights'
        )
    for fqn, module in list(linears):
        if (on := held_weight(module).device) != device:
            linears.remove((fqn, module))
            left_out.append(LeftOut(fqn, f"on {on}, the first Linear is on {device}"))
    return device


def _observed_as_operands(watched: Watched, named: list[tuple[str, nn.Module]], left_out: list[LeftOut]) -> set[int]:
    """Ids of modules that need no probe as layers in high precision; all, where another watch has Linears of the model."""
    if any(m.reason == WATCHED for m in left_out):
        return {id(m) for _, m in named}
    inside = {id(part) for m in watched.te for part in m.module.modules()}
    return inside | {id(m) for _, m in watched.linears} | {id(own.module) for own in watched.own}
