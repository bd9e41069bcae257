"""Whether what was loaded is what was saved: fingerprints compared at a resume.

Thread:     training, once a load

Weights may be loaded before or after the watch's own state. So those that differ at once are looked at again where the
first optimizer steps: by then everything is loaded, and nothing has been updated. Moments are looked at only then, because
only then the optimizer is known. Delayed scales are loaded with the
watch's state: what differs of them is said at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fp8watch.session.fingerprint import HASHED, MOMENTS, Fingerprint, differences

LOADED = "loaded_"
"""Facts of a session, such as "loaded_weights": names that are not as they were saved."""
AS_SAVED = "as saved"
DELAYED = "delayed"
OF_WEIGHTS = tuple(group for group in HASHED if group != DELAYED)
Facts = Mapping[str, Any]


class CheckpointLoad:
    """The comparison of one watch.

    Args:
        fingerprint: of what is there now; `in_step` where a step runs.
        say: tells people.
        tell: adds facts to the session.
    """

    def __init__(
        self, fingerprint: Callable[..., Fingerprint], say: Callable[[str], None], tell: Callable[[Facts], None]
    ) -> None:
        self._fingerprint, self._say, self._tell = fingerprint, say, tell
        self.pending: Mapping[str, Any] | None = None
        """What is to be held against the weights before their first update."""

    def begin(self, saved: object) -> None:
        """A state has been loaded; one of an older version has no fingerprint."""
        self.pending = None
        if not isinstance(saved, Mapping):
            return
        found = differences(saved, self._fingerprint())
        self._told({DELAYED: found[DELAYED]} if DELAYED in found else {})
        if any(group in found for group in OF_WEIGHTS) or saved.get(MOMENTS):
            self.pending = saved

    def compare_now(self) -> None:
        """Nothing is loaded any more: what differs now is said."""
        saved, self.pending = self.pending, None
        if saved is not None:
            found = differences(saved, self._fingerprint(in_step=True))
            self._told({group: found[group] for group in OF_WEIGHTS if group in found})

    def _told(self, found: Mapping[str, str]) -> None:
        if not found:
            return
        words = "; ".join(f"{group}: {names}" for group, names in found.items())
        self._say(f"what was loaded is not what was saved: {words}")
        facts = {f"{LOADED}{group}": names for group, names in found.items()}
        self._tell(facts | {f"checkpoint.{name}": AS_SAVED for name in facts})
