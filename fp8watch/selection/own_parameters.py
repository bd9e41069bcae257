"""Modules that multiply with parameters of their own, besides Linears: which of them are observed, and under what names.

Thread:     training, once

Experts in one 3-D tensor, Conv1D, a fused projection as a Parameter, nn.MultiheadAttention, Linears with a forward of
their own. Their GEMMs compute as before, but for those of experts (`expert_precision`). Routers, heads and embeddings stay
out as those of Linears do, and so do convolutions and recurrent layers, whose products are no calls that can be seen.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList

from fp8watch.layers.fp8_linear import SITE_KEY
from fp8watch.layers.local_part import is_dtensor, local_part
from fp8watch.layers.own_class import refuses, watched_class
from fp8watch.observer.probes import is_norm
from fp8watch.selection.module_filter import TENSOR_PARALLEL, LeftOut, gathered_by_fsdp
from fp8watch.selection.own_forward import FP8_NAME
from fp8watch_agent.roles import role_of

OWN_FORWARD = "own forward"
"""How the reason begins with which a subclass of Linear is left out of the FP8 path."""

LEARNED_ARRAYS = re.compile(r"(?:^|\.)(?:latents|queries|registers|mems?|memories|mem_[kv])$", re.IGNORECASE)
"""Names of learned arrays that enter as activations do: Perceiver's latents, queries of a decoder, memory tokens. They are observed, for
a product may read them; the name speaks where what is computed from them says nothing, and where they would not be much."""
NO_GEMM = re.compile(
    r"embed|bias|norm|_log$|(?:^|[_.])(?:pos|positions?|positional|tokens?|scales?|scaling)(?:$|[_.\d])", re.IGNORECASE
)
"""Names of parameters that are looked up, added or multiplied element by element. Names only: `flop_coverage` says which
were passed over, because a product may read them all the same."""

_OTHERS = (nn.Embedding, nn.EmbeddingBag, nn.RNNBase, nn.RNNCellBase, nn.Bilinear, _ConvNd)
_LISTS = (nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True)
class OwnParameter:
    """One parameter that products read."""

    fqn: str  # of its sites
    path: str  # from the module
    num_experts: int  # 0: none


@dataclass(frozen=True)
class OwnModule:
    """A module whose products with its own parameters are observed."""

    fqn: str
    module: nn.Module
    parameters: list[OwnParameter] = field(default_factory=list)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Its parameters that are observed."""
        for parameter in self.parameters:
            yield self.tensor(parameter)

    def tensor(self, parameter: OwnParameter) -> torch.Tensor:
        """One of them."""
        found: Any = self.module
        for name in parameter.path.split("."):
            found = getattr(found, name)
        return found  # type: ignore[no-any-return]


def is_gemm_weight(name: str, parameter: Any) -> bool:
    """Whether a parameter looks as if a product read it: two dimensions or more, and not named as what is added or
    looked up."""
    if isinstance(parameter, UninitializedParameter) or not parameter.is_floating_point():
        return False
    return sum(n > 1 for n in parameter.shape) >= 2 and (name == "weight" or not NO_GEMM.search(name))


