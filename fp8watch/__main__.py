"""`python -m fp8watch` is `fp8watch`."""

from __future__ import annotations

import sys

from fp8watch.cli import main

sys.exit(main())
