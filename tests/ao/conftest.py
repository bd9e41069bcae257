"""Runs of a small model that torchao has converted, through the agent's rows, the wire and the detectors."""

from __future__ import annotations

from canary.conftest import no_onednn, refused_nothing, train  # noqa: F401 - fixtures
