"""Names of modules without what wraps them: a run through an engine, a trainer or an adapter compares with a plain one.

Wrappers are recognised by class names, so that no library of theirs is imported. One is left out of a name only where it
hands the call on to what it holds: torch.compile, checkpointing, data parallelism, the engines of DeepSpeed and Megatron,
what Lightning's Fabric sets up, PEFT around the model and around each layer, and a LightningModule whose only trained child is the model.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from fp8watch.layers.computed_weight import is_computed

_NAMES = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)
_HOLDS = {
    ("deepspeed", "DeepSpeedEngine"): "module",
    ("deepspeed", "PipelineEngine"): "module",
    ("megatron", "DistributedDataParallel"): "module",
    ("megatron", "FullyShardedDataParallel"): "module",
    ("megatron", "Float16Module"): "module",
    ("lightning", "_FabricModule"): "_forward_module",
    ("lightning_fabric", "_FabricModule"): "_forward_module",
    ("peft", "PeftModel"): "base_model",
    ("peft", "BaseTuner"): "model",
    ("peft", "BaseTunerLayer"): "base_layer",
}
"""(package, class) -> the attribute that holds what it wraps."""
_LIGHTNING = frozenset({"lightning", "pytorch_lightning"})


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules by their names without wrappers: the same Linears are selected under the same names wherever in a script
    attach is called."""
    plain = {"": ""}  # name with wrappers -> name without wrappers
    held = {"": _held(model)}  # name with wrappers -> child that is left out of the names below
    for fqn, module in model.named_modules():
        if fqn:
            parent, _, name = fqn.rpartition(".")
            wrapped = name in _NAMES or name == held[parent]
            plain[fqn] = plain[parent] if wrapped else f"{plain[parent]}.{name}".lstrip(".")
            held[fqn] = _held(module)
        yield plain[fqn], module


def shows_anothers_weight(module: nn.Module) -> bool:
    """Whether it is a Linear by its class alone: it has no weight, and shows that of a Linear that it holds, as some adapters do."""
    if not isinstance(module, nn.Linear) or "weight" in module._parameters:
        return False
    if is_computed(module):
        return False
    shown = getattr(module, "weight", None)
    return any(isinstance(child, nn.Linear) and child._parameters.get("weight") is shown for child in module.children())


def is_lightning_module(module: nn.Module) -> bool:
    """Whether it is a LightningModule, of either name of the package."""
    return any(package in _LIGHTNING and name == "LightningModule" for package, name in _classes(module))


def _held(module: nn.Module) -> str | None:
    """Name of the child that a wrapper hands its calls on to; None for what is no wrapper."""
    if isinstance(module, _PARALLEL):
        return "module"
    if type(module).__module__.startswith("torch.nn."):
        return None
    of_class = next((child for of, child in _HOLDS.items() if of in _classes(module)), None)
    if of_class is None and is_lightning_module(module) and not module._parameters:
        trained = [name for name, child in module.named_children() if next(child.parameters(), None) is not None]
        return trained[0] if len(trained) == 1 else None
    return of_class


def _classes(module: nn.Module) -> set[tuple[str, str]]:
    """(package, name) of its class and of those that it inherits from."""
    return {(cls.__module__.partition(".")[0], cls.__name__) for cls in type(module).__mro__}
