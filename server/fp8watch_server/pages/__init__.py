"""fp8watch's own pages: runs, one run, one site, tile map, incident, runbook. Server-rendered, no CDN, no build step."""

from __future__ import annotations
