"""`fp8watch grafana push`: the shipped dashboards, put into a Grafana over its API."""

from __future__ import annotations
