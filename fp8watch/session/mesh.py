"""Where this rank stands in the mesh: its coordinate along data, tensor, pipeline, expert and context parallelism.

Thread:     training, once

Nothing is asked of other ranks. What the training has set up is read: Megatron's parallel state where it was imported and
initialised, else the DeviceMesh of parameters (DTensor, FSDP2), else DistributedDataParallel around the model. What a
dimension of a DeviceMesh is its name says, else what lies on it: along one that shards weights (other than FSDP2's) ranks
hold parts. Where none of them tells, the answer is empty: the collector then learns which ranks agree.
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


def _meshes(model: nn.Module) -> Iterator[tuple[Any, list[str]]]:
    """Every DeviceMesh that FSDP2 was given, then those that parameters lie on, with the axis that each dimension is by what it
    does: ranks of FSDP2 compute with all of a weight, ranks along which something else shards it with a part each."""
    for module in model.modules():
        get_state = getattr(module, "_get_fsdp_state", None)
        state = get_state() if get_state is not None else None
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            mesh = getattr(getattr(group, "mesh_info", None), "mesh", None)
            if mesh is not None:
                yield mesh, ["dp"] * mesh.ndim
    placed: list[Any] = [p for p in model.parameters() if getattr(p, "device_mesh", None) is not None]
    for parameter in placed:
        yield parameter.device_mesh, ["" if place.is_replicate() else "tp" for place in parameter.placements]
    for parameter in placed:  # and no weight is sharded along it
        yield parameter.device_mesh, ["dp"] * parameter.device_mesh.ndim


def _of_meshes(model: nn.Module) -> dict[str, int]:
    found: dict[str, int] = {}
    does: dict[Any, str] = {}  # dimension, by its name, or by its number in a mesh without names -> axis
    meshes: dict[Any, None] = {}
    for mesh, axes in _meshes(model):
        meshes[mesh] = None
        for dimension, by_use in zip(_dimensions(mesh), axes, strict=True):
            if by_use:
                does.setdefault(dimension, by_use)
    for mesh in meshes:
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            continue
        root = getattr(mesh, "_get_root_mesh", None)
        whole = root() if root is not None else mesh
        if whole.mesh_dim_names and whole.get_coordinate() is not None:
            coordinate, mesh = whole.get_coordinate(), whole
        at: dict[str, int] = {}
        for dimension, place, size in zip(_dimensions(mesh), coordinate, mesh.shape, strict=False):
            axis = _AXIS_OF.get(str(dimension).lower()) or does.get(dimension)
            if axis:  # dp_replicate × dp_shard count through: one number a data-parallel rank
                at[axis] = at.get(axis, 0) * int(size) + int(place)
        for axis, place in at.items():
            found.setdefault(axis, place)
    return found


def _dimensions(mesh: Any) -> list[Any]:
    """What tells the dimensions of a mesh apart."""
    return list(mesh.mesh_dim_names or [(mesh, number) for number in range(mesh.ndim)])


def _of_ddp(model: nn.Module) -> dict[str, int]:
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            return {"dp": int(module.process_group.rank())}
    return {}
