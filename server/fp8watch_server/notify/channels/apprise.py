"""Any service that the package apprise knows, as a channel: Discord, Teams, mail, and some hundred others.

Shapes:     outbox payload -> whatever the service takes
Thread:     dispatcher, one per channel

The package is optional: `pip install 'fp8watch[apprise]'`. It does its own networking, which `outgoing` holds to the
rules of our own; services that connect in threads of their own, or reach no network, are refused. It says no more than
whether it worked, so an HTTP status is read out of its log, and there is no Idempotency-Key: after a crash a message may
come twice without being told from the first.
"""

from __future__ import annotations

import importlib
import logging
import re
import threading
import warnings
from dataclasses import dataclass, field
from typing import Any

from fp8watch_server.incidents.payload import MessagePayload
from fp8watch_server.notify import plain
from fp8watch_server.notify.channels.base import Channel, Pace, channel
from fp8watch_server.notify.channels.slack import SLACK_PACE
from fp8watch_server.notify.egress import watched
from fp8watch_server.notify.safe_http import Answer, Unreachable
from fp8watch_server.settings.webhook_url import TargetError

UNCHECKED = frozenset({"mqtt", "mqtts", "xmpp", "xmpps", "matrix", "matrixs"})
LOCAL = frozenset({"dbus", "glib", "gnome", "kde", "macosx", "qt", "syslog", "windows"})
MAX_REASON_CHARS = 200
MIN_SECRET_CHARS = 12
"""Parts of an address from this length on are taken for tokens; shorter ones are words that logs need."""
_STATUS = re.compile(r"error=(\d{3})\b")
_TYPE = {"critical": "failure", "warning": "warning", "info": "info", "resolved": "success"}


@channel("apprise")
@dataclass(frozen=True)
class AppriseChannel:
    """One address of apprise.

    Raises:
        TargetError: the package is not there, or the address cannot be used; never with the address itself.
    """

    url: str
    name: str = "apprise"
    pace: Pace = SLACK_PACE
    _service: Any = field(
        init=False, repr=False, compare=False
    )  # one for all messages: it keeps the service's own pace

    def __post_init__(self) -> None:
        object.__setattr__(self, "_service", _service(self.url))

    @classmethod
    def of(cls, url: str, **given: Any) -> Channel:
        """From what a routes file gives. Raises TargetError."""
        return cls(url, **given)

    def __repr__(self) -> str:
        return f"AppriseChannel({self.masked!r})"

    @property
    def masked(self) -> str:
        """Where it goes, without the secret."""
        return f"{_scheme(self.url)}://…"

    @property
    def secrets(self) -> tuple[str, ...]:
        """What no log and no error may show."""
        parts = re.split(r"[/:@?&=]+", self.url.partition("://")[2])
        tokens = {p for p in parts if len(p) >= MIN_SECRET_CHARS and not re.fullmatch(r"[0-9.]+", p)}
        return (self.url, *sorted(tokens, key=len, reverse=True))

    def send(self, payload: MessagePayload, kind: str, idempotency_key: str, now: float) -> Answer:
        """One attempt."""
        message = plain.message(payload, kind)
        with _Heard() as heard, watched() as watch:
            done = self._service.notify(
                title=message.title,
                body=message.text,
                notify_type=_TYPE.get(message.level, "info"),
                body_format="text",
            )
        if watch.refused is not None:
            raise TargetError(f"{self.masked}: {watch.refused}")
        if done:
            return Answer(200, None, "")
        reason = heard.last
        for secret in self.secrets:
            reason = reason.replace(secret, "***")
        if (status := _STATUS.search(reason)) is not None:
            return Answer(int(status[1]), None, reason[:MAX_REASON_CHARS])
        late = "no answer in time" if watch.late else reason or "apprise could not deliver"
        raise Unreachable(f"{self.masked}: {late[:MAX_REASON_CHARS]}")


class _Heard(logging.Handler):
    """What apprise logs in this thread while it sends: the only place where it says why."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last = ""
        self._thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the last line."""
        if record.thread == self._thread:
            self.last = record.getMessage()

    def __enter__(self) -> _Heard:
        logging.getLogger("apprise").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("apprise").removeHandler(self)


def _scheme(url: str) -> str:
    found = re.match(r"\s*([A-Za-z0-9_+.-]{1,32})://", url)
    return found[1].lower() if found else "apprise"


def _service(url: str) -> Any:
    """The plugin of an address. Redirects are not followed."""
    scheme = _scheme(url)
    if scheme in UNCHECKED:
        raise TargetError(
            f"{scheme}:// connects where it cannot be checked; choose a service that is reached over HTTP"
        )
    if scheme in LOCAL:
        raise TargetError(f"{scheme}:// shows messages on the collector's own machine; choose a service on the network")
    quiet = logging.getLogger("apprise")
    level, quiet.level = quiet.level, logging.CRITICAL + 1  # it logs what is wrong with an address, address and all
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of its imports: nothing that a user could act upon
            apprise = importlib.import_module("apprise")
            asset = apprise.AppriseAsset(app_id="fp8watch", app_desc="fp8watch", async_mode=False)
            made = apprise.Apprise.instantiate(url, asset=asset, suppress_exceptions=True)
    except ImportError:
        raise TargetError(
            "kind apprise needs the package apprise, which is not installed; run pip install 'fp8watch[apprise]'"
        ) from None
    finally:
        quiet.setLevel(level)
    if made is None:
        raise TargetError(
            f"apprise cannot use an address that begins with {scheme}://; its documentation says how each service is written"
        )
    made.redirects = False
    return made
