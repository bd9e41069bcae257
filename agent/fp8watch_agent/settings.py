"""The agent's settings: one frozen list, from the environment and from arguments.

Thread:     the one that attaches; read-only afterwards
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints
from urllib.parse import urlsplit

from msgspec import Meta, ValidationError

from fp8watch_agent.checks import Rule, argument, checked, digits

RECIPES = ("blockwise", "current", "delayed", "mxfp8", "observe", "rowwise", "nvfp4")
"""The names of fp8watch.recipe.RECIPES."""

MIN_RING_BYTES = 1 << 20
MAX_RING_BYTES = 32 << 20
MAX_RUN_CHARS = 200


ADDRESS = "give the address of `fp8watch serve`, such as http://127.0.0.1:8420"


def _collector(text: str) -> str:
    value = text.strip().rstrip("/")
    if "," in value and "://" in value.partition(",")[2]:
        raise ValueError("must be one URL; give several to fp8watch relay, and the relay's address here")
    try:
        parts = urlsplit(value)
        port = parts.port
    except ValueError as e:
        raise ValueError(f"not a URL ({e}); {ADDRESS}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ValueError(f"must be an http:// or https:// URL with a host; {ADDRESS}")
    if parts.username is not None or parts.password is not None:
        raise ValueError("must not hold a password; put a token into FP8WATCH_TOKEN")
    if parts.query or parts.fragment:
        raise ValueError(f"must not hold a query or a fragment; {ADDRESS}")
    return value


def _token_in(path: Path) -> str:
    try:
        return str(checked(path.read_text(encoding="ascii"), Token))
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(f"cannot be read ({e}); name a readable file") from None


def read_token_file(path: Path) -> str:
    """The token in a file; read anew after a refusal, so that a rotated one is picked up.

    Raises:
        ValueError: it cannot be read, or holds no token. What it holds is not repeated.
    """
    try:
        return _token_in(path)
    except ValueError as e:
        raise ValueError(f"FP8WATCH_TOKEN_FILE={str(path)!r}: {e}") from None


def _token_file(text: str) -> Path:
    if not text.strip():
        raise ValidationError
    path = Path(text).expanduser()
    _token_in(path)
    return path


def _folder(text: str) -> Path:
    path = Path(text).expanduser()
    if not path.is_absolute() or (path.exists() and not path.is_dir()):
        raise ValidationError
    return path


def _digits(text: str) -> int:
    return digits(text.strip())


def _switch(text: str) -> str:
    return _one_of(("", "1", "stats"))("" if text == "0" else text)


def _one_of(known: Sequence[str]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in known:
            raise ValidationError
        return text

    return read


Token = Annotated[
    str,
    Meta(pattern=r"\A[!-~]{1,512}\Z"),
    Rule("must be 1 to 512 printable ASCII characters without spaces; copy it again", str.strip),
]
Url = Annotated[str, Rule(parse=_collector)]
TokenFile = Annotated[Path, Rule("must name a file; unset it, or give the file's path", _token_file)]
SpoolDir = Annotated[Path, Rule("must be the absolute path of a folder; it is created where there is none", _folder)]
Run = Annotated[
    str,
    Meta(pattern=r"\A(?!\.{1,2}\Z)[^/\\\x00-\x20\x7f]+\Z", max_length=MAX_RUN_CHARS),
    Rule(
        f"must be 1 to {MAX_RUN_CHARS} characters without spaces, slashes and control characters; it becomes part of a URL: "
        "choose a name such as gpt-7b-003"
    ),
]
Every = Annotated[
    int,
    Meta(ge=1, lt=10**9),
    Rule("must be a whole number from 1 on; 1 samples each optimizer step, 10 each tenth", _digits),
]
MergeSteps = Annotated[
    int,
    Meta(ge=1, le=64),
    Rule("must be a whole number from 1 to 64; 1 sends a record of each site in each step", _digits),
]
RecipeName = Annotated[
    str, Rule(f"must be one of {', '.join(RECIPES)}; unset it to leave the choice to attach", _one_of(RECIPES))
]
Disabled = Annotated[
    str,
    Rule("must be 1 (everything) or stats (the observer only); unset it to observe", _switch),
]
RingBytes = Annotated[
    int,
    Meta(ge=MIN_RING_BYTES, le=MAX_RING_BYTES),
    Rule(f"must be from {MIN_RING_BYTES} to {MAX_RING_BYTES}; leave it out for the largest"),
]
Bytes = Annotated[int, Meta(gt=0), Rule("must be above 0; leave it out for the default")]
Seconds = Annotated[float, Meta(gt=0), Rule("must be above 0; leave it out for the default")]


@dataclass(frozen=True)
class Variable:
    """The environment variable of a field of `AgentSettings`."""

    name: str
    default: str  # in words
    help: str
    hides: str | None = None  # a value that holds this is not repeated where it is refused; None: no value is secret
    field: str = ""
    type: Any = str

    def read(self, raw: str, source: str) -> Any:
        """The value of the field. Raises ValueError with source, value, rule and remedy."""
        try:
            return checked(raw, self.type)
        except ValueError as e:
            shown = "(hidden)" if self.hides is not None and self.hides in raw else repr(raw)
            raise ValueError(f"{source}={shown}: {e}") from None


def default_spool_dir(environ: Mapping[str, str]) -> Path:
    """$XDG_STATE_HOME/fp8watch, else ~/.local/state/fp8watch."""
    state = environ.get("XDG_STATE_HOME", "")
    home = environ.get("HOME", "") or os.path.expanduser("~")
    return (Path(state) if os.path.isabs(state) else Path(home) / ".local" / "state") / "fp8watch"


@dataclass(frozen=True)
class AgentSettings:
    """What the agent was told. Sizes in bytes, times in seconds."""

    collector: Annotated[
        Url | None, Variable("FP8WATCH_COLLECTOR", "none: spool to disk", "URL of the collector", hides="@")
    ] = None
    token: Annotated[Token | None, Variable("FP8WATCH_TOKEN", "none", "token of scope ingest", hides="")] = None
    token_file: Annotated[
        TokenFile | None, Variable("FP8WATCH_TOKEN_FILE", "none", "file that holds the token; may be rotated")
    ] = None
    spool_dir: Annotated[
        SpoolDir, Variable("FP8WATCH_SPOOL_DIR", "~/.local/state/fp8watch", "folder of ring and spool")
    ] = field(default_factory=lambda: default_spool_dir(os.environ))
    run: Annotated[
        Run | None, Variable("FP8WATCH_RUN", "from the launcher", "id of the run, the same on all ranks")
    ] = None
    every: Annotated[Every, Variable("FP8WATCH_EVERY", "1", "sample each n-th optimizer step")] = 1
    merge_steps: Annotated[
        MergeSteps,
        Variable(
            "FP8WATCH_MERGE_STEPS",
            "16 from 256 ranks on, else 1",
            "steps that share a record where nothing new is said",
        ),
    ] = 0
    recipe: Annotated[RecipeName | None, Variable("FP8WATCH_RECIPE", "attach's", "recipe: " + ", ".join(RECIPES))] = (
        None
    )
    disabled: Annotated[Disabled, Variable("FP8WATCH_DISABLED", "off", "1: everything; stats: the observer only")] = (
        ""  # "" | "1" | "stats"
    )
    ring_bytes: RingBytes = MAX_RING_BYTES
    spool_bytes: Bytes = 1 << 30  # per session
    batch_bytes: Bytes = 256 << 10  # on the wire, aimed at
    batch_interval_s: Seconds = 1.0
    poll_interval_s: Seconds = 0.2  # the training thread never wakes the sender: the sender looks
    request_timeout_s: Seconds = 10.0

    def __post_init__(self) -> None:
        for name, hint in _MADE_BY_HAND.items():
            argument(name, getattr(self, name), hint)

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
                raise ValueError(f"{name}={overrides[name]!r}: unknown setting; known are {', '.join(sorted(known))}")
        values: dict[str, Any] = {k: v for k, v in overrides.items() if v is not None}
        for variable in VARIABLES:
            raw, source = environ.get(variable.name, ""), variable.name
            if variable.field in values:
                raw, source = str(values[variable.field]), variable.field
            if raw or variable.field in values:
                values[variable.field] = variable.read(raw, source)
        if "token" in values and "token_file" in values:
            path = str(values["token_file"])
            raise ValueError(f"FP8WATCH_TOKEN_FILE={path!r}: set together with a token; unset one of the two")
        values.setdefault("spool_dir", default_spool_dir(environ))
        return cls(**values)


def _listed() -> tuple[Variable, ...]:
    found = []
    for name, hint in get_type_hints(AgentSettings, include_extras=True).items():
        for row in getattr(hint, "__metadata__", ()):
            if isinstance(row, Variable):
                given = [kind for kind in get_args(hint.__origin__) if kind is not type(None)]  # of `X | None`: X
                found.append(replace(row, field=name, type=given[0] if given else hint))
    return tuple(found)


VARIABLES = _listed()
"""Every variable of the agent, in the order of the fields."""
_MADE_BY_HAND = {
    "ring_bytes": RingBytes,
    "spool_bytes": Bytes,
    "batch_bytes": Bytes,
    "batch_interval_s": Seconds,
    "poll_interval_s": Seconds,
    "request_timeout_s": Seconds,
}
"""What has no variable, and is set in code."""
