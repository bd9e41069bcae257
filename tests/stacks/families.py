"""Trains a tiny model of each family with and without the watch, and writes the first table of docs/integrations.md.

    python tests/stacks/families.py [--print] [NAME...]

Per family: the share of the GEMM FLOPs whose operands arrived, against what torch's dispatcher counted in a forward; whether
the losses are equal to the last bit; steps; what a collector says of an Inf that is put into one weight.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT), str(ROOT / "agent"), str(ROOT / "server")]

import torch  # noqa: E402
from benchmarks.operating_point import refuse_other_settings  # noqa: E402
from stacks import heads  # noqa: E402
from stacks.family_models import FAMILIES, Family  # noqa: E402
from support.collector_checks import CollectorChecks  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from fp8watch_agent.record import PROBE  # noqa: E402

PAGE = ROOT / "docs" / "integrations.md"
BEGIN, END = heads.FAMILIES
STEPS, BREAKS_AT = 6, 4
BY_DESIGN = re.compile(r"head|router|tied|embedding")


class Products(TorchDispatchMode):
    """FLOPs of products by the parameter that they read; those of activations alone are attention's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.flops: dict[str, float] = {}
        self._names = {p.untyped_storage().data_ptr(): name for name, p in model.named_parameters()}
        self._casts: list[torch.Tensor] = []  # held, so that their memory is nobody else's

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm", "addmm", "baddbmm", "_grouped_mm"):
            a, b = args[1:3] if name in ("addmm", "baddbmm") else args[:2]
            read = [self._names.get(t.untyped_storage().data_ptr()) for t in (a, b)]
            gathered = name == "bmm" and 1 in (*a.shape[1:], *b.shape[1:])  # a token and a matrix
            if any(read) or gathered:
                key = next((n for n in read if n), "gathered")
                self.flops[key] = self.flops.get(key, 0.0) + 2.0 * out.numel() * a.shape[-1]
        elif name == "_to_copy" and (cast_of := self._names.get(args[0].untyped_storage().data_ptr())):
            self._names[out.untyped_storage().data_ptr()] = cast_of
            self._casts.append(out)
        return out


@dataclass
class Row:
    """One line of the table."""

    family: str
    observed: float
    meant: float  # of what the precision map takes
    looked_at: float  # observed, or its input and output are looked at
    rest: str  # what is not observed, with its share
    identical: bool
    steps: int
    told: str


