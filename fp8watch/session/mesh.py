"""Where this rank stands in the mesh: its coordinate along data, tensor, pipeline, expert and context parallelism.

Thread:     training, once

Nothing is asked of other ranks. What the training has set up is read: Megatron's parallel state where it was imported and
initialised, else the DeviceMesh of parameters (DTensor, FSDP2), else DistributedDataParallel around the model. Where
none of them tells, the answer is empty: the collector then learns which ranks agree.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

AXES = ("dp", "tp", "pp", "ep", "cp")
_NAMES = {
    "dp": ("dp", "data", "data_parallel", "dp_replicate", "dp_shard", "replicate", "shard", "fsdp", "ddp", "hsdp"),
    "tp": ("tp", "tensor", "tensor_parallel", "model", "mp"),
    "pp": ("pp", "pipe", "pipeline", "pipeline_parallel", "stage"),
    "ep": ("ep", "expert", "expert_parallel"),
    "cp": ("cp", "context", "context_parallel", "sequence"),
}
_AXIS_OF = {name: axis for axis, names in _NAMES.items() for name in names}
_MEGATRON = {
    "dp": "get_data_parallel_rank",
    "tp": "get_tensor_model_parallel_rank",
    "pp": "get_pipeline_model_parallel_rank",
    "ep": "get_expert_model_parallel_rank",
    "cp": "get_context_parallel_rank",
}


def mesh_coordinates(model: nn.Module) -> dict[str, int]:
    """Coordinates by axis (dp, tp, pp, ep, cp), those that are known; {} where nothing tells."""
    return _of_megatron() or _of_meshes(model) or _of_ddp(model)


def _of_megatron() -> dict[str, int]:
    state: Any = sys.modules.get("megatron.core.parallel_state")  # importing it ourselves would say nothing
    if state is None or not state.model_parallel_is_initialized():
        return {}
    found = {}
    for axis, name in _MEGATRON.items():
        function = getattr(state, name, None)
        if function is not None:
            found[axis] = int(function())
    return found


def _meshes(model: nn.Module) -> Iterator[Any]:
    """Every DeviceMesh that a parameter of the model lies on, or that FSDP2 was given."""
    for module in model.modules():
        get_state = getattr(module, "_get_fsdp_state", None)
        state = get_state() if get_state is not None else None
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            mesh = getattr(getattr(group, "mesh_info", None), "mesh", None)
            if mesh is not None:
                yield mesh
    for parameter in model.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None:
            yield mesh


def _of_meshes(model: nn.Module) -> dict[str, int]:
    found: dict[str, int] = {}
    for mesh in dict.fromkeys(_meshes(model)):
        names, coordinate = mesh.mesh_dim_names, mesh.get_coordinate()
        if coordinate is None:
            continue
        root = getattr(mesh, "_get_root_mesh", None)
        whole = root() if root is not None else mesh
        if whole.mesh_dim_names and whole.get_coordinate() is not None:
            names, coordinate, mesh = whole.mesh_dim_names, whole.get_coordinate(), whole
        if names is None:
            names = ("dp",) if mesh.ndim == 1 else ()
        at: dict[str, int] = {}
        for name, place, size in zip(names, coordinate, mesh.shape, strict=False):
            axis = _AXIS_OF.get(str(name).lower())
            if axis is not None:  # dp_replicate × dp_shard count through: one number a data-parallel rank
                at[axis] = at.get(axis, 0) * int(size) + int(place)
        for axis, place in at.items():
            found.setdefault(axis, place)
    return found


def _of_ddp(model: nn.Module) -> dict[str, int]:
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            return {"dp": int(module.process_group.rank())}
    return {}
