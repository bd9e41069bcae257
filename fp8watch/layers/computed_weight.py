"""The weight of a Linear that is computed each time it is read (torch.nn.utils.parametrize): what is known of it without that.

Shapes:     weight [N, K]     Thread: training

Reading it may change a buffer, as the power iteration of spectral_norm does, draw random numbers, or take as long as a GEMM. So
a forward reads it once, as it would without us, and outside of one the tensor is asked that it is computed from.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList


def is_computed(module: nn.Module) -> bool:
    """Whether its weight is computed by a parametrization."""
    return _computed(module) is not None


def has_weight(module: nn.Module) -> bool:
    """Whether it has a weight, of whatever kind. Nothing is computed."""
    kept = module._parameters.get("weight", module._buffers.get("weight"))
    return kept is not None or "weight" in module.__dict__ or hasattr(type(module), "weight")


def held_weight(module: nn.Module) -> Tensor:
    """The weight of a Linear, or of one that is computed the first tensor that it is computed from: of the same device, and of
    the same dtype where the parametrization was not registered as unsafe. Nothing is computed.

    Raises:
        AttributeError: there is no weight.
    """
    computed = _computed(module)
    if computed is not None:
        return next(iter((*computed.parameters(recurse=False), *computed.buffers(recurse=False))))
    weight: Tensor = module.weight  # type: ignore[assignment]
    return weight


def _computed(module: nn.Module) -> ParametrizationList | None:
    held = module._modules.get("parametrizations")
    found = held._modules.get("weight") if isinstance(held, nn.ModuleDict) else None
    return found if isinstance(found, ParametrizationList) else None
