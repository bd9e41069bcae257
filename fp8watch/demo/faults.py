"""Faults that the demo injects, each as it occurs in real runs, and the expected diagnosis.

Every fault acts where the real one would: on an activation, in one site's quantiser, or on the optimizer. Nothing here
informs the observer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fp8watch.layers import custom_ops
from fp8watch.layers.fp8_linear import SITE_KEY
from fp8watch.observer.site_rows import INPUT, WEIGHT
from fp8watch.quantize.site_quantizer import SiteQuantizer
from fp8watch.recipe import delayed
from fp8watch.session.sampling_schedule import HASH_EVERY_STEPS

FAULT_MODULE = "layers.1.mlp.down_proj"
STALE_MODULE = "layers.0.mlp.up_proj"
FLIPPED_MODULE = "layers.1.attention.q_proj"


@dataclass(frozen=True)
class Fault:
    """One fault. `mode`, `module`, `operand` are what the collector has to find."""

    name: str
    says: str
    mode: str | None
    module: str | None
    operand: str | None
    verdict: str
    inject: Callable[[nn.Module, torch.optim.Optimizer, int], Callable[[], None] | None]
    """(model, optimizer, step) at the start of the faulty step; what it returns is called after that step."""
    recipe: object = "blockwise"
    """What attach is given."""
    world_size: int = 1
    """Ranks that train; the fault is on the last of them."""


def _inf(model: nn.Module, _optimizer: torch.optim.Optimizer, step: int) -> Callable[[], None]:
    """One element of the SwiGLU product overflows, for one step."""

    def overflow(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = args[0].clone()
        x[0, 37, 300] = float("inf")
        return (x,)

    return model.get_submodule(FAULT_MODULE).register_forward_pre_hook(overflow).remove


def _outlier(model: nn.Module, _optimizer: torch.optim.Optimizer, step: int) -> Callable[[], None]:
    """The largest two channels of the SwiGLU product grow ×30 for one step, beyond the amax history."""

    def grow(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = args[0].clone()
        x[..., x.abs().flatten(0, -2).amax(0).topk(2).indices] *= 30
        return (x,)

    return model.get_submodule(FAULT_MODULE).register_forward_pre_hook(grow).remove


class _Unguarded(SiteQuantizer):
    """A kernel that computes 448/amax without a check for amax = 0."""

    force_scale_1 = False


class _Stale(SiteQuantizer):
    """A weight cache that is never refreshed: the scale of the first call is used for all later weights."""

    cached: Tensor | None = None

    def scale(self, x_MK: Tensor) -> Tensor:
        if self.cached is None:
            _, scale_inv, _ = self.backend.quantize(x_MK, self.job(x_MK, stats=False, heavy=False))
            self.cached = 1.0 / scale_inv
        return self.cached


def _replace(model: nn.Module, module: str, operand: int, kind: type[SiteQuantizer]) -> None:
    plan, first = custom_ops.lookup(model.get_submodule(module).__dict__[SITE_KEY])
    row = plan.sites.row(first, operand, False)
    old = plan.sites.quantizers[row]
    plan.sites.replace(row, kind(old.spec, old.columnwise, old.backend))


def _zero_tile(model: nn.Module, _optimizer: torch.optim.Optimizer, step: int) -> Callable[[], None]:
    """128 channels die, and the site's kernel does not handle a tile of zeros."""
    _replace(model, FAULT_MODULE, INPUT, _Unguarded)

    def die(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = args[0].clone()
        x[..., 128:256] = 0
        return (x,)

    return model.get_submodule(FAULT_MODULE).register_forward_pre_hook(die).remove


def _stale_weight_scale(model: nn.Module, _optimizer: torch.optim.Optimizer, step: int) -> None:
    """One layer's weight scale is cached from here on; the weights outgrow it within some steps."""
    _replace(model, STALE_MODULE, WEIGHT, _Stale)


def _lr(_model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """The learning rate jumps by a factor of 30."""
    for group in optimizer.param_groups:
        group["lr"] *= 30


@torch.no_grad()
def _bit_flip(model: nn.Module, _optimizer: torch.optim.Optimizer, step: int) -> None:
    """The lowest bit of one weight flips: no statistic sees it, and gradients, which the ranks share, keep it as it is."""
    model.get_parameter(f"{FLIPPED_MODULE}.weight").view(torch.int32)[5, 7] ^= 1


def _nothing(_model: nn.Module, _optimizer: torch.optim.Optimizer, step: int) -> None:
    """A healthy run."""


FAULTS: dict[str, Fault] = {
    f.name: f
    for f in (
        Fault(
            "inf",
            f"one activation into {FAULT_MODULE} becomes Inf, for one step",
            "inf-laundering",
            FAULT_MODULE,
            "input",
            "fp8",
            _inf,
        ),
        Fault(
            "zero-tile",
            f"128 channels into {FAULT_MODULE} die; its quantiser has no guard for amax 0",
            "zero-tile-eps",
            FAULT_MODULE,
            "input",
            "fp8",
            _zero_tile,
        ),
        Fault(
            "stale-weight-scale",
            f"the weight scale of {STALE_MODULE} is cached from here on",
            "stale-weight-scale",
            STALE_MODULE,
            "weight",
            "fp8",
            _stale_weight_scale,
        ),
        Fault(
            "outlier",
            f"two channels into {FAULT_MODULE} grow ×30 for one step, under delayed scaling with a margin",
            "delayed-clip",
            FAULT_MODULE,
            "input",
            "fp8",
            _outlier,
            recipe=delayed(
                amax_history_len=16, margin=1
            ),  # this small model outgrows its amax history by 1.5 in healthy training
        ),
        Fault("lr", "the learning rate jumps ×30", "optimizer-divergence", None, None, "shared", _lr),
        Fault(
            "bit-flip",
            f"the lowest bit of one weight of {FLIPPED_MODULE} flips on one of two replicas; each weight is hashed once in"
            f" {HASH_EVERY_STEPS} steps, so it can be found that many steps later and not sooner than its turn",
            "silent-data-corruption",
            FLIPPED_MODULE,
            None,
            "shared",
            _bit_flip,
            world_size=2,
        ),
        Fault("none", "nothing", None, None, None, "unknown", _nothing),
    )
}
