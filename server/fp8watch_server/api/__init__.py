"""The query API under /api/v1, and the incident actions."""
