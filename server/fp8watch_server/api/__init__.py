"""The query API under /api/v1, and what people may change through it."""
