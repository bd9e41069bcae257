"""The failure modes: one folder each, registered by being here.

Shapes:     slug -> Mode
Thread:     any; only data

The folder of `some-mode` is `some_mode`: `MODE` in its `__init__`, words, runbook, and the detector where it has one of
its own. Which mode explains which, and who is asked first, stands in `fp8watch_server.detect.precedence`.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType

from fp8watch_server.detect.detector import Detector
from fp8watch_server.detect.mode import Mode, StepCheck
from fp8watch_server.detect.precedence import asked_at


def _registered() -> tuple[Mode, ...]:
    folders = [found.name for found in iter_modules(__path__) if found.ispkg]
    modes: list[Mode] = [import_module(f"{__name__}.{name}").MODE for name in folders]
    for name, mode in zip(folders, modes, strict=True):
        if name != folder_of(mode.slug):
            raise ImportError(f"{name} holds the mode {mode.slug}: the folder of that one is {folder_of(mode.slug)}")
    return tuple(sorted(modes, key=lambda m: m.number))


def folder_of(slug: str) -> str:
    """Name of a mode's folder."""
    return slug.replace("-", "_")


def _detectors(modes: Iterable[Mode]) -> tuple[type[Detector], ...]:
    """Each once, in the order in which they are asked: a detector of several modes at the place of the last of them."""
    kinds = dict.fromkeys(kind for mode in modes for kind in mode.detectors)
    return tuple(sorted(kinds, key=lambda kind: max(asked_at(slug) for slug in kind.modes)))


MODES: tuple[Mode, ...] = _registered()
MODE_BY_SLUG = MappingProxyType({mode.slug: mode for mode in MODES})
SLUGS: tuple[str, ...] = tuple(MODE_BY_SLUG)
DETECTORS = _detectors(MODES)
STEP_CHECKS: tuple[StepCheck, ...] = tuple(dict.fromkeys(mode.step_check for mode in MODES if mode.step_check))