class Arrived:
    """In place of the agent: which sites came, and how many elements of each in one step."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.sites: dict[int, Any] = {}
        self.elements: dict[int, int] = {}
        self.ever: set[int] = set()  # sites of any step
        self.session, self.steps = __.get("session", _[1] if len(_) > 1 else None), 0
        self.collector = CollectorChecks(self.session)

    def register_sites(self, sites: Any) -> None:
        self.collector.sites(sites)
        self.sites.update((s.id, s) for s in sites)

    def record_step(self, header: Any, ids: Any, rows: Any, *rest: Any, **more: Any) -> None:
        self.collector.step(header, ids, rows, *rest, **more)
        self.elements = {int(i): int(r["num_elements"]) for i, r in zip(ids, rows, strict=True)}
        self.ever.update(self.elements)
        self.steps += 1

    def update_facts(self, facts: Any) -> None:
        self.collector.facts(facts)

    def wanted_captures(self) -> frozenset[int]:
        return frozenset()

    def health(self) -> Any:
        from fp8watch_agent.health import Health

        return Health(state="kept")

    def flush(self, _timeout_s: float) -> bool:
        return True

    def __getattr__(self, _name: str) -> Any:
        return lambda *_, **__: None


def train(family: Family, model: nn.Module, steps: int = STEPS, breaks_at: int | None = None) -> list[float]:
    """AdamW on the same batches; with `breaks_at` an Inf is put into the weight before that step."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    model.train()
    for step in range(steps):
        if step == breaks_at:
            with torch.no_grad():
                dict(model.named_parameters())[family.weight][family.at] = float("inf")
        torch.manual_seed(step)
        loss = family.loss(model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def made(family: Family) -> nn.Module:
    torch.manual_seed(0)
    return family.make()


def observed_flops(kept: Arrived) -> float:
    """2·M·K·N of each GEMM whose operands arrived: features of the input times elements of the gradient."""
    features = {s.module: s.shape[1] for s in kept.sites.values() if s.operand == "input" and s.recipe != PROBE}
    elements: dict[str, int] = {}
    for i, s in kept.sites.items():
        if s.operand == "grad_output" and i in kept.elements:
            elements[s.module] = max(elements.get(s.module, 0), kept.elements[i])
    return sum(2.0 * n * features[module] for module, n in elements.items() if module in features)


def measure(family: Family) -> Row:
    """Everything but what the collector says."""
    import fp8watch
    import fp8watch.session.start as start
    from fp8watch_agent.roles import role_of

    plain = (family.counted or (lambda: made(family)))()
    plain.train()
    with Products(plain) as products:
        family.loss(plain, 0)
    del plain
    alone = train(family, made(family))
    model, recorder = made(family), start.Recorder
    start.Recorder = Arrived  # type: ignore[assignment, misc]
    try:
        watch = fp8watch.attach(model, recipe="observe", overhead_budget=None)
    finally:
        start.Recorder = recorder  # type: ignore[misc]
    losses = train(family, model)
    kept: Any = watch._recorder
    facts, errors = kept.session.facts, watch.summary()["internal_errors"]
    watch.detach()
    if errors:
        raise RuntimeError(f"{family.name}: internal errors {errors}")
    total, observed = sum(products.flops.values()), observed_flops(kept)
    left = re.findall(r"([^;()]+?) \(((?:[^()]|\([^()]*\))*)\)(?:; |$)", f"{facts['left_out']}; {facts['not_taken']}")
    design = [
        re.compile(re.escape(n.strip().removesuffix(".tied_head")).replace(r"\*", r"\d+") + r"(\.weight)?$")
        for n, why in left
        if BY_DESIGN.search(why) or role_of(n.strip())
    ]
    tied = [n for n, p in model.named_parameters() if any(d.match(n) for d in design)]
    names = {id(p): n for n, p in model.named_parameters()}
    tied += [
        names[id(m.weight)]
        for f, m in model.named_modules()
        if any(d.match(f) for d in design) and hasattr(m, "weight")
    ]
    meant = total - sum(products.flops.get(n, 0.0) for n in set(tied))
    looked = observed + sum(products.flops.get(n, 0.0) for n in looked_at(model, kept))
    rest = rest_of({n: flops / total for n, flops in products.flops.items() if n in set(tied)})
    return Row(family.name, observed / total, observed / meant, looked / total, rest, losses == alone, kept.steps, "")


def rest_of(shares: dict[str, float]) -> str:
    """Weights that stay in high precision by design, layers together, largest first."""
    found: dict[str, float] = {}
    for name, share in shares.items():
        key = re.sub(r"\.\d+\.", ".*.", name.removesuffix(".weight"))
        found[key] = found.get(key, 0.0) + share
    return ", ".join(f"`{n}` {100 * s:.1f} %" for n, s in sorted(found.items(), key=lambda row: -row[1]))


def looked_at(model: nn.Module, kept: Arrived) -> set[str]:
    """Weights of heads and routers whose inputs and outputs arrived, though no operand of theirs is one of FP8."""
    operands = {s.module for s in kept.sites.values() if s.recipe != PROBE}
    given, put_out = (
        {s.module for i, s in kept.sites.items() if s.recipe == PROBE and s.operand == operand and i in kept.ever}
        for operand in ("input", "output")
    )
    arrived = given & put_out - operands
    names = {id(p): n for n, p in model.named_parameters()}
    found = set()
    for fqn, module in model.named_modules():
        weight = getattr(module, "weight", None)
        by = f"{fqn}.tied_head" if isinstance(module, nn.Embedding) else fqn
        if by in arrived and isinstance(weight, nn.Parameter) and weight.dim() == 2:
            found.add(names[id(weight)])
    return found


def told_of_an_inf(family: Family, url: str) -> str:
    """Title of the first incident of a run into which an Inf was put."""
    from proving import collector

    import fp8watch

    run = re.sub(r"\W+", "-", family.name.lower())
    os.environ["FP8WATCH_RUN"] = run
    with fp8watch.attach(made(family), recipe="observe", run=family.name, collector=url, overhead_budget=None) as watch:
        train(family, watch._model, steps=BREAKS_AT + 1, breaks_at=BREAKS_AT)
        watch.flush(20)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found = collector.incidents(url, run)
        if found:
            return json.dumps([found[0]["title"], found[0]["cause"]])
        time.sleep(0.3)
    return json.dumps(["no incident", ""])


def element_of(told: str) -> str:
    """Title and the element that the cause names."""
    title, cause = json.loads(told)
    element = re.search(r"element \(\d+, \d+\)(?: of expert \d+)?", cause)
    return title + (f"; {element[0]}" if element else "")


def table(rows: list[Row], versions: str) -> str:
    """The section of the page."""
    lines = heads.families(versions, STEPS)
    for r in rows:
        same = "yes" if r.identical else "**no**"
        shares = f"{100 * r.observed:.1f} % | {r.rest} | {100 * r.meant:.1f} % | {100 * r.looked_at:.1f} %"
        lines.append(f"| {r.family} | {shares} | {same} | {r.steps} of {STEPS} | {r.told} |")
    return "\n".join([*lines, END])


def main() -> int:
    """Measure, and write or print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--print", action="store_true", help="print the section, and leave the page as it is")
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    refuse_other_settings()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    chosen = [f for f in FAMILIES if not args.names or any(n.lower() in f.name.lower() for n in args.names)]
    from proving import collector

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FP8WATCH_SPOOL_DIR"] = folder
        os.environ["PYTHONPATH"] = os.pathsep.join(str(ROOT / name) for name in ("", "agent", "server"))
        with collector.serving(Path(folder)) as url:
            for family in chosen:
                row = measure(family)
                row.told = element_of(told_of_an_inf(family, url))
                print(row, flush=True)
                rows.append(row)
                gc.collect()
    import importlib.metadata as metadata

    have = [f"{n} {metadata.version(n)}" for n in ("torch", "transformers", "diffusers", "torchao")]
    text = table(rows, ", ".join(have))
    if args.print or args.names:
        print(text)
        return 0
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(before + text + rest.partition(END)[2])
    return 0


if __name__ == "__main__":
    sys.exit(main())
