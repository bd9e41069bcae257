"""`python -m fp8watch` is `fp8watch`."""

from __future__ import annotations

import sys

from .cli import main

sys.exit(main())
