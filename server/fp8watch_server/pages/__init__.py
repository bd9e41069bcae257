"""fp8watch's own pages: runs, one run, one site, tile map, incident, runbook. No CDN, no build step."""

from __future__ import annotations
