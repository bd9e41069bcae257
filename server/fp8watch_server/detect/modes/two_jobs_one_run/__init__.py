"""Two jobs under one run id: mode 26, two-jobs-one-run.

The engine asks `overlap` with each batch.
"""

from __future__ import annotations

from fp8watch_server.detect.mode import Mode
from fp8watch_server.detect.modes.two_jobs_one_run.words import fixes, words

MODE = Mode(
    number=26,
    slug="two-jobs-one-run",
    alternatives=(("recipe-mismatch", "a restart with other settings: the session before it has ended"),),
    words=words,
    fixes=fixes,
    verdict_words={"shared": "Verdict: not FP8. It is about who sends, not about numbers."},
)
