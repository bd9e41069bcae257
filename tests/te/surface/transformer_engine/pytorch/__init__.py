from . import ops
from .module.grouped_linear import GroupedLinear
from .module.layernorm_linear import LayerNormLinear
from .module.layernorm_mlp import LayerNormMLP
from .module.linear import Linear

__all__ = ["GroupedLinear", "LayerNormLinear", "LayerNormMLP", "Linear", "ops"]
