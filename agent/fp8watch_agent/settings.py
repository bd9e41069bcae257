"""The agent's settings: one frozen list, from the environment and from arguments.

Thread:     the one that attaches; read-only afterwards
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints
from urllib.parse import urlsplit

RECIPES = ("blockwise", "current", "delayed", "mxfp8", "observe", "rowwise")  # the names of fp8watch.recipe.RECIPES
MIN_RING_BYTES = 1 << 20
MAX_RING_BYTES = 32 << 20
MAX_RUN_CHARS = 200


def _refuse(name: str, value: object, rule: str, remedy: str) -> ValueError:
    return ValueError(f"{name}={value!r}: {rule}; {remedy}")


def _collector(name: str, value: str) -> str:
    value = value.strip().rstrip("/")
    remedy = "give the address of `fp8watch serve`, such as http://127.0.0.1:8420"
    try:
        parts = urlsplit(value)
        port = parts.port
    except ValueError as e:
        raise _refuse(name, value, f"not a URL ({e})", remedy) from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise _refuse(name, value, "must be an http:// or https:// URL with a host", remedy)
    if parts.username is not None or parts.password is not None:
        raise _refuse(name, "(hidden)", "must not hold a password", "put a token into FP8WATCH_TOKEN")
    if parts.query or parts.fragment:
        raise _refuse(name, value, "must not hold a query or a fragment", remedy)
    return value


def check_token(name: str, value: str) -> str:
    """A token as it may stand in a header. The value is never repeated in the error."""
    value = value.strip()
    if not re.fullmatch(r"[!-~]{1,512}", value):
        raise _refuse(name, "(hidden)", "must be 1 to 512 printable ASCII characters without spaces", "copy it again")
    return value


def read_token_file(path: Path) -> str:
    """The token in a file; read anew after a refusal, so that a rotated one is picked up."""
    try:
        text = path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as e:
        raise _refuse("FP8WATCH_TOKEN_FILE", str(path), f"cannot be read ({e})", "name a readable file") from None
    return check_token("FP8WATCH_TOKEN_FILE", text)


def _token_file(name: str, value: str) -> Path:
    path = Path(value).expanduser()
    if not value.strip():
        raise _refuse(name, value, "must name a file", "unset it, or give the file's path")
    read_token_file(path)
    return path


def _run(name: str, value: str) -> str:
    if not re.fullmatch(r"[^/\\\x00-\x20\x7f]+", value) or len(value) > MAX_RUN_CHARS or value in (".", ".."):
        rule = f"must be 1 to {MAX_RUN_CHARS} characters without spaces, slashes and control characters"
        raise _refuse(name, value, rule, "it becomes part of a URL: choose a name such as gpt-7b-003")
    return value


def _every(name: str, value: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", value.strip()) or int(value) < 1:
        raise _refuse(name, value, "must be a whole number from 1 on", "1 samples each optimizer step, 10 each tenth")
    return int(value)


def _merge_steps(name: str, value: str) -> int:
    if not re.fullmatch(r"[0-9]{1,3}", value.strip()) or not 1 <= int(value) <= 64:
        raise _refuse(name, value, "must be a whole number from 1 to 64", "1 sends a record of each site in each step")
    return int(value)


def _recipe(name: str, value: str) -> str:
    if value not in RECIPES:
        raise _refuse(name, value, f"must be one of {', '.join(RECIPES)}", "unset it to leave the choice to attach")
    return value


def _spool_dir(name: str, value: str) -> Path:
    path = Path(value).expanduser()
    if not path.is_absolute() or (path.exists() and not path.is_dir()):
        raise _refuse(name, value, "must be the absolute path of a folder", "it is created where there is none")
    return path


def _disabled(name: str, value: str) -> str:
    if value not in ("", "0", "1", "stats"):
        raise _refuse(name, value, "must be 1 (everything) or stats (the observer only)", "unset it to observe")
    return "" if value == "0" else value


@dataclass(frozen=True)
class Variable:
    """The environment variable of a field of `AgentSettings`."""

    name: str
    default: str  # in words
    help: str
    parse: Callable[[str, str], Any]  # (variable, value) -> value of the field; ValueError says rule and remedy
    field: str = ""


def default_spool_dir(environ: Mapping[str, str]) -> Path:
    """$XDG_STATE_HOME/fp8watch, else ~/.local/state/fp8watch."""
    state = environ.get("XDG_STATE_HOME", "")
    home = environ.get("HOME", "") or os.path.expanduser("~")
    return (Path(state) if os.path.isabs(state) else Path(home) / ".local" / "state") / "fp8watch"


@dataclass(frozen=True)
class AgentSettings:
    """What the agent was told. Sizes in bytes, times in seconds."""

    collector: Annotated[
        str | None, Variable("FP8WATCH_COLLECTOR", "none: spool to disk", "URL of the collector", _collector)
    ] = None
    token: Annotated[str | None, Variable("FP8WATCH_TOKEN", "none", "token of scope ingest", check_token)] = None
    token_file: Annotated[
        Path | None, Variable("FP8WATCH_TOKEN_FILE", "none", "file that holds the token; may be rotated", _token_file)
    ] = None
    spool_dir: Annotated[
        Path, Variable("FP8WATCH_SPOOL_DIR", "~/.local/state/fp8watch", "folder of ring and spool", _spool_dir)
    ] = field(default_factory=lambda: default_spool_dir(os.environ))
    run: Annotated[
        str | None, Variable("FP8WATCH_RUN", "from the launcher", "id of the run, the same on all ranks", _run)
    ] = None
    every: Annotated[int, Variable("FP8WATCH_EVERY", "1", "sample each n-th optimizer step", _every)] = 1
    merge_steps: Annotated[
        int,
        Variable(
            "FP8WATCH_MERGE_STEPS", "16 from 256 ranks on, else 1", "steps that share a record where nothing new is said",
            _merge_steps,
        ),
    ] = 0  # fmt: skip
    recipe: Annotated[str | None, Variable("FP8WATCH_RECIPE", "attach's", "recipe: " + ", ".join(RECIPES), _recipe)] = (
        None
    )
    disabled: Annotated[
        str, Variable("FP8WATCH_DISABLED", "off", "1: everything; stats: the observer only", _disabled)
    ] = ""  # "" | "1" | "stats"
    ring_bytes: int = MAX_RING_BYTES
    spool_bytes: int = 1 << 30  # per session
    batch_bytes: int = 256 << 10  # on the wire, aimed at
    batch_interval_s: float = 1.0
    poll_interval_s: float = 0.2  # the training thread never wakes the sender: the sender looks
    request_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        if not MIN_RING_BYTES <= self.ring_bytes <= MAX_RING_BYTES:
            rule = f"must be from {MIN_RING_BYTES} to {MAX_RING_BYTES}"
            raise _refuse("ring_bytes", self.ring_bytes, rule, "leave it out for the largest")
        for name in ("spool_bytes", "batch_bytes", "batch_interval_s", "poll_interval_s", "request_timeout_s"):
            if not getattr(self, name) > 0:
                raise _refuse(name, getattr(self, name), "must be above 0", "leave it out for the default")

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> AgentSettings:
        """Settings from the environment; an override that is not None wins over its variable and obeys the same rule.

        Raises:
            ValueError: variable, value, rule and remedy.
        """
        environ = os.environ if environ is None else environ
        known = {f.name for f in fields(cls)}
        for name in overrides:
            if name not in known:
                raise _refuse(name, overrides[name], "unknown setting", f"known are {', '.join(sorted(known))}")
        values: dict[str, Any] = {k: v for k, v in overrides.items() if v is not None}
        given = {v.field: v for v in VARIABLES}
        for name, value in values.items():
            known_variable = given.get(name)
            if known_variable is not None:
                values[name] = known_variable.parse(name, str(value))
        for variable in VARIABLES:
            raw = environ.get(variable.name, "")
            if raw and variable.field not in values:
                values[variable.field] = variable.parse(variable.name, raw)
        if "token" in values and "token_file" in values:
            rule = "set together with a token"
            raise _refuse("FP8WATCH_TOKEN_FILE", str(values["token_file"]), rule, "unset one of the two")
        values.setdefault("spool_dir", default_spool_dir(environ))
        return cls(**values)


def _listed() -> tuple[Variable, ...]:
    hints = get_type_hints(AgentSettings, include_extras=True)
    beside = ((f.name, m) for f in fields(AgentSettings) for m in getattr(hints[f.name], "__metadata__", ()))
    return tuple(replace(m, field=name) for name, m in beside if isinstance(m, Variable))


VARIABLES = _listed()
"""Every variable of the agent, in the order of the fields."""
