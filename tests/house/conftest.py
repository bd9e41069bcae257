"""The tests in `later` run where a field was put into the table before Python imported it: see test_sketch_fields."""

from __future__ import annotations

import sys

if "house.later_field" not in sys.modules:
    collect_ignore = ["later"]
