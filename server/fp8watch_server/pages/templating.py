"""Jinja environment and page responses: autoescape on, undefined names are errors.

Shapes:     template name, values -> HTMLResponse
Thread:     any
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from fastapi import Request, Response
from fastapi.responses import HTMLResponse, StreamingResponse
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from fp8watch_server.incidents.bidi import visible
from fp8watch_server.pages import assets, fixes, formatting, markdown
from fp8watch_server.pages.error_pages import PageProblem

THEMES = ("dark", "light")
PART = Markup("<!-- -->")
"""Where a page that is sent in parts may be cut; on others a comment."""


class Exact(Markup):
    """Text as it is stored, escaped: for what a form offers and a script sends back, where names must not be spelt otherwise."""


def _exact(value: object) -> Exact:
    return Exact(escape(value))


def _finalize(value: Any) -> Any:
    return value if isinstance(value, Exact) else visible(value)


@lru_cache(maxsize=1)
def environment() -> Environment:
    """The Jinja environment of the pages."""
    env = Environment(
        loader=PackageLoader("fp8watch_server.pages"),
        autoescape=True,
        finalize=_finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters.update(
        number=formatting.number,
        ratio=formatting.ratio,
        octaves=formatting.octaves,
        quantity=formatting.quantity,
        of_field=formatting.of_field,
        field_label=formatting.field_label,
        capitalised=formatting.capitalised,
        nonfinite=formatting.nonfinite,
        ago=formatting.ago,
        clock=formatting.clock,
        cut=formatting.cut,
        whole=formatting.whole,
        in_two=formatting.in_two,
        fix=fixes.render,
        to_copy=fixes.to_copy,
        has_code=fixes.has_code,
        details=formatting.details,
        segment=formatting.segment,
        inline=markdown.inline,
        exact=_exact,
        prose=markdown.prose,
    )
    env.globals.update(static=assets.static_url, plotly_url=assets.plotly_url, part=lambda: PART)
    return env


def _of_request(request: Request) -> dict[str, str]:
    """What every page is told: the theme of its address, and the room that it lies in."""
    theme = request.query_params.get("theme")
    return {"theme": theme if theme in THEMES else "", "room": request.url.path.split("/")[1]}


def page(request: Request, template: str, status_code: int = 200, **values: Any) -> HTMLResponse:
    """Render one page. `?theme=` takes effect before any script has run."""
    html = environment().get_template(template).render(**_of_request(request), **values)
    # A page shows the current data: the back button must not show a stale one.
    return HTMLResponse(html, status_code=status_code, headers={"cache-control": "no-store"})


def page_in_parts(request: Request, template: str, **values: Any) -> Response:
    """Stream one page: each `{{ part() }}` of its template flushes what is rendered so far.

    Errors while the first part is rendered are answered as on any other page; later, the page ends there.
    """
    pieces = environment().get_template(template).generate(**_of_request(request), **values)

    def parts() -> Iterator[str]:
        while piece := "".join(iter(lambda: next(pieces, PART), PART)):
            yield piece

    sent = parts()
    first = next(sent, "")
    return StreamingResponse(
        itertools.chain([first], sent), media_type="text/html", headers={"cache-control": "no-store"}
    )


def problem_page(request: Request, problem: PageProblem) -> HTMLResponse:
    """Render an error as a page."""
    return page(request, "problem.html", status_code=problem.status, problem=problem)