def select_own(
    named: Sequence[tuple[str, nn.Module]], model: nn.Module, taken: Container[int], left_out: list[LeftOut],
    device: torch.device | None, *, converts: bool = False,
) -> list[OwnModule]:  # fmt: skip
    """Modules to observe. What `left_out` says of their parts that are observed this way is taken out of it.

    Args:
        named: modules under the names that sites have.
        model: they belong to.
        taken: ids of modules that are observed in another way.
        left_out: Linears that are not on the FP8 path; reasons of other modules are added.
        device: of the other operands; None: any, the first one's is taken.
        converts: Linears are put on the FP8 path: those that are not stay in `left_out`, although they are observed.
    """
    own_forward = {m.fqn for m in left_out if m.reason.startswith((OWN_FORWARD, TENSOR_PARALLEL))}
    gathered = gathered_by_fsdp(model)
    whole = (module for _, module in named if isinstance(module, _OTHERS) or id(module) in taken)
    computed = {id(made) for module in whole for made in _parametrizations(module)}
    found: list[OwnModule] = []
    done: set[int] = set()
    for fqn, module in named:
        if id(module) in taken or id(module) in done or id(module) in computed:
            continue
        if not _multiplies(fqn, module, own_forward):
            continue
        done.add(id(module))
        own = OwnModule(fqn, module, [p for p in _parameters(fqn, module) if id(p) not in done])
        for parameter in list(own.parameters):
            tensor = own.tensor(parameter)
            device = tensor.device if device is None else device
            if _reason(tensor, device, gathered) is not None:
                own.parameters.remove(parameter)
        if not own.parameters:
            continue
        reason = refuses(module) or _cannot_swap(module)
        if reason is not None:
            if all(m.fqn != fqn for m in left_out):
                left_out.append(LeftOut(fqn, reason))
            continue
        found.append(own)
    names = {p.fqn for own in found for p in own.parameters}
    left_out[:] = [m for m in left_out if m.fqn not in names or (converts and m.fqn in own_forward)]
    return found


def _multiplies(fqn: str, module: nn.Module, own_forward: Container[str]) -> bool:
    """Whether a module may multiply with parameters of its own, and is meant to be observed."""
    cls = type(module)
    if SITE_KEY in module.__dict__ or cls.__module__.startswith(("transformer_engine", "torchao")):
        return False
    if isinstance(module, (*_OTHERS, *_LISTS)) or is_norm(module) or FP8_NAME.search(cls.__name__):
        return False
    if isinstance(module, nn.Linear):
        return (
            fqn in own_forward and _has_weight(module) and role_of(fqn) is None and "router" not in cls.__name__.lower()
        )
    return not (role_of(fqn) is not None and _has_weight(module)) and "router" not in cls.__name__.lower()


def _parametrizations(module: nn.Module) -> Iterator[nn.Module]:
    """What its weights are computed from (torch.nn.utils.parametrize)."""
    held = module._modules.get("parametrizations")
    if isinstance(held, nn.ModuleDict):
        yield from (made for made in held.values() if isinstance(made, ParametrizationList))


def _has_weight(module: nn.Module) -> bool:
    return module._parameters.get("weight") is not None


def _parameters(fqn: str, module: nn.Module) -> Iterator[OwnParameter]:
    expert = "expert" in f"{fqn}.{type(module).__name__}".lower()
    held: list[tuple[str, str, torch.Tensor]] = [(name, name, p) for name, p in module.named_parameters(recurse=False)]
    for name, child in module.named_children():
        if isinstance(child, _LISTS):
            held += [(name, f"{name}.{key}", p) for key, p in child.named_parameters(recurse=False)]
    if isinstance(module, nn.MultiheadAttention):
        weight = module.out_proj._parameters.get("weight")
        held += [] if weight is None else [("out_proj", "out_proj.weight", weight)]
    for name, path, parameter in held:
        if is_gemm_weight(name, parameter) and parameter.dim() <= 3:
            called = fqn if path == "weight" else f"{fqn}.{path}".removesuffix(".weight").lstrip(".")
            experts = parameter.shape[0] if expert and parameter.dim() == 3 else 0
            yield OwnParameter(called or path, path, experts)


def _reason(tensor: Any, device: torch.device, gathered: Container[int]) -> str | None:
    """Why a parameter is not observed, or None."""
    if type(local_part(tensor.data)) is not torch.Tensor and id(tensor) not in gathered:
        return f"weight is {type(tensor.data).__name__}"
    if is_dtensor(tensor.data) and tensor.dim() > 2 and id(tensor) not in gathered:
        return "experts in a DTensor"
    if tensor.element_size() not in (2, 4):
        return f"weight is {tensor.dtype}"
    return None if tensor.device == device else f"on {tensor.device}"


def _cannot_swap(module: nn.Module) -> str | None:
    try:
        watched_class(type(module))
    except Exception as error:  # noqa: BLE001 - a class may refuse to be subclassed in any way
        return f"its class cannot be subclassed ({type(error).__name__})"
    return None
