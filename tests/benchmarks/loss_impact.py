"""What `loss_impact` says beside what the loss does, on small models of several families: the table of docs/diagnose.md.

    PYTHONPATH=.:agent:tests python -m benchmarks.loss_impact [--batches N] [--turns] [--pictures docs/images]

Each model is trained for some steps first. Then, on batches that it has not seen, each Linear's forward, dgrad and wgrad are put
in FP8 alone, and the change of the loss (of the loss after a step, for the backward GEMMs) is held against what one pass said.
`--turns` holds what the turns of a watched training measure from 256 rows of each Linear against all rows of a diagnosis.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import fp8watch
from benchmarks.operating_point import refuse_other_settings
from fp8watch.demo.model import ByteModel
from fp8watch.diagnose import loss_impact, what_if
from fp8watch.diagnose.diagnosis_copy import DiagnosisCopy
from fp8watch.diagnose.impact_picture import impact_picture
from fp8watch_agent.record import Measured

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


def demo() -> tuple[nn.Module, Iterator[Any], Callable[[nn.Module, Any], Tensor], torch.optim.Optimizer]:
    """The demo's model after training, and batches that it has not seen: `fp8watch diagnose … benchmarks.loss_impact:demo`."""
    return _trained("demo")


def moe() -> tuple[nn.Module, Iterator[Any], Callable[[nn.Module, Any], Tensor], torch.optim.Optimizer]:
    """The same of a mixture of experts."""
    return _trained("moe")


def _trained(name: str) -> tuple[nn.Module, Iterator[Any], Callable[[nn.Module, Any], Tensor], torch.optim.Optimizer]:
    s = build(name)
    train(s)
    return s.model, map(s.batch, count(TRAINED_STEPS)), s.loss, s.optimizer


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


class Routing:
    """The choices of a model's routers, pass by pass: compared with those of the first pass, or held to them."""

    def __init__(self, *, hold: bool) -> None:
        self._hold, self._topk, self._loss_of = hold, Tensor.topk, DiagnosisCopy.loss_of
        self._first: list[Tensor] = []
        self._call, self.flips = 0, 0
        self.by_pass: list[int] = []
        """Tokens whose choice differs from that of the first pass; one a pass."""

    def _choose(self, x: Tensor, k: int, dim: int = -1) -> tuple[Tensor, Tensor]:
        weights, chosen = self._topk(x, k, dim=dim)
        if not self.by_pass:
            self._first.append(chosen.clone())
            return weights, chosen
        before = self._first[self._call]
        self._call += 1
        self.flips += int((chosen.sort(-1).values != before.sort(-1).values).any(-1).sum())
        return (x.gather(dim, before), before) if self._hold else (weights, chosen)

    def __enter__(self) -> Routing:
        def loss_of(copied: DiagnosisCopy, batch: Any = None) -> Tensor:
            self._call = self.flips = 0
            loss = self._loss_of(copied, batch)
            self.by_pass.append(self.flips)
            return loss

        Tensor.topk, DiagnosisCopy.loss_of = self._choose_of(), loss_of  # type: ignore[method-assign,assignment]
        return self

    def _choose_of(self) -> Any:
        return lambda x, k, dim=-1: self._choose(x, k, dim)

    def __exit__(self, *_: object) -> None:
        Tensor.topk, DiagnosisCopy.loss_of = self._topk, self._loss_of  # type: ignore[method-assign]


def routing(batches: int, recipe: str) -> Iterator[str]:
    """Rows: forwards of `moe`, as they are, by whether a choice of a router changed, and with all choices held."""
    s = build("moe")
    train(s)
    for hold in (False, True):
        free: list[tuple[float, float]] = []
        flipped: list[tuple[float, float]] = []
        for number in range(batches):
            with Routing(hold=hold) as seen:
                got = loss_impact(s.model, s.batch(10_000 + number), s.loss, recipe=recipe, measure=True)
            measured = seen.by_pass[-len(got.layers) - 1 : -1]  # one pass a Linear, and one with all of them
            for layer, flips in zip(got.layers, measured, strict=True):
                (flipped if flips and not hold else free).append((layer.impact, layer.measured or 0.0))
        for name, pairs in (
            (("choices held", free),) if hold else (("no choice changed", free), ("some changed", flipped))
        ):
            yield from rows(f"moe, {name}", {"fprop": pairs})


class _Kept:
    """A mirror of a watch: the rows of the last step."""

    rows: Any = None

    def see(self, step: int, rows: Any) -> None:
        self.rows = rows.copy()

    def stop(self) -> None:
        pass


def turns(name: str, batches: int, recipe: str) -> str:
    """A row: loss impact per token of the turns, beside that of a diagnosis of the same batch at the same weights."""
    from fp8watch.observer import canary

    s = build(name)
    train(s)
    canary.FIRST_STEPS = 1  # all Linears in one step, so that both see one batch
    kept = _Kept()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FP8WATCH_SPOOL_DIR"] = folder
        return _turns(name, s, batches, recipe, kept)


def _turns(name: str, s: Subject, batches: int, recipe: str, kept: _Kept) -> str:
    pairs = []
    watch = fp8watch.attach(s.model, recipe=recipe, optimizer=s.optimizer)
    watch._flush.mirrors.append(kept)
    names = [site.fqn for site in watch._table]
    for number in range(batches):
        batch = s.batch(10_000 + number)
        watch._plan.canary.sweep()
        s.optimizer.zero_grad()
        s.loss(s.model, batch).backward()
        watch.step()
        said = {
            names[i]: (row["impact_energy"] / row["num_impact_rows"]) ** 0.5
            for i, row in enumerate(kept.rows) if row["measured"] & Measured.IMPACT
        }  # fmt: skip
        s.optimizer.zero_grad()
        for layer in loss_impact(s.model, batch, s.loss).layers:
            if layer.module in said:
                pairs.append((said[layer.module], layer.spread / layer.num_rows**0.5))
    watch.detach()
    turned, full = np.array(pairs).T
    ranks = [np.argsort(np.argsort(v)) for v in (turned, full)]
    r, of_ranks = (float(np.corrcoef(*v)[0, 1]) for v in ((turned, full), ranks))
    return f"| {name} | {len(pairs)} | {full.min():.1e} … {full.max():.1e} | {r:.3f} | {of_ranks:.3f} |"


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
    parser.add_argument("--routing", action="store_true", help="the forwards of moe, by what its routers chose")
    parser.add_argument("--turns", action="store_true", help="what turns measure, beside a diagnosis")
    args = parser.parse_args()
    refuse_other_settings()
    if args.turns:
        print(
            "| family | Linears × batches | nats per token, all rows | correlation | of ranks |\n|---|---|---|---|---|"
        )
        for name in args.families:
            print(turns(name, args.batches, args.recipes[0]), flush=True)
        return
    if args.routing:
        for row in routing(args.batches, args.recipes[0]):
            print(row, flush=True)
        return
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
