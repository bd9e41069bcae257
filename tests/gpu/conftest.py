"""Tests that need a CUDA device. Without one they are skipped with that reason, and fail where one is required."""

from __future__ import annotations

import os
import zlib

import pytest
import torch

REQUIRED = os.environ.get("FP8WATCH_REQUIRE_GPU") == "1"
SHARD = os.environ.get("FP8WATCH_SHARD", "0/1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, or fail; and keep the share of this process: kernels take seconds to compile, so several compile at once."""
    here = [item for item in items if "/gpu/" in str(item.path)]
    index, count = (int(n) for n in SHARD.split("/"))
    if count > 1:
        items[:] = [item for item in here if zlib.crc32(item.nodeid.encode()) % count == index]
    if torch.cuda.is_available():
        return
    if REQUIRED:
        pytest.exit("FP8WATCH_REQUIRE_GPU=1, and torch sees no CUDA device", returncode=3)
    for item in here:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device (make test-gpu)"))


@pytest.fixture
def hopper() -> None:
    """Only where torch._scaled_mm has 1×128 and 128×128 scales."""
    from fp8watch.kernels import scaled_mm

    reason = scaled_mm.probe(torch.device("cuda"))
    if reason is not None:
        pytest.skip(reason)
