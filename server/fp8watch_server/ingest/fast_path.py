"""A middleware around the router: batches are nine of ten requests, and need none of what the router does.

Shapes:     ASGI
Thread:     event loop

The routes stay for the description of the interface, and are the same functions.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from fp8watch_agent.joined import JOINED_PATH
from fp8watch_server.http.errors import answer_of
from fp8watch_server.ingest.joined import post_joined
from fp8watch_server.ingest.routes import post_batch

_ROUTES = {"/v1/batches": post_batch, JOINED_PATH: post_joined}


class IngestFastPath:
    """Answers batches, alone or several in a request, and passes everything else on."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a batch, or pass on."""
        route = _ROUTES.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if route is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            answer = await route(request)
        except Exception as e:  # noqa: BLE001  what the router's own handlers would make of it
            answer = answer_of(request, e)
        await answer(scope, receive, send)
