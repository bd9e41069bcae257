"""What `loss_impact` says beside what the loss does, on small models of several families: the table of docs/diagnose.md.

    PYTHONPATH=.:agent:tests python -m benchmarks.loss_impact [--batches N] [--pictures docs/images]

Each model is trained for some steps first. Then, on batches that it has not seen, each Linear's forward, dgrad and wgrad are put
in FP8 alone, and the change of the loss (of the loss after a step, for the backward GEMMs) is held against what one pass said.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fp8watch.demo.model import ByteModel
from fp8watch.diagnose import loss_impact, what_if
from fp8watch.diagnose.impact_picture import impact_picture

TRAINED_STEPS = 20
FAMILIES = ("demo", "gpt", "llama", "moe")
RESOLUTION = 2.0**-22
"""Nats below which a difference of two float32 losses near 3 says nothing."""


class Subject(NamedTuple):
    model: nn.Module
    batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    optimizer: torch.optim.Optimizer


def build(name: str) -> Subject:
    """A model of a family, as the demo and the proving ground have it."""
    if name == "demo":
        from proving.data import next_bytes

        torch.manual_seed(0)
        model = ByteModel(dim=128, num_layers=2, hidden=384)
        make = next_bytes(0, 8, 64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        return Subject(model, make, lambda m, b: m(b["input_ids"], b["labels"]), optimizer)
    from proving import families

    torch.manual_seed(0)
    t = families.build(name, 0)
    return Subject(t.model, t.batch, t.loss, t.optimizer)


def train(s: Subject) -> None:
    for step in range(TRAINED_STEPS):
        s.optimizer.zero_grad()
        s.loss(s.model, s.batch(step)).backward()
        s.optimizer.step()


Pairs = dict[str, list[tuple[float, float]]]


def measure(s: Subject, batches: int, recipe: str) -> Pairs:
    """GEMM -> (said, measured) in nats, one a Linear and batch."""
    found: Pairs = {"fprop": [], "dgrad": [], "wgrad": []}
    for number in range(batches):
        got = loss_impact(
            s.model, s.batch(10_000 + number), s.loss, recipe=recipe, measure=True, backward=True, optimizer=s.optimizer
        )
        for layer in got.layers:
            assert layer.measured is not None
            found["fprop"].append((layer.impact, layer.measured))
            b = layer.backward
            assert b is not None
            for gemm in ("dgrad", "wgrad"):
                said, seen = getattr(b, gemm), getattr(b, f"measured_{gemm}")
                if said is not None:
                    found[gemm].append((said, seen))
    return found


def rows(name: str, pairs: Pairs) -> Iterator[str]:
    for gemm, of in pairs.items():
        if not of:
            continue
        said, seen = np.array(of).T
        size = float(np.sqrt((seen**2).mean()))
        r = float(np.corrcoef(said, seen)[0, 1])
        slope = float((said * seen).sum() / (said * said).sum())
        note = "" if size > 4 * RESOLUTION else " (near float32's resolution)"
        yield f"| {name} | {gemm} | {len(of)} | {size:.1e}{note} | {r:.3f} | {slope:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--recipes", nargs="+", default=["blockwise"])
    parser.add_argument("--pictures", type=Path, help="folder for the pictures, of the demo's model")
    args = parser.parse_args()
    if args.pictures is not None:
        s = build("demo")
        train(s)
        batch = s.batch(10_000)
        (args.pictures / "loss-impact.svg").write_text(
            impact_picture(loss_impact(s.model, batch, s.loss, measure=True))
        )
        (args.pictures / "what-if.svg").write_text(what_if(s.model, batch, s.loss).as_svg())
    for recipe in args.recipes:
        print(
            f"\n`{recipe}`:\n\n| family | GEMM | Linears × batches | measured, RMS nats | correlation | slope |\n|---|---|---|---|---|---|"
        )
        for name in args.families:
            s = build(name)
            train(s)
            for row in rows(name, measure(s, args.batches, recipe)):
                print(row, flush=True)


if __name__ == "__main__":
    main()
