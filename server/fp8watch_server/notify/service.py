"""All that sends messages in a collector: channels, routes, the dispatcher, and the watch over silent runs.

Shapes:     Settings -> threads
Thread:     start of the process
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from sqlalchemy.engine import Engine

from fp8watch_server.http import logs
from fp8watch_server.notify.channels import channels_of
from fp8watch_server.notify.outbox import Dispatcher
from fp8watch_server.notify.routes import Routing
from fp8watch_server.notify.routes_file import RoutesError, load_routes
from fp8watch_server.notify.stale_run import StalledWatch
from fp8watch_server.settings import Settings

_log = logging.getLogger(__name__)


def routing_of(settings: Settings, environ: Mapping[str, str] = os.environ) -> tuple[Routing, list[str]]:
    """The channels of the environment, or those and the ones of the routes file; and warnings.

    Raises:
        RoutesError: the file cannot be used.
    """
    channels = channels_of(settings)
    if not settings.routes:
        return Routing(tuple(channels)), []
    try:
        return load_routes(Path(settings.routes), environ, channels)
    except OSError as e:
        reason = f"{settings.routes}: cannot be read ({e.strerror}); name a readable file in FP8WATCH_ROUTES"
        raise RoutesError([reason]) from e
    except RoutesError as e:
        raise RoutesError([f"{settings.routes}: {p}" for p in e.problems]) from None


class Sending:
    """What the application starts, wakes and stops.

    Raises:
        RoutesError: the routes file cannot be used.
    """

    def __init__(self, engine: Engine, settings: Settings, environ: Mapping[str, str] = os.environ) -> None:
        routing, warnings = routing_of(settings, environ)
        logs.hide(routing.secrets)
        for warning in warnings:
            _log.warning("%s: %s", settings.routes, warning)
        self.dispatcher = Dispatcher(engine, routing.channels, route=routing.route)
        self._stalled: StalledWatch | None = None
        if routing.stalled_after_s:
            self._stalled = StalledWatch(
                engine, routing.stalled_after_s, public_url=settings.public_url, wake=self.dispatcher.wake
            )

    def start(self) -> None:
        """Start the threads."""
        self.dispatcher.start()
        if self._stalled is not None:
            self._stalled.start()

    def wake(self) -> None:
        """The outbox has something new."""
        self.dispatcher.wake()

    def stop(self) -> None:
        """End them; what is not sent stays in the outbox."""
        if self._stalled is not None:
            self._stalled.stop()
        self.dispatcher.stop()
