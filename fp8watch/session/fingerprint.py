"""What a checkpoint says of the numerics that made it, so that a load can be held against it, name by name.

Shapes:     parameters, amax histories -> one hash each
Thread:     training, between steps; one read of the device for all hashes

Hashed are the bits of each parameter (of this rank's part where it is sharded), of each moment of the optimizers that have
stepped, and of each weight that the recipe quantises the codes and scales that it gives: those differ where the weights are
the same and the quantiser is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fp8watch.observer.observation_plan import ObservationPlan
from fp8watch.quantize.site_quantizer import DelayedQuantizer
from fp8watch.recipe import Recipe
from fp8watch.selection.wrappers import named_modules
from fp8watch.session.sites import SlabSite
from fp8watch.session.standing_state import StandingState, moments_of
from fp8watch.sketch.weight_hash import hash_bits

VERSION = 1
MOMENTS = "moments"
HASHED = ("weights", "codes", "scales", "delayed", MOMENTS)
"""Groups of a fingerprint: name -> "hash dtype shape"."""
MAX_NAMED = 8
Fingerprint = dict[str, Any]


class Owner(Protocol):
    """Who knows the optimizers of a run."""

    @property
    def known(self) -> list[torch.optim.Optimizer]:
        """Those that have been met."""


@torch.no_grad()
def fingerprint(
    model: nn.Module, plan: ObservationPlan | None, table: Sequence[SlabSite], recipe: Recipe, owner: Owner | None = None,
    *, in_step: bool = False,
) -> Fingerprint:  # fmt: skip
    """Recipe with its facts, and the hashes of HASHED; plain types only.

    Args:
        model: whose parameters are hashed.
        plan: with the quantisers of its weights.
        table: what their rows stand for.
        recipe: in effect.
        owner: knows the optimizers, whose moments are hashed.
        in_step: a step runs: delayed scales, and codes that follow from them, are left out and left as they are.
    """
    if plan is not None and not in_step:
        plan.close_passes()  # passes that are over are in the histories
    hashed = _Hashes()
    for module_name, module in named_modules(model):
        for name, parameter in module.named_parameters(recurse=False):
            hashed.take("weights", f"{module_name}.{name}".lstrip("."), _local(parameter.detach()))
    for name, moment in moments_of(model, owner.known if owner is not None else ()):
        hashed.take(MOMENTS, name, moment)
    if plan is not None and not recipe.observe_only:
        _take_codes(hashed, model, plan, table, stateful=not in_step)
    if plan is not None and not in_step:
        for site, quantizer in zip(table, plan.sites.quantizers, strict=False):
            if isinstance(quantizer, DelayedQuantizer):
                state = torch.cat([v.reshape(-1).float() for v in quantizer.state.state_dict().values()])
                hashed.take("delayed", f"{site.fqn}.{site.operand}", state)
    made: Fingerprint = {"version": VERSION, "recipe": recipe.name, "fingerprint": recipe.fingerprint()}
    return made | {"facts": recipe.facts()} | hashed.read()


@torch.no_grad()
def moments_fingerprint(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, str], list[str]]:
    """What one optimizer keeps of the parameters of a model, name -> "hash dtype shape", and the names of its parameters."""
    hashed = _Hashes()
    for name, moment in moments_of(model, (optimizer,)):
        hashed.take(MOMENTS, name, moment)
    made: dict[str, str] = hashed.read()[MOMENTS]
    return made, [name for name, _ in StandingState(model, None).parameters(optimizer)]


class _Hashes:
    """Hashes of tensors, on their devices until they are read."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], tuple[Tensor, str]] = {}

    def take(self, group: str, name: str, x: Tensor) -> None:
        """Hash one tensor. One without values, or with elements that have no hash, is left out."""
        if not x.is_meta and x.element_size() in (1, 2, 4, 8):
            self._found[group, name] = hash_bits(x), _form(x)

    def read(self) -> Fingerprint:
        """Group -> name -> "hash dtype shape"; one read of each device."""
        by_device: dict[torch.device, list[tuple[str, str]]] = {}
        for key, (value, _) in self._found.items():
            by_device.setdefault(value.device, []).append(key)
        values: dict[tuple[str, str], int] = {}
        for keys in by_device.values():
            read = torch.stack([self._found[key][0] for key in keys]).tolist()
            values.update(zip(keys, read, strict=True))
        made: Fingerprint = {group: {} for group in HASHED}
        for (group, name), (_, form) in self._found.items():
            made[group][name] = f"{values[group, name] % (1 << 64):016x} {form}"
        return made


def _local(x: Tensor) -> Tensor:
    local = getattr(x, "_local_tensor", None)
    return local if isinstance(local, Tensor) else x


def _take_codes(
    hashed: _Hashes, model: nn.Module, plan: ObservationPlan, table: Sequence[SlabSite], *, stateful: bool
) -> None:
    """Codes and scale_inv of each weight that our own recipe quantises and that lies here whole."""
    modules = dict(named_modules(model))
    for row, (site, quantizer) in enumerate(zip(table, plan.sites.quantizers, strict=False)):
        weight = getattr(modules.get(site.fqn), "weight", None)
        of_weight = site.operand == "weight" and site.direction == "rowwise" and not site.as_it_is
        if not of_weight or (quantizer.stateful and not stateful):
            continue
        if row - row % len(plan.sites.rows) in plan.sites.foreign:
            continue
        if isinstance(weight, Tensor) and _local(weight) is weight and weight.dim() == 2 and not weight.is_meta:
            (codes, scale_inv), _ = quantizer.codes(weight.detach(), stats=False, heavy=False)
            hashed.take("codes", f"{site.fqn}.weight", codes)
            hashed.take("scales", f"{site.fqn}.weight", scale_inv)


def _form(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {'x'.join(map(str, x.shape)) or '1'}"


def hash_text(x: Tensor) -> str:
    """How a fingerprint writes a tensor: hash, dtype, shape."""
    return f"{int(hash_bits(x)) % (1 << 64):016x} {_form(x)}"


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """What of a fingerprint is not as it was saved: group, or name of a fact -> what differs, by name.

    Names that only one of the two has are not compared, nor are tensors that are cut otherwise: a model may be loaded
    in part, and on another number of ranks. An optimizer without any moments, where some were saved, is told.
    """
    out: dict[str, str] = {}
    before, after = saved.get("facts"), now.get("facts")
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in sorted({*before, *after}):
            if before.get(name) != after.get(name):
                out[name] = f"{before.get(name, 'not there')} → {after.get(name, 'not there')}"
    for group in HASHED:
        was, now_is = saved.get(group), now.get(group)
        if not isinstance(was, Mapping) or not isinstance(now_is, Mapping):
            continue
        if group == MOMENTS and was and not now_is:
            out[group] = f"none of {len(was)}: the optimizer has none"
        common = [name for name in now_is if name in was]
        changed = [name for name in common if _comparable(was[name], now_is[name]) and was[name] != now_is[name]]
        if changed:
            more = f" and {len(changed) - MAX_NAMED} more" if len(changed) > MAX_NAMED else ""
            out[group] = f"{', '.join(changed[:MAX_NAMED])}{more} of {len(common)}"
    return out


def _comparable(was: object, now: object) -> bool:
    """Whether both are of the same number of elements of this rank."""
    return isinstance(was, str) and isinstance(now, str) and was.split(" ")[2:] == now.split(" ")[2:]
