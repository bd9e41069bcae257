"""Gain error of healthy quantisers: Σ x·(dequantised x) / Σ x² − 1, over recipes and what operands look like.

python tests/benchmarks/gain.py        # no clock: the same figures on every machine
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parents[2] / part) for part in (".", "agent")]

from fp8watch import recipe as recipes  # noqa: E402
from fp8watch.kernels import resolve  # noqa: E402
from fp8watch.quantize.site_quantizer import places, site_quantizer  # noqa: E402

ROWS, COLUMNS, SEEDS = 256, 1024, 8


def _normal(g: torch.Generator) -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=g)


OPERANDS: Mapping[str, Callable[[torch.Generator], Tensor]] = {
    "normal": _normal,
    "uniform": lambda g: torch.rand(ROWS, COLUMNS, generator=g) * 2 - 1,
    "normal of many sizes": lambda g: _normal(g) * torch.exp2(3 * torch.randn(ROWS, 1, generator=g)),
    "log-normal": lambda g: torch.exp(1.5 * _normal(g)) * _normal(g).sign(),
    "Student's t, 3 degrees": lambda g: _normal(g) / torch.stack([_normal(g) ** 2 for _ in range(3)]).mean(0).sqrt(),
    "after ReLU": lambda g: _normal(g).relu(),
    "after GELU": lambda g: torch.nn.functional.gelu(_normal(g)),
    "SwiGLU product": lambda g: torch.nn.functional.silu(_normal(g)) * _normal(g),
    "after softmax": lambda g: (4 * _normal(g)).softmax(1),
    "one channel 100 times the rest": lambda g: _normal(g) * torch.where(torch.arange(COLUMNS) == 7, 100.0, 1.0),
    "weights, normal 0.02": lambda g: 0.02 * _normal(g),
}

RECIPES: Mapping[str, recipes.Recipe] = {
    "blockwise": recipes.blockwise(environ={}),
    "blockwise, FP32 scales": recipes.blockwise(environ={}, power_2_scale=False),
    "current": recipes.current(environ={}, fp8_format="E4M3"),
    "mxfp8": recipes.mxfp8(),
    "rowwise": recipes.rowwise(),
    "blockwise, E5M2": recipes.blockwise(environ={}, fp8_format="E5M2"),
    "current, E5M2": recipes.current(environ={}, fp8_format="E5M2"),
}


def gain_error(x: Tensor, recipe: recipes.Recipe, operand: str) -> float:
    """Of one operand, rowwise."""
    place = next(p for p in places(recipe) if p.operand == operand)
    quantizer = site_quantizer(recipe, place, resolve("reference", "cpu"), torch.device("cpu"))
    row = quantizer.measure(x.bfloat16(), heavy=True).summary()
    return float(row["gain_energy"] / row["signal_energy"])


def main() -> None:
    """Print the largest of all seeds, in per cent, with its sign."""
    print("| operand | " + " | ".join(RECIPES) + " |\n|---|" + "---|" * len(RECIPES))
    for name, make in OPERANDS.items():
        which = "weight" if name.startswith("weights") else "input"
        cells = []
        for recipe in RECIPES.values():
            found = [gain_error(make(torch.Generator().manual_seed(s)), recipe, which) for s in range(SEEDS)]
            cells.append(f"{100 * max(found, key=abs):+.3f}")
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
