"""What the collector keeps, and how it is read: tables, the hot path of writing, and the queries."""

from __future__ import annotations
