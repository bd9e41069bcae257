"""Module filter: which Linears run in FP8, and for each other one the reason why not.

FP8: QKV, attention output, MLP, expert Linears. High precision: embeddings, output head, router and gate, norms. After
DeepSeek-V3's technical report (arXiv 2412.19437, section 3.3) and common practice. For the classification see roles.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from fp8watch.layers.class_swap import can_swap
from fp8watch.layers.computed_weight import has_weight, held_weight, is_computed
from fp8watch.layers.fp8_linear import SITE_KEY, WatchedLinear
from fp8watch.layers.wrapped_forward import replaces_forward
from fp8watch.selection.module_roles import roles
from fp8watch.selection.wrappers import named_modules, shows_anothers_weight
from fp8watch_agent.roles import pattern

FilterFn = Callable[[nn.Module, str], "bool | None"]
"""(module, fully qualified name) -> True: FP8, False: not, None: as the precision map says."""

NARROWEST = 16
"""Features on either side of a GEMM that is worth FP8; sizes between multiples of that are padded where a product asks for it."""
WATCHED = "watched already by another attach"
TENSOR_PARALLEL = "DTensor weight (tensor parallel): computes as before"
KEPT = "the recipe leaves it in high precision"


@dataclass(frozen=True)
class LeftOut:
    """A Linear-like module that stays as it is, and why."""

    fqn: str
    reason: str


def select_linears(
    model: nn.Module,
    filter_fn: FilterFn | None,
    in_fp8: Collection[int] = (),
    *,
    observe_only: bool = False,
    kept: Sequence[str] = (),
) -> tuple[list[tuple[str, nn.Linear]], list[LeftOut]]:
    """Linears to take over, in the order of the model's modules, and those left out.

    Args:
        model: whose Linears.
        filter_fn: as for attach.
        in_fp8: ids of those that compute in FP8 by a forward of their own: what is asked of a Linear that is to be
            converted is not asked of them.
        kept: shell patterns of names that the recipe leaves in high precision.
        observe_only: nothing is converted, so that others with a forward of their own can be observed as well.

    Raises:
        TypeError: `filter_fn` is not callable, or returned something else than a bool.
    """
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(f"filter_fn={filter_fn!r}: must be a function (module, fqn) -> bool")
    named = list(named_modules(model))
    role_of = roles(named)
    gathered = gathered_by_fsdp(model)
    taken: list[tuple[str, nn.Linear]] = []
    left: list[LeftOut] = []
    for fqn, module in named:
        if type(module).__module__.startswith("transformer_engine"):
            continue  # observed unchanged, or reported, by attach
        if not isinstance(module, nn.Linear) or shows_anothers_weight(module):
            continue
        reason: str | None = None
        wanted: bool | None = None
        if SITE_KEY in module.__dict__:
            reason = WATCHED
        elif replaces_forward(module) or not (_plain_forward(module) or observe_only or id(module) in in_fp8):
            reason = f"own forward ({type(module).__name__})"
        elif not has_weight(module):
            reason = "without a weight"
        elif is_computed(module) and not _plain_forward(module):
            reason = f"own forward ({type(module).__name__}) with a weight that is computed when it is read"
        elif type(module) is nn.modules.linear.NonDynamicallyQuantizableLinear:
            reason = "never called by MultiheadAttention, which reads its weight"
        elif isinstance(weight := held_weight(module), nn.parameter.UninitializedParameter):
            reason = "lazy: run one batch first"
        elif type(weight.data).__name__ == "DTensor" and id(weight) not in gathered:
            reason = TENSOR_PARALLEL
        elif not weight.is_floating_point() or weight.element_size() not in (2, 4):
            reason = f"weight is {str(weight.dtype).removeprefix('torch.')}: float32, bfloat16 or float16 needed"
        elif not observe_only and id(module) not in in_fp8 and any(fnmatchcase(fqn, p) for p in kept):
            reason = KEPT
        elif filter_fn is not None:
            wanted = filter_fn(module, fqn)
            if not isinstance(wanted, bool | None):
                raise TypeError(f"filter_fn returned {wanted!r} for {fqn!r}: must return True, False or None (default)")
        if reason is None and wanted is None:
            reason = None if id(module) in in_fp8 else role_of.get(id(module))
        elif reason is None and not wanted:
            reason = "filter_fn"
        if reason is None and id(module) not in in_fp8 and min(module.in_features, module.out_features) < NARROWEST:
            reason = f"{module.in_features}×{module.out_features}: narrower than {NARROWEST}"
        if reason is None and not can_swap(module, WatchedLinear):
            reason = f"the class of a {type(module).__name__} cannot be swapped"
        if reason is None:
            taken.append((fqn, module))
        else:
            left.append(LeftOut(fqn, reason))
    return taken, left


def _plain_forward(module: nn.Linear) -> bool:
    return type(module).forward in (nn.Linear.forward, WatchedLinear.forward)


def in_layers(left_out: list[LeftOut]) -> list[LeftOut]:
    """The same module of several layers merged into one."""
    groups: dict[tuple[str, str], list[LeftOut]] = {}
    for m in left_out:
        groups.setdefault((pattern(m.fqn), m.reason), []).append(m)
    return [of[0] if len(of) == 1 else LeftOut(name, reason) for (name, reason), of in groups.items()]


def gathered_by_fsdp(model: nn.Module) -> set[int]:
    """Ids of parameters that FSDP2 shards, and gathers to plain tensors before forward reads them."""
    ids: set[int] = set()
    for module in model.modules():
        if any(c.__name__ == "FSDPModule" for c in type(module).__mro__):
            state: Any = module._get_fsdp_state()  # type: ignore[operator]
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # torch before 2.12: one
            # a DTensor of tensor parallelism is gathered to a DTensor
            ids.update(id(p.sharded_param) for g in groups if g for p in g.fsdp_params if not p.is_dtensor)
    return ids
