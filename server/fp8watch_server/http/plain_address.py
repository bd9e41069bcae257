"""Addresses that no database can look up are refused in front of the routes.

Shapes:     an ASGI middleware
Thread:     event loop
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from fp8watch_server.http.errors import Problem


class PlainAddress:
    """Answers 400 to a NUL in a path or query: PostgreSQL has none in text, and its driver raises."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] == "http" and ("\0" in scope["path"] or b"%00" in scope["query_string"]):
            problem = Problem(
                400, "a NUL in the address", rule="an address is text without NUL", remedy="correct the address"
            )
            await problem.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)
