"""The state of an engine as bytes, and back: a collector that restarts goes on with the same baselines and alarms.

Shapes:     Engine -> zstd of msgpack
Thread:     detect worker

Replaying batches cannot rebuild everything: a baseline is frozen while its alarm is on, however long that is. The walk
is generic and its classes are those of the engine and of the modes, so reading a state makes nothing but plain data. What refers to batches
(steps that wait for a rank) is left out: what came of them before the state was saved is compared with nothing.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any

import msgspec
import numpy as np
import zstandard

from fp8watch_agent.wire import WireError, decompress
from fp8watch_server.detect import (
    baseline,
    context,
    finding,
    hysteresis,
    lr_schedule,
    registered_facts,
    sample_gaps,
    session_state,
    sessions,
    statistics,
    step_alignment,
    tallies,
)
from fp8watch_server.detect.families import degenerate, gradient_sketches, replica_consistency, scale_agreement
from fp8watch_server.detect.modes import DETECTORS
from fp8watch_server.detect.modes.recipe_mismatch import scale_history

VERSION = 3
MAX_STATE_BYTES = 256 << 20

_ENGINE = (
    replica_consistency.Agreement,
    scale_agreement.ScaleAgreement,
    gradient_sketches.GradientParts,
    step_alignment.Assembly,
    step_alignment._Rank,
    baseline.Baseline,
    context.Baselines,
    degenerate.ZeroTiles,
    finding.Evidence,
    finding.Finding,
    finding.Notice,
    finding.SiteFacts,
    hysteresis.Latch,
    registered_facts.Registry,
    scale_history.ScaleHistory,
    sample_gaps.SampleGaps,
    lr_schedule.Schedule,
    sessions.Change,
    sessions.SessionFacts,
    statistics.Statistics,
    session_state.Attempt,
    session_state.Stream,
    tallies.Seen,
)
_DETECTORS = (part for kind in DETECTORS for part in (kind, *kind.parts))
_CLASSES: dict[str, type] = {kind.__name__: kind for kind in (*_ENGINE, *_DETECTORS)}
"""Every class of a state, by the name under which it is saved: a name that changes is a state that is not read."""
_SKIPPED = {"limit", "_pending"}
"""Made anew: thresholds come from the rules, pending steps from the batches behind the state."""
_DTYPES = frozenset({"<f8", "<f4", "<i8", "<i4", "<u8", "<u4", "|b1", "|i1", "|u1"})


class StateError(ValueError):
    """Bytes that are no state of this version: begin anew, and replay."""


def dump(parts: dict[str, Any]) -> bytes:
    """Parts of an engine as bytes."""
    body = msgspec.msgpack.encode({"version": VERSION, "parts": {k: _pack(v) for k, v in parts.items()}})
    return zstandard.ZstdCompressor(level=3, write_checksum=True).compress(body)


def load(raw: bytes) -> dict[str, Any]:
    """The parts again.

    Raises:
        StateError: another version, or no state.
    """
    try:
        body = msgspec.msgpack.decode(decompress(raw, MAX_STATE_BYTES))
        if not isinstance(body, dict) or body.get("version") != VERSION:
            raise StateError(
                f"state of version {body.get('version') if isinstance(body, dict) else None!r}, not {VERSION}"
            )
        return {k: _unpack(v) for k, v in body["parts"].items()}
    except (WireError, msgspec.MsgspecError, KeyError, TypeError, AttributeError, RecursionError, ValueError) as e:
        if isinstance(e, StateError):
            raise
        raise StateError(f"no engine state: {type(e).__name__}: {e}") from e


def _pack(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value if not isinstance(value, np.generic) else value.item()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return {"!": "array", "d": value.dtype.str, "s": list(value.shape), "b": np.ascontiguousarray(value).tobytes()}
    if isinstance(value, list):
        return [_pack(v) for v in value]
    if isinstance(value, tuple | set | frozenset):
        members = value if isinstance(value, tuple) else sorted(value, key=repr)  # one state, one sequence of bytes
        return {"!": type(value).__name__, "v": [_pack(v) for v in members]}
    if isinstance(value, dict):
        return {"!": type(value).__name__, "v": [[_pack(k), _pack(v)] for k, v in value.items()]}
    name = type(value).__name__
    if _CLASSES.get(name) is type(value):
        return {"!": "object", "c": name, "v": {k: _pack(v) for k, v in vars(value).items() if k not in _SKIPPED}}
    if hasattr(value, "items"):  # a read-only mapping
        return {"!": "dict", "v": [[_pack(k), _pack(v)] for k, v in value.items()]}
    raise TypeError(f"{name} is no part of an engine's state")


def _unpack(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpack(v) for v in value]
    if not isinstance(value, dict):
        return value
    kind = value["!"]
    if kind == "array":
        if value["d"] not in _DTYPES:
            raise StateError(f"an array of {value['d']!r}")
        return np.frombuffer(value["b"], dtype=value["d"]).reshape(value["s"]).copy()
    if kind in ("dict", "OrderedDict"):
        pairs = [(_unpack(k), _unpack(v)) for k, v in value["v"]]
        return OrderedDict(pairs) if kind == "OrderedDict" else dict(pairs)
    if kind in ("tuple", "set", "frozenset"):
        items = [_unpack(v) for v in value["v"]]
        return tuple(items) if kind == "tuple" else set(items) if kind == "set" else frozenset(items)
    if kind != "object":
        raise StateError(f"a part of kind {kind!r}")
    made: Any = object.__new__(_CLASSES[value["c"]])
    fields = {k: _unpack(v) for k, v in value["v"].items()}
    if hasattr(made, "upgraded"):
        fields = made.upgraded(fields)
    if dataclasses.is_dataclass(made):
        known = {f.name for f in dataclasses.fields(made)}
        if not set(fields) <= known:
            raise StateError(f"{value['c']} with {sorted(set(fields) - known)}")
    made.__dict__.update(fields)
    return made
