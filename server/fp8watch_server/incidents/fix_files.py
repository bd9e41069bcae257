"""A fix as a file: modules that an incident or a bisection names, in high precision, in the words of a framework.

Shapes:     names, facts of a session -> the text of one file
Thread:     any; pure functions

Each text is what its consumer parses as it stands: Megatron's --te-precision-config-file, Transformer Engine's debug
features, torchtitan's filter_fqns, torchao's module_filter_fn, a recipe file of fp8watch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fp8watch_server.detect.remedies import OPERANDS

GEMMS = {"input": ("fprop", "wgrad"), "weight": ("fprop", "dgrad"), "grad_output": ("dgrad", "wgrad")}
"""Operand -> the GEMMs that read it."""
MAX_NAMES = 1000
MAX_NAME = 1000


class FixError(ValueError):
    """What was asked for cannot be written: value, rule, remedy."""


@dataclass(frozen=True)
class Asked:
    """What a file is written from."""

    modules: tuple[str, ...]
    """Fully qualified names."""
    operands: Mapping[str, tuple[str, ...]]
    """Module -> operands that must leave FP8; those that are not there leave as a whole."""
    why: str
    """One line for the head of the file."""
    facts: Mapping[str, Any]
    """Of the newest session: the recipe in effect."""

    def gemms(self, module: str) -> tuple[str, ...]:
        """GEMMs that must leave FP8, in the order of a step; all where no operand is named."""
        named = self.operands.get(module) or OPERANDS
        found = {gemm for operand in named for gemm in GEMMS[operand]}
        return tuple(gemm for gemm in ("fprop", "dgrad", "wgrad") if gemm in found)

    @property
    def whole(self) -> str:
        """A remark where operands were named and the file can only name modules."""
        return "Its GEMMs leave together: this file cannot tell operands apart." if self.operands else ""


def asked(names: Sequence[str], why: str, facts: Mapping[str, Any]) -> Asked:
    """Names as "module" or "module.operand", checked.

    Raises:
        FixError: none, too many, or one that no module can have.
    """
    if not names:
        raise FixError("no module: the incident names none; give them, as module= or --module")
    if len(names) > MAX_NAMES:
        raise FixError(f"{len(names)} names: at most {MAX_NAMES}; leave a whole pattern out by hand")
    operands: dict[str, tuple[str, ...]] = {}
    modules: dict[str, None] = {}
    whole: set[str] = set()
    for name in names:
        if not name or len(name) > MAX_NAME or not name.isprintable():
            raise FixError(
                f"{name[:100]!r}: must be the name of a module, printable and of at most {MAX_NAME} characters"
            )
        head, _, tail = name.rpartition(".")
        module = head if head and tail in OPERANDS else name
        modules[module] = None
        if module == name:
            whole.add(name)
        else:
            operands[module] = (*operands.get(module, ()), tail)
    return Asked(tuple(modules), {m: o for m, o in operands.items() if m not in whole}, one_line(why), facts)


def one_line(text: str) -> str:
    """Text for a comment: it cannot leave its line."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:300]


def _head(a: Asked, *lines: str) -> str:
    return "".join(f"# {line}\n" for line in (a.why, *lines) if line)


def _quoted(text: str) -> str:
    """As JSON, which YAML, TOML and Python read alike."""
    return json.dumps(text, ensure_ascii=False)


