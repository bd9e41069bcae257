"""The one line that attach prints: what was taken over, what was not and why, and where the run goes.

Thread:     training, once
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

from torch import nn

from fp8watch.integrations.tested_versions import untested
from fp8watch.integrations.transformer_engine import TeObserver
from fp8watch.recipe import Recipe
from fp8watch.selection.flop_coverage import Coverage
from fp8watch.selection.module_filter import LeftOut, in_layers
from fp8watch.session.gemm_choice import GemmChoice
from fp8watch.session.identity import Identity
from fp8watch.session.plan_rows import Watched, own_words
from fp8watch.session.sites import ROOT
from fp8watch_agent.recorder import Recorder
from fp8watch_agent.settings import AgentSettings


def run_url(settings: AgentSettings, identity: Identity) -> str | None:
    """The run's own page; None without a collector."""
    if settings.collector is None:
        return None
    return f"{settings.collector.rstrip('/')}/runs/{quote(identity.run_id, safe='')}"


def spool_words(used: Path | None, wanted: Path) -> str:
    """Where the records of a run without a collector lie: the folder that is used, which need not be the one that was wanted."""
    if used is None:
        return f"nowhere: neither {wanted} nor a temporary folder can be written"
    return f"spool {used}, send it with `fp8watch sync{'' if used == wanted else f' --spool-dir {used}'}`"


def attach_line(
    watched: Watched,
    left_out: list[LeftOut],
    recipe: Recipe,
    backend: str,
    settings: AgentSettings,
    identity: Identity,
    recorder: Recorder | None,
    te: TeObserver | None,
    covered: Coverage,
    foreign: str | None,
    by: GemmChoice,
) -> str:
    """The one line that attach prints."""
    linears, own = watched.linears, own_words(watched)
    n = f"{len(linears)} Linear{'s' if len(linears) != 1 else ''}"
    if foreign is not None:
        parts = [foreign]
    elif not linears and (te is not None or own):
        parts = []
    elif not linears:
        parts = ["no Linear taken over" + (", loss and steps are recorded" if recorder is not None else "")]
    elif recipe.observe_only:
        how = "" if recipe.kind == "blockwise" else f"{recipe.kind}, "
        parts = [f"{n} observed, computing as before ({how}backend {backend})"]
        if by.reason is not None:
            parts.append(f"not in FP8, because {by.reason}; gemm='emulated' computes it in float32 products, slower")
    else:
        warmup = f" after {recipe.warmup_steps} steps in high precision" if recipe.warmup_steps else ""
        codes = ", codes multiplied by torch._scaled_mm" if by.how == "scaled_mm" else ""
        parts = [
            f"{n} now compute in FP8 ({recipe.name}, backend {backend}{codes}){warmup}; recipe='observe' to only watch"
        ]
    if te is not None:
        s = "s" if len(te.modules) != 1 else ""
        parts.append(f"{len(te.modules)} Transformer Engine module{s} observed, computing as before")
    parts += own
    if settings.disabled != "stats" and (text := covered.line()) is not None:
        parts.append(text)
    if left_out:
        layers = in_layers(left_out)
        more = f" and {len(layers) - 6} more" if len(layers) > 6 else ""
        parts.append("left out: " + ", ".join(f"{m.fqn or ROOT} ({m.reason})" for m in layers[:6]) + more)
    if settings.disabled == "stats":
        parts.append("statistics switched off by FP8WATCH_DISABLED=stats")
    elif recorder is not None:
        where = run_url(settings, identity) or spool_words(recorder.spool_dir, settings.spool_dir)
        local = "; FP8WATCH_RUN names it" if identity.source == "local" else ""
        parts.append(f"run {identity.run_id} ({identity.source}{local}) → {where}")
    return "; ".join(parts)


def untested_versions(model: nn.Module) -> list[str]:
    """One sentence for each library that modules of the model come from in a version that was not tested."""
    packages = {cls.__module__.partition(".")[0] for m in model.modules() for cls in type(m).__mro__}
    return untested(packages)
