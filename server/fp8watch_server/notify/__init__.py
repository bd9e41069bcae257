"""Notification: messages leave the outbox for Slack and webhooks, at least once, and nobody waits for anybody."""

from __future__ import annotations
