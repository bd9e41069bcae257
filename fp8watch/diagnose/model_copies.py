"""Two isolated copies of a model and its optimizer: one on the FP8 path, one in high precision.

Shapes:     a model and its optimizer -> a copy of both; outputs of Linears, at most 64 rows of each
Thread:     the caller's
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fp8watch.layers import custom_ops
from fp8watch.layers.fp8_linear import GEMMS_KEY, SCALED_KEY, SITE_KEY, WatchedLinear, layout, take_over
from fp8watch.layers.module_hooks import ForwardEnd
from fp8watch.layers.shadow_gemm import sampled_rows
from fp8watch.observer.observation_plan import ObservationPlan
from fp8watch.quantize.backend_choice import backend_of
from fp8watch.quantize.per_tensor import DelayedScale
from fp8watch.quantize.site_quantizer import DelayedQuantizer
from fp8watch.recipe import Recipe, resolve_recipe
from fp8watch.selection.expert_precision import computing_experts, refused
from fp8watch.selection.module_filter import FilterFn, select_linears
from fp8watch.selection.own_parameters import select_own
from fp8watch.selection.wrappers import named_modules
from fp8watch.session import attach, plan_rows
from fp8watch_agent.guard import Guard

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel and torch.compile: copies run alone, and uncompiled."""
    while True:
        inner = model.__dict__.get("_modules", {}).get("_orig_mod")
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


def check(model: nn.Module) -> None:
    """Refuse models that cannot be copied onto one rank.

    Raises:
        TypeError: not a module.
        ValueError: sharded parameters, or Transformer Engine's modules.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={type(model).__name__}: must be a torch.nn.Module")
    for name, p in model.named_parameters():
        if hasattr(p, "device_mesh"):
            raise ValueError(
                f"{name} is sharded (DTensor): a copy would need its other ranks; compare on a model that was loaded unsharded"
            )
    for name, module in model.named_modules():
        if type(module).__module__.startswith("transformer_engine"):
            raise ValueError(f"{name} is a module of Transformer Engine: compare with its fp8_autocast(enabled=False)")


@dataclass
class ModelCopy:
    """One copy, its optimizer, and the outputs of its Linears in the current step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    plan: ObservationPlan | None
    linears: dict[str, nn.Linear]
    outputs: dict[str, Tensor] = field(default_factory=dict)

    def watch_outputs(self) -> None:
        """Keep sampled output rows of each Linear's first call in a step, in execution order."""
        for name, module in self.linears.items():
            module.register_forward_hook(self._keeper(name))

    def _keeper(self, name: str) -> Callable[..., None]:
        def keep(_module: nn.Module, _args: Any, output: Any) -> None:
            if name not in self.outputs and isinstance(output, Tensor) and output.numel():
                rows = output.detach().reshape(-1, output.shape[-1])
                self.outputs[name] = rows[sampled_rows(rows.shape[0], 0)].float()

        return keep

    def close(self) -> None:
        """Unregister the plan."""
        if self.plan is not None:
            custom_ops.remove_plan(self.plan)


def recipe_of(model: nn.Module, recipe: object) -> Recipe:
    """The recipe of an attached model, else the requested one.

    Raises:
        ValueError: the recipe computes nothing in FP8.
    """
    plan = plan_of(model)
    chosen = plan.recipe if plan is not None and recipe is None else resolve_recipe(recipe)
    if chosen.observe_only:
        raise ValueError("recipe 'observe' computes as before, so there is nothing to compare; give recipe='blockwise'")
    return chosen


def plan_of(model: nn.Module) -> ObservationPlan | None:
    """The plan of an attached model."""
    for module in model.modules():
        site = module.__dict__.get(SITE_KEY)
        if isinstance(module, WatchedLinear) and site is not None:
            return custom_ops.lookup(site)[0]
    return None


