"""Storage: writing batches, compaction, retention, and the queries."""

from __future__ import annotations
