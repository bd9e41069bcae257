"""FP8 that a trainer was asked for: by its flags, its environment, or a configuration file on its command line.

Thread:     training, once

Asked for is not computed: a converter that finds no module, a GPU that is too old, a framework whose setting another
one overwrites all leave a run in BF16 without an error. Whether anything computes in FP8 is told by the model
(`fp8watch.selection.foreign_fp8`); here is only what was asked. Files are searched for one setting, not parsed.

Source: Megatron-LM's --fp8-format; accelerate's environment, as `accelerate launch` sets it for --mixed_precision fp8;
torchtitan's model converters; LLaMA-Factory's `fp8: true`; --fp8 of training scripts.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fp8watch.recipe.trainer import trainer_flags

MAX_FILE_BYTES = 1 << 20
_NO = ("0", "false", "no", "none", "off")
_PRECISION = ("--mixed_precision", "--mixed-precision")
_CONVERTERS = "--model.converters"
_FP8_CONVERTER = re.compile(r"float8|mx", re.IGNORECASE)
_IN_FILE = {  # ending -> what asks for it there, and of whom that is
    ".toml": (re.compile(r"^\s*converters\s*=\s*\[[^\]]*(?:float8|mx)[^\]]*\]", re.MULTILINE), "torchtitan"),
    ".yaml": (re.compile(r"^\s*fp8\s*:\s*true\b.*$", re.MULTILINE | re.IGNORECASE), "LLaMA-Factory"),
    ".json": (re.compile(r'"fp8"\s*:\s*true'), "LLaMA-Factory"),
}
_IN_FILE[".yml"] = _IN_FILE[".yaml"]

REMEDY = {
    "Megatron": "--transformer-impl transformer_engine has it, with modules of Transformer Engine",
    "accelerate": "accelerator.prepare(model) converts, where its FP8 backend is installed: attach after it",
    "torchtitan": "its converters swap Linears where the GPU can (compute capability 8.9 and later): attach after them",
    "LLaMA-Factory": "accelerate converts for it, where the launcher's mixed precision is fp8 as well",
    "the training script": "attach after it has converted the model",
}


def declared_fp8(
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
    modules: Mapping[str, Any] | None = None,
) -> tuple[tuple[str, str], ...]:
    """What asks for FP8, as (what stands there, of whom it is), the most certain first.

    Args:
        argv: instead of `sys.argv[1:]`.
        environ: instead of `os.environ`.
        modules: instead of `sys.modules`.
    """
    argv = sys.argv[1:] if argv is None else argv
    environ = os.environ if environ is None else environ
    modules = sys.modules if modules is None else modules
    return tuple(dict.fromkeys((*_of_megatron(argv, modules), *_of_accelerate(environ, modules), *_of_argv(argv))))


def not_active(asked: Sequence[tuple[str, str]], converted: bool) -> str | None:
    """The sentence for a run that was asked for FP8 by its trainer and has none of it; None where nothing asked.

    Args:
        asked: as `declared_fp8` gives it.
        converted: fp8watch's own recipe converts Linears of it.
    """
    if not asked:
        return None
    owners = list(dict.fromkeys(owner for _, owner in asked))
    what = ", ".join(f"{text} ({owner})" for text, owner in asked)
    ours = ", but for what fp8watch converts" if converted else ""
    return f"FP8 is asked for by {what}, and no module of the model computes in FP8{ours}: {'; '.join(REMEDY[o] for o in owners)}"


def _of_megatron(argv: Sequence[str], modules: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    fmt = dict(trainer_flags(argv, modules)).get("fp8_format")
    if fmt is not None:
        yield f"--fp8-format {fmt}", "Megatron"


def _of_accelerate(environ: Mapping[str, str], modules: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    state = getattr(modules.get("accelerate.state"), "AcceleratorState", None)
    held = getattr(state, "_shared_state", None)
    if isinstance(held, Mapping) and str(held.get("_mixed_precision", "")) == "fp8":
        yield "Accelerator(mixed_precision='fp8')", "accelerate"
    elif environ.get("ACCELERATE_MIXED_PRECISION", "").lower() == "fp8":
        yield "ACCELERATE_MIXED_PRECISION=fp8", "accelerate"
    elif (
        backend := environ.get("ACCELERATE_FP8_BACKEND")
    ) is not None:  # bf16=True of transformers overwrites the other
        now = environ.get("ACCELERATE_MIXED_PRECISION", "no")
        yield f"ACCELERATE_FP8_BACKEND={backend} with ACCELERATE_MIXED_PRECISION={now}", "accelerate"


def _of_argv(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    for i, word in enumerate(argv):
        flag, given, value = word.partition("=")
        after = argv[i + 1] if i + 1 < len(argv) and not argv[i + 1].startswith("-") else ""
        value = value if given else after
        if flag in _PRECISION and value.lower() == "fp8":
            yield f"{flag} fp8", "accelerate"
        elif flag == _CONVERTERS and _FP8_CONVERTER.search(value):
            yield f"{flag} {value}", "torchtitan"
        elif flag in ("--fp8", "--use_fp8", "--use-fp8") and value.lower() not in _NO:
            yield flag, "the training script"
        elif (found := _in_file(word if not flag.startswith("-") else value)) is not None:
            yield found


def _in_file(name: str) -> tuple[str, str] | None:
    path = Path(name)
    pattern, owner = _IN_FILE.get(path.suffix.lower(), (None, ""))
    if pattern is None:
        return None
    try:
        if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
            return None
        hit = pattern.search(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError):
        return None
    return None if hit is None else (f"{hit[0].strip()} in {path.name}", owner)
