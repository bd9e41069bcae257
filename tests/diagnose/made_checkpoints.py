"""Checkpoints as training writes them, and what can go wrong with one."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fp8watch

LAYERS, WIDTH = 6, 256
State = dict[str, Any]


def trained(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A few layers after some steps of AdamW."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({str(i): nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for i in range(LAYERS)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(32, WIDTH)
    for _ in range(3):
        y = x
        for layer in model.values():
            y = torch.relu(layer(y)) + y
        optimizer.zero_grad()
        y.square().mean().backward()
        optimizer.step()
    return model, optimizer


def as_fp8(model: nn.Module) -> dict[str, Tensor]:
    """Weights as FP8 codes with 128×128 scales, the others in BF16: as models in FP8 are published."""
    made: dict[str, Tensor] = {}
    for name, p in model.state_dict().items():
        if p.dim() == 2:
            q = fp8watch.quantize_blockwise(p, (128, 128), power_2_scale=random.random() < 0.5)
            made[name], made[f"{name}_scale_inv"] = q.data, q.scale_inv
        else:
            made[name] = p.bfloat16()
    return made


def flat(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and moments by name."""
    names = [name for name, _ in model.named_parameters()]
    made = {f"model.{name}": p.clone() for name, p in model.state_dict().items()}
    for i, state in optimizer.state_dict()["state"].items():
        made |= {f"optimizer.state.{names[i]}.{key}": value.clone() for key, value in state.items()}
    return made


def save(tensors: dict[str, Tensor], path: Path, how: str) -> Path:
    """Write a checkpoint with the library itself; returns what is checked."""
    if how == "safetensors":
        from safetensors.torch import save_file

        save_file({k: v.contiguous() for k, v in tensors.items()}, path / "model.safetensors")
        return path
    if how == "dcp":
        import torch.distributed.checkpoint as dcp

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that torch.distributed is not on is meant
            dcp.save(tensors, checkpoint_id=path / "dcp", no_dist=True)
        return path / "dcp"
    torch.save({"state": tensors, "step": 3}, path / "checkpoint.pt")
    return path / "checkpoint.pt"


def _weight(t: dict[str, Tensor], draw: random.Random, want: Callable[[str, Tensor], bool]) -> str:
    return draw.choice(sorted(name for name, x in t.items() if want(name, x)))


def _plain(name: str, x: Tensor) -> bool:
    return x.dim() == 2 and x.dtype == torch.float32 and "state" not in name and not name.endswith("_scale_inv")


def _scale(name: str, x: Tensor) -> bool:
    return name.endswith("_scale_inv")


def nan_in_a_weight(t: dict[str, Tensor], draw: random.Random) -> None:
    """One NaN."""
    t[_weight(t, draw, _plain)][draw.randrange(WIDTH), draw.randrange(WIDTH)] = float("nan")


def flipped_exponent(t: dict[str, Tensor], draw: random.Random) -> None:
    """The highest exponent bit of one element."""
    x = t[_weight(t, draw, _plain)]
    x.view(torch.int32)[draw.randrange(WIDTH), draw.randrange(WIDTH)] ^= 1 << 30


def scaled_weight(t: dict[str, Tensor], draw: random.Random) -> None:
    """A weight of another magnitude than in the other layers."""
    t[_weight(t, draw, _plain)].mul_(2.0 ** draw.choice([-9, 9]))


def nan_in_a_moment(t: dict[str, Tensor], draw: random.Random) -> None:
    """Inf in v."""
    t[_weight(t, draw, lambda n, x: n.endswith("exp_avg_sq"))].view(-1)[3] = float("inf")


def lost_squares(t: dict[str, Tensor], draw: random.Random) -> None:
    """v in a dtype that flushes it."""
    name = _weight(t, draw, lambda n, x: n.endswith("exp_avg_sq") and x.dim() == 2)
    t[name].copy_(t[name].mul(1e-3).half().float().where(t[name] > t[name].median(), torch.tensor(0.0)))


def negative_square(t: dict[str, Tensor], draw: random.Random) -> None:
    """v below 0."""
    t[_weight(t, draw, lambda n, x: n.endswith("exp_avg_sq"))].view(-1)[0] = -1e-8


def no_scale(t: dict[str, Tensor], draw: random.Random) -> None:
    """Codes without their scales."""
    del t[_weight(t, draw, _scale)]


def zero_scales(t: dict[str, Tensor], draw: random.Random) -> None:
    """Scales of empty memory."""
    t[_weight(t, draw, _scale)].zero_()


def bad_scale(t: dict[str, Tensor], draw: random.Random) -> None:
    """One scale that none can be."""
    t[_weight(t, draw, _scale)].view(-1)[draw.randrange(4)] = draw.choice([-1.0, 0.0, float("nan"), float("inf")])


def odd_shape(t: dict[str, Tensor], draw: random.Random) -> None:
    """Scales of another tiling."""
    name = _weight(t, draw, _scale)
    t[name] = t[name].repeat(3, 1)


def empty_codes(t: dict[str, Tensor], draw: random.Random) -> None:
    """Codes of empty memory."""
    name = _weight(t, draw, _scale).removesuffix("_scale_inv")
    t[name] = torch.zeros(t[name].shape).to(torch.float8_e4m3fn)


def foreign_scale(t: dict[str, Tensor], draw: random.Random) -> None:
    """One scale that belongs to other codes."""
    t[_weight(t, draw, _scale)].view(-1)[draw.randrange(4)] *= 2.0**14


def foreign_scale_beside_a_smaller_one(t: dict[str, Tensor], draw: random.Random) -> None:
    """The same, and another that is further off downwards."""
    scales = t[_weight(t, draw, _scale)].view(-1)
    for place, octaves in zip(draw.sample(range(4), 2), (16, -17), strict=True):
        scales[place] *= 2.0**octaves


def nan_code(t: dict[str, Tensor], draw: random.Random) -> None:
    """A code that is NaN."""
    name = _weight(t, draw, _scale).removesuffix("_scale_inv")
    codes = t[name].view(torch.uint8).clone()
    codes[draw.randrange(WIDTH), draw.randrange(WIDTH)] = 0x7F
    t[name] = codes.view(torch.float8_e4m3fn)


OF_TRAINING = (nan_in_a_weight, flipped_exponent, scaled_weight, nan_in_a_moment, lost_squares, negative_square)
OF_FP8 = (
    no_scale,
    zero_scales,
    bad_scale,
    odd_shape,
    empty_codes,
    foreign_scale,
    foreign_scale_beside_a_smaller_one,
    nan_code,
)