def make_copies(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | MakeOptimizer | None,
    recipe: Recipe,
    filter_fn: FilterFn | None,
    backend: str | None,
) -> tuple[ModelCopy, ModelCopy]:
    """(on the FP8 path, in high precision). Weights, buffers, delayed scales and the optimizer's state are copies.

    Raises:
        ValueError: no Linear is left to compute in FP8.
        TypeError: the optimizer cannot be copied.
    """
    plan = plan_of(model)
    taken = {name for name, m in model.named_modules() if isinstance(m, WatchedLinear) and SITE_KEY in m.__dict__}
    attached = plan is not None and recipe is plan.recipe and filter_fn is None
    fp8, high = copy.deepcopy(model), copy.deepcopy(model)
    chosen: FilterFn | None = (lambda _m, name: name in taken) if attached else filter_fn
    linears, left_out = select_linears(fp8, chosen, kept=recipe.high_precision_modules)
    if not linears:
        raise ValueError("no Linear of this model computes in FP8; give filter_fn, or see what attach leaves out")
    device = attach._device(linears, left_out)
    used = (
        plan.sites.quantizers[0].backend
        if attached and plan is not None and backend is None
        else backend_of(recipe, backend, device)
    )
    if attached and plan is not None:
        _copy_states(model, fp8, plan)
    watched = _with_experts(model, fp8, linears, recipe, None if attached else filter_fn, attached=attached)
    made, table = plan_rows.make_plan(watched, recipe, used, Guard(), observe=False)
    custom_ops.add_plan(made)
    plan_rows.look_at_own(made, watched, table)
    made.modules.update(module for _, module in linears)
    originals = dict(model.named_modules())
    for i, (name, module) in enumerate(linears):
        scaled = originals[name].__dict__.get(SCALED_KEY) if attached else None
        take_over(
            module,
            custom_ops.site_tensor(made, i * len(made.sites.rows)),
            observe_only=False,
            how=layout(recipe),
            scaled=scaled,
        )
    if recipe.history is not None:
        fp8.register_forward_hook(ForwardEnd(custom_ops.site_tensor(made, 0)))
    names = [name for name, _ in linears]
    plain = dict(high.named_modules())
    try:
        copies = (
            ModelCopy(fp8, optimizer_of(optimizer, model, fp8), made, dict(linears)),
            ModelCopy(high, optimizer_of(optimizer, model, high), None, {n: plain[n] for n in names}),
        )
    except BaseException:
        custom_ops.remove_plan(made)
        raise
    for copied in copies:
        copied.watch_outputs()
    return copies


def _with_experts(
    model: nn.Module, copied: nn.Module, linears: list[tuple[str, nn.Linear]], recipe: Recipe, filter_fn: FilterFn | None,
    *, attached: bool,
) -> plan_rows.Watched:  # fmt: skip
    """The Linears of a copy, and its experts that compute in FP8: those of an attached model, else those that attach would
    take."""
    device = linears[0][1].weight.device
    own = select_own(list(named_modules(copied)), copied, {id(m) for _, m in linears}, [], device, converts=True)
    watched = plan_rows.Watched(linears, own=own)
    if attached:
        of = {id(c): m.__dict__.get(GEMMS_KEY) for m, c in zip(model.modules(), copied.modules(), strict=True)}
        gemms = [(p, of[id(o.module)]) for o in own for p in o.parameters]
        watched.computing = frozenset(p.fqn for p, g in gemms if g is not None and p.path in g.computes)
    else:
        watched.computing = computing_experts(own, recipe, filter_fn, refused(recipe), [])
    watched.own = watched.only_computing()
    return watched


def _copy_states(model: nn.Module, copied: nn.Module, plan: ObservationPlan) -> None:
    copies = dict(copied.named_modules())
    for (name, operand), state in delayed_scales(model, plan).items():
        plan_rows.states_of_module.setdefault(copies[name], {})[operand] = state


def delayed_scales(model: nn.Module, plan: ObservationPlan | None = None) -> dict[tuple[str, str], DelayedScale]:
    """(module, operand) -> a copy of the delayed scale that an attached model has; a finished pass is rolled in."""
    plan = plan_of(model) if plan is None else plan
    if plan is None:
        return {}
    over = {id(q.state) for q in plan.sites.quantizers if isinstance(q, DelayedQuantizer) and q.number is not None}
    copies: dict[tuple[str, str], DelayedScale] = {}
    for name, module in model.named_modules():
        for operand, state in plan_rows.states_of_module.get(module, {}).items():
            made = DelayedScale(state.format, state.history, state.scale.device)
            made.load_state_dict(state.state_dict())
            if id(state) in over:
                made.roll()
            copies[name, operand] = made
    return copies


def optimizer_of(
    optimizer: torch.optim.Optimizer | MakeOptimizer | None, model: nn.Module, copied: nn.Module
) -> torch.optim.Optimizer | None:
    """A copy of the optimizer with its state, for the copied parameters; or what a function makes of them.

    Raises:
        TypeError: it cannot be copied.
    """
    if optimizer is None:
        return None
    if not isinstance(optimizer, torch.optim.Optimizer):
        if not callable(optimizer):
            raise TypeError(
                f"optimizer={type(optimizer).__name__}: must be a torch optimizer, or a function parameters -> optimizer"
            )
        return optimizer(copied.parameters())
    memo: dict[int, Any] = {id(p): q for p, q in zip(model.parameters(), copied.parameters(), strict=True)}
    try:
        # state, groups and defaults only: a scheduler's patch of step() is bound to the original
        made: torch.optim.Optimizer = copy.deepcopy(optimizer, memo)
    except Exception as e:
        raise TypeError(
            f"optimizer {type(optimizer).__name__} cannot be copied ({type(e).__name__}: {e}); give optimizer=lambda parameters: …"
        ) from e
    return made
