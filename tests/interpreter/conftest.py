"""The tests in `inside` run where Triton's interpreter was chosen before Python started: see test_in_the_interpreter."""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore = ["inside"]
