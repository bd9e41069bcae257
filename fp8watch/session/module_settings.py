"""Settings that modules hold as numbers: what a restart may bring back otherwise, and nothing of FP8 tells.

Shapes:     modules -> "Dropout.p" -> "0.1"; by class, for what a model sets it sets in all of its layers
Thread:     training, once; reads small tables of a device

A checkpoint holds parameters. Probabilities of dropout, eps of norms, scalings of adapters and frequencies of positions come from code
and configuration anew with each start, and a library's new default or a flag that was forgotten changes them in silence. Integers are left
out: they count as often as they set.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fp8watch.selection.own_forward import own_class
from fp8watch_agent.module_settings import SETTINGS_FACT, encode_settings

MAX_VALUES = 4
"""Different ones in the modules of one class are listed, or else counted."""
MAX_TABLES, MAX_ELEMENTS = 16, 1 << 16
"""Buffers that no checkpoint holds."""


def setting_facts(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, str]:
    """The fact of a session."""
    text = encode_settings(settings_of(modules))
    return {SETTINGS_FACT: text} if text else {}


def settings_of(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, str]:
    """Class and attribute -> value, or the values of all modules of that class."""
    numbers: dict[str, list[float]] = {}
    tables: dict[str, str] = {}
    for _, module in modules:
        kind = own_class(module).__name__
        for name, value in vars(module).items():
            for key, number in _numbers_of(name, value):
                numbers.setdefault(f"{kind}.{key}", []).append(number)
        for name in sorted(module._non_persistent_buffers_set):
            table = module._buffers.get(name)
            if table is not None and f"{kind}.{name}" not in tables and len(tables) < MAX_TABLES and _is_read(table):
                tables[f"{kind}.{name}"] = _table_text(table)
    return {name: _text(values) for name, values in numbers.items()} | tables


def _numbers_of(name: str, value: object) -> list[tuple[str, float]]:
    """An attribute that is a number, or one for each adapter."""
    if name.startswith("_") or "time" in name:  # when it was made is no setting
        return []
    if isinstance(value, float) or (name == "p" and type(value) is int):  # Dropout(0)
        return [(name, float(value))]
    if isinstance(value, dict) and value and all(isinstance(v, float) and isinstance(k, str) for k, v in value.items()):
        return [(f"{name}[{key}]", number) for key, number in value.items()]
    return []


def _text(values: list[float]) -> str:
    different = sorted(set(values))
    if len(different) <= MAX_VALUES:
        return ", ".join(f"{v:.6g}" for v in different)
    return f"{len(different)} values from {different[0]:.6g} to {different[-1]:.6g} ({_sum_of(repr(values).encode())})"


def _is_read(table: Tensor) -> bool:
    plain = type(table) in (Tensor, nn.Buffer) and table.layout is torch.strided and not table.is_meta
    return plain and table.is_floating_point() and 0 < table.numel() <= MAX_ELEMENTS


def _table_text(table: Tensor) -> str:
    here = table.detach().cpu().contiguous().reshape(-1)
    bits = here.view(torch.uint8).numpy().tobytes()
    ends = f"{float(here[0]):.6g} … {float(here[-1]):.6g}"
    return f"{here.numel()} × {str(table.dtype).removeprefix('torch.')}, {ends} ({_sum_of(bits)})"


def _sum_of(data: bytes) -> str:
    return f"{zlib.crc32(data):08x}"