def _glob(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


def megatron(a: Asked) -> str:
    """Megatron-LM's per-module precision: the first matcher that fits wins, modules that none fits stay as they are."""
    head = _head(a, "Megatron-LM: --te-precision-config-file THIS_FILE (not with --fp8-recipe delayed)", a.whole)
    config = "configs:\n  high_precision:\n    transformer_engine_config_type: TEQuantizationParams\n    training_recipe: {}\n"
    lines = ["matchers:"]
    for i, module in enumerate(a.modules):
        for j, pattern in enumerate((_glob(module), f"*.{_glob(module)}")):
            lines.append(f"  module_{i}{'_inside' if j else ''}:")
            lines.append(f"    {{type: glob, enabled: true, pattern: {_quoted(pattern)}, config: high_precision}}")
    return f"{head}{config}" + "\n".join(lines) + "\n"


def te_debug(a: Asked) -> str:
    """Transformer Engine's debug features, by GEMM."""
    head = _head(
        a,
        "Transformer Engine: nvdlfw_inspect.api.initialize(config_file=THIS_FILE, feature_dirs=[…/transformer_engine/debug/features])",
        "Layers are found by name; where modules have a layer_number (Megatron), that stands in it, counted from 1.",
    )
    by_gemms: dict[tuple[str, ...], list[str]] = {}
    for module in a.modules:
        by_gemms.setdefault(a.gemms(module), []).append(module)
    out = [head]
    for i, (gemms, modules) in enumerate(by_gemms.items()):
        pattern = "(?:^|\\.)(?:" + "|".join(map(re.escape, modules)) + ")$"
        out.append(
            f"high_precision_{i}:\n  enabled: True\n  layers:\n    layer_name_regex_pattern: {_quoted(pattern)}\n"
        )
        out.append("  transformer_engine:\n")
        whole = len(gemms) == 3
        out.append(f"    DisableFP8{'Layer' if whole else 'GEMM'}:\n      enabled: True\n")
        out.append("" if whole else f"      gemms: [{', '.join(gemms)}]\n")
    return "".join(out)


def torchtitan(a: Asked) -> str:
    """torchtitan's filter_fqns: every module whose name contains one of these."""
    names = ", ".join(map(_quoted, a.modules))
    head = _head(
        a,
        "torchtitan: add these to the filter_fqns that you have: Float8LinearConverter.Config(filter_fqns=…) in Python,",
        "[quantize.linear.float8] in TOML, --quantize.linear.float8.filter_fqns on the command line.",
        a.whole,
    )
    return f"{head}filter_fqns = [{names}]\n"


def torchao(a: Asked) -> str:
    """torchao's module_filter_fn, as a module to import."""
    names = "".join(f"    {_quoted(module)},\n" for module in a.modules)
    head = _head(a, "torchao: convert_to_float8_training(model, module_filter_fn=module_filter_fn)", a.whole)
    return (
        f"{head}HIGH_PRECISION = (\n{names})\n\n\n"
        "def module_filter_fn(module, fqn):\n"
        '    """True for what is converted: torchao calls it with each nn.Linear."""\n'
        '    return not any(fqn == name or fqn.endswith("." + name) for name in HIGH_PRECISION)\n'
    )


def fp8watch(a: Asked) -> str:
    """A recipe file: the recipe in effect, with these modules left out."""
    f = a.facts
    missing = [operand for operand in OPERANDS if f"{operand}.format" not in f]
    if missing:
        raise FixError(
            f"{missing[0]}.format is not among the facts of the run: it has no recipe of fp8watch; choose --for"
        )
    name = str(f.get("recipe") or "")
    out = [_head(a, "fp8watch.attach(model, recipe='THIS_FILE.toml')", a.whole), "version = 1\n\n[recipe]\n"]
    out.append(f"name = {_quoted('' if name == 'observe' else name)}\n")
    if isinstance(steps := f.get("warmup_steps"), int):
        out.append(f"warmup_steps = {steps}\n")
    out.append(f"high_precision_modules = [{', '.join(_quoted(_glob(m)) for m in a.modules)}]\n")
    for operand in OPERANDS:
        out.append(f"\n[recipe.{operand}]\n")
        if f[f"{operand}.format"] == "high precision":
            out.append("high_precision = true\n")
            continue
        tile = str(f.get(f"{operand}.tile", ""))
        sides = [int(side) for side in tile.split("x") if side.isdigit()]
        out.append(f"tile = {sides if len(sides) == 2 else _quoted(tile)}\n")
        out += [
            f"{k} = {_toml(f[f'{operand}.{k}'])}\n"
            for k in ("format", "power_2_scale", "eps", "scaling")
            if f"{operand}.{k}" in f
        ]
    if "amax_history_len" in f:
        out.append("\n[recipe.history]\n")
        out += [f"{k} = {_toml(f[k])}\n" for k in ("amax_history_len", "amax_compute_algo", "margin") if k in f]
    return "".join(out)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, int | float) else _quoted(str(value))


@dataclass(frozen=True)
class Target:
    """A framework that a fix is written for."""

    name: str
    write: Callable[[Asked], str]
    suffix: str
    media_type: str
    what: str


TARGETS = {
    target.name: target
    for target in (
        Target("megatron", megatron, ".yaml", "application/yaml", "Megatron-LM's --te-precision-config-file"),
        Target("te-debug", te_debug, ".yaml", "application/yaml", "debug features of Transformer Engine"),
        Target("torchtitan", torchtitan, ".toml", "application/toml", "torchtitan's filter_fqns"),
        Target("torchao", torchao, ".py", "text/x-python", "torchao's module_filter_fn"),
        Target("fp8watch", fp8watch, ".toml", "application/toml", "a recipe file for fp8watch.attach"),
    )
}
"""By the name that `fp8watch fix --for` takes."""


def fix_file(target: str, names: Sequence[str], why: str, facts: Mapping[str, Any]) -> str:
    """The text of the file.

    Args:
        target: one of TARGETS.
        names: "module" or "module.operand".
        why: for the head of the file.
        facts: of the newest session.

    Raises:
        FixError: names that cannot be, or a target that needs what the facts do not say.
    """
    return TARGETS[target].write(asked(names, why, facts))
