"""One file of one incident: HTML with its pictures and style inside, that loads nothing.

Shapes:     GET -> text/html, to be saved
Thread:     worker threads of the server: one database connection a request
"""

from __future__ import annotations

import re
import time

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from markupsafe import Markup

from fp8watch_agent.version import __version__
from fp8watch_server.http.databases import connect_for
from fp8watch_server.pages import assets, lookup
from fp8watch_server.pages.report_sections import SECTIONS, subject_of
from fp8watch_server.pages.templating import environment

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

router = APIRouter(include_in_schema=False)


@router.get("/incidents/{incident_id}/report.html")
def report(request: Request, incident_id: str, redact: str = "") -> HTMLResponse:
    """The incident as a file. `?redact=1`: with other names of runs, modules, hosts, people, batches and logged scalars."""
    with connect_for(request) as conn:
        incident = lookup.find_incident(conn, incident_id)
        of = subject_of(conn, incident, redact=redact not in ("", "0"))
        sections = [section for make in SECTIONS if (section := make(of)) is not None]
    theme = request.query_params.get("theme")
    html = (
        environment()
        .get_template("report.html")
        .render(
            incident=of.incident,
            run=of.run,
            sections=sections,
            redacted=of.redact,
            policy=POLICY,
            theme=theme if theme in ("dark", "light") else "light",
            style=Markup(assets.static_text("fp8watch.css")),
            made_at=time.time(),
            version=__version__,
        )
    )
    name = re.sub(r"[^\w.-]", "-", f"fp8watch-{incident['mode']}-step-{incident['first_step']}")[:120]
    disposition = f'attachment; filename="{name}{"-redacted" if of.redact else ""}.html"'
    return HTMLResponse(html, headers={"cache-control": "no-store", "content-disposition": disposition})
