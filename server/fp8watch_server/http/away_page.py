"""What a browser is shown while the database does not answer: a page that looks again by itself.

Shapes:     the scope of a request -> whether a person asked; the page
Thread:     event loop

It needs nothing that the collector would have to look up: no template, no style sheet, no script.
"""

from __future__ import annotations

from html import escape

from starlette.responses import HTMLResponse
from starlette.types import Scope

AGAIN_S = 3
BUSY = "it is busy, or away"
NOT_PAGES = ("/api/", "/v1/", "/live", "/static/", "/assets/")
_PAGE = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="dark light"><meta http-equiv="refresh" content="{AGAIN_S}"><title>Busy · fp8watch</title>
<style>body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 34em; margin: 18vh auto; padding: 0 16px }}</style></head>
<body><h1>The database does not answer</h1><p>WHY. This page looks again every {AGAIN_S} seconds. What training
sends is kept by its agents until it is back.</p><p><a href="">Look again now</a></p></body></html>
"""


def asked_by_a_person(scope: Scope) -> bool:
    """Whether a browser asked for a page."""
    accepts = dict(scope["headers"]).get(b"accept", b"")
    return scope["method"] == "GET" and b"text/html" in accepts and not scope["path"].startswith(NOT_PAGES)


def away_page(retry_after_s: int, why: str = BUSY) -> HTMLResponse:
    """503, as programs get it, with the reason that they are told."""
    headers = {"Retry-After": str(retry_after_s), "cache-control": "no-store"}
    return HTMLResponse(_PAGE.replace("WHY", escape(why[:1].upper() + why[1:])), status_code=503, headers=headers)
