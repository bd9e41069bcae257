"""fp8watch's collector: takes batches in, stores them, detects failures and says what to change. No torch in here."""

from __future__ import annotations
