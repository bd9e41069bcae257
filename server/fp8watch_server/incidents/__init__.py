"""Incidents: findings folded into one failure at one place, with its cause and what to change."""

from __future__ import annotations
